"""`python -m vqprompt` does the same as the command `vqprompt`."""

from vqprompt.commands.app import main

if __name__ == "__main__":
    main()

"""`python -m vqprompt`, where the command itself is not on the path."""

from vqprompt.commands.main import main

main()

"""`python -m vqprompt`, where the command itself is not on the path."""

from vqprompt.cli import main

main()

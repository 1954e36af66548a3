"""`vqprompt example`."""

from __future__ import annotations

from pathlib import Path

from vqprompt.commands.console import print_plain
from vqprompt.commands.options import argument


def example(folder: Path = argument("A new folder, such as drawings.")) -> None:
    """Write real drawings into a folder, to try everything without images of your own.

    [bold]vqprompt example drawings[/bold]
    """
    from vqprompt.product.example import write_example

    write_example(folder)
    print_plain(f"wrote {folder}/first (five classes), {folder}/later (one more) and {folder}/ask. Now try:\n")
    for command in (
        f"learn my.vqp {folder}/first --size 112   # teach five classes; 112 px are enough for drawings",
        f"learn my.vqp {folder}/later              # next month: one more",
        f"predict my.vqp {folder}/ask              # a house, an umbrella, and something it was never taught",
    ):
        print_plain(f"  vqprompt {command}")

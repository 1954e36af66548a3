"""The terminal: one console for output, one for errors. Control characters in file names are shown as escapes."""

from __future__ import annotations

from rich.console import Console

from vqprompt.core.errors import printable

console = Console()


def print_error(text: str) -> None:
    """One message on standard error, with `error:` in red."""
    stderr = Console(stderr=True)
    stderr.print("[red]error:[/red]", end=" ")
    stderr.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_plain(text: str, style: str | None = None) -> None:
    """Text as it is: brackets are no markup, lines are not wrapped."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

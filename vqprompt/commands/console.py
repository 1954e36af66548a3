"""The terminal: one console for output, one for errors, and text that cannot confuse it."""

from __future__ import annotations

from rich.console import Console

from vqprompt import errors

console = Console()


def printable(text: str) -> str:
    """The text without control characters, which a file's name may contain and which could move the cursor."""
    shared = getattr(errors, "printable", None)
    if shared is not None:
        return shared(text)
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_error(text: str) -> None:
    """One message on standard error, with `error:` in red."""
    stderr = Console(stderr=True)
    stderr.print("[red]error:[/red]", end=" ")
    stderr.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_plain(text: str, style: str | None = None) -> None:
    """Text as it is: brackets are no markup, lines are not wrapped."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

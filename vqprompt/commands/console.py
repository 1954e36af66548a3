"""The terminal: one console for output, one for errors. Control characters in names that others gave are shown as
escapes, and characters that the terminal cannot show as well."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vqprompt.core.words import printable


class SafeConsole(Console):
    """No text can move the cursor or change the terminal, wherever it comes from."""

    def render_str(self, text: str, **named: Any) -> Text:
        return super().render_str(printable(text), **named)


console = SafeConsole()


@dataclass
class Running:
    """The command that runs. quiet: no progress and no notes. verbose: errors come with a traceback. out: where it
    writes."""

    quiet: bool = False
    verbose: bool = False
    out: Path | None = None


running = Running()


def print_error(text: str, mark: str = "[red]error:[/red]") -> None:
    """One message on standard error."""
    stderr = SafeConsole(stderr=True)
    stderr.print(mark, end=" ")
    stderr.print(text, markup=False, highlight=False, soft_wrap=True)


def print_warning(text: str) -> None:
    """About something that does not end the command."""
    print_error(text, "[yellow]warning:[/yellow]")


def print_plain(text: str, style: str | None = None) -> None:
    """Text as it is: brackets are no markup, lines are not wrapped."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_note(text: str) -> None:
    """What a person may like to know, but did not ask for."""
    if not running.quiet:
        print_plain(f"note: {text}")


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> Table:
    """right: headings of the columns that are aligned to the right. Names are never wrapped."""
    table = Table(show_edge=False, header_style="bold")
    for heading in headings:
        names = heading in ("name", "method")
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=names)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_json(value: Any, indent: int | None = None) -> None:
    """JSON on standard output, for other programs to read. What a terminal cannot show becomes a JSON escape."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, ensure_ascii=not unicode, indent=indent)
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text), flush=True)


def accept_all_characters() -> None:
    """Print a character that the terminal or the file cannot take as an escape, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

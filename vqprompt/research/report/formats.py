"""Numbers as people read them. A number that is not known is a dash."""

from __future__ import annotations

from vqprompt.core import words

UNKNOWN = "–"


def fixed(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}\N{NO-BREAK SPACE}%"


def short(count: int) -> str:
    """22056576 → 22.1 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}\N{NO-BREAK SPACE}{unit}"
    return str(count)


def duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else words.duration(seconds)

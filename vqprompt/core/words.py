"""Counts, durations and names, as messages say them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """`1 class`, `2 classes`, `3 new images`. noun: in the singular, with a regular plural."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def shorten(names: Iterable[str], most: int = 5) -> str:
    """The first names in quotes, and how many there are in total."""
    listed = list(names)
    return ", ".join(map(repr, listed[:most])) + (f" … ({len(listed)} in total)" if len(listed) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'length'? `, if a name is close to a known one, and which there are."""
    names = list(known)
    near = nearest_name(name, names)
    return (f"did you mean {near!r}? " if near else "") + f"there are {', '.join(names)}"


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The name that somebody may have meant who wrote another one."""
    folded = {other.casefold(): other for other in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def look_misspelled(one: str, other: str) -> bool:
    """Whether two names may be spellings of the same word, such as `elefant` and `elephant`: they differ in one word,
    which is nearly the same. The names of no two of 200 species of birds are."""
    words = [re.findall(r"[^\W\d_]+|\d+", name.casefold()) for name in (one, other)]
    if len(words[0]) != len(words[1]):
        words = [["".join(parts)] for parts in words]
    pairs = [pair for pair in zip(*words, strict=True) if pair[0] != pair[1]]
    if len(pairs) != 1 or not all(word.isalpha() for word in pairs[0]):
        return False
    short, long = sorted(pairs[0], key=len)
    needed = 0.8 if len(long) > 5 else 0.88  # `house` and `horse` are two words
    return long == f"{short}s" or difflib.SequenceMatcher(None, short, long).ratio() >= needed


def duration(seconds: float) -> str:
    """`2.4 s`, `35 s`, `1 min 15 s`, `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def printable(text: str) -> str:
    """Text that is safe to print: control characters and undecodable bytes of file names become escapes (`\\x1b`).

    Line breaks and tabs stay, because our own messages use them.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

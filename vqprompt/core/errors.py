"""Errors that a user can fix: each message names what was given, what was expected and the way out."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and only some commands need it
    from pydantic import ValidationError


def explain(error: ValidationError, what: str) -> str:
    """A pydantic error as one line: for each field its name, what was given and what was expected."""
    lines = []
    for e in error.errors():
        if not e["loc"] and "error" in e.get("ctx", {}):  # a check of several fields names them itself
            lines.append(str(e["ctx"]["error"]))
            continue
        name = ".".join(str(part) for part in e["loc"])
        given = "" if e["type"] == "extra_forbidden" else f" (given: {shown(e['input'])})"
        lines.append(f"{name}: {'no such setting' if e['type'] == 'extra_forbidden' else e['msg']}{given}")
    return f"{what}: " + "; ".join(lines)


def shown(value: object, limit: int = 200) -> str:
    """A value as a message quotes it: not longer than a line or two, whatever was given."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list in a list in a list …
        return "too long to show"
    return text if len(text) <= limit else f"{text[:limit]}…"


class UserError(ValueError):
    """Shown on the command line as a message, without a traceback."""


class ImageError(UserError):
    """An image, folder or archive that cannot be used as it is."""


def missing(path: object, wanted: str, advice: str = "check the path") -> ImageError:
    """About a path that is not there."""
    if is_url(path):
        url = re.sub(":/+", "://", str(path), count=1)
        return ImageError(f"{url}: this is a URL; download it first, and give the files or folders on this machine")
    return ImageError(f"{path}: no such {wanted}; {advice}")


def is_url(path: object) -> bool:
    """Also if it was made a path, which has only one slash left of `://`."""
    return re.match(r"\w{2,}:/", str(path)) is not None


def number_from_environment(variable: str, default: float, zero: bool = False) -> float:
    """What an environment variable says; the default where it is not set. zero: whether it may be 0."""
    text = os.environ.get(variable, "").strip()
    try:
        value = float(text or default)
    except ValueError:
        value = math.nan
    if value > 0 or (zero and value == 0):
        return value
    example = default if math.isfinite(default) else 50
    raise UserError(f"{variable}={text!r}: give a number {'from 0 on' if zero else 'above 0'}, such as {example:g}")


class WriteError(UserError, OSError):
    """A file that cannot be written: the disk is full, or we may not write to the folder."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, not ours, or made for something else."""


class PastImagesError(UserError):
    """Training images were read of a task that is not being learned now."""

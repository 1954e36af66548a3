"""Errors that are the user's to mend: each names what was given, what was wanted and the way out."""

from __future__ import annotations

from pydantic import ValidationError


def explain(error: ValidationError, what: str) -> str:
    """A pydantic error as one line a field: which, what was given, what was wanted."""
    lines = []
    for e in error.errors():
        name = ".".join(str(part) for part in e["loc"])
        given = "" if e["type"] == "extra_forbidden" else f" (given: {e['input']!r})"
        lines.append(f"{name}: {'no such setting' if e['type'] == 'extra_forbidden' else e['msg']}{given}")
    return f"{what}: " + "; ".join(lines)


class UserError(ValueError):
    """Shown on the command line as its message alone, without a traceback."""


class ImageError(UserError):
    """An image, folder or archive that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint that is missing, half-written, foreign or made for something else."""


class PastImagesError(UserError):
    """Training images of a task that is not being learned now were asked for."""

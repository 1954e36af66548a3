"""What the server uses of a model's older versions, which are in the model's file. To be replaced by `Model`'s own."""

from __future__ import annotations

from typing import Any

from vqprompt.product.model.answers import describe
from vqprompt.product.model.model import Model
from vqprompt.product.model.teaching import Taught


def versions(model: Model) -> list[dict[str, Any]]:
    """All versions in the file, oldest first; the last one is the model itself."""
    past = () if model._stored is None else model._stored.past
    histories = [content.history for content in (*past, model.knowledge)]
    return [
        {"number": number, "date": history[-1]["date"], "description": describe(history[-1])}
        if history
        else {"number": number, "date": None, "description": "nothing learned yet"}
        for number, history in enumerate(histories, start=1)
    ]


def can_undo(model: Model) -> int:
    return len(versions(model)) - 1


def undo(model: Model, steps: int) -> list[str]:
    return [model.undo() for _ in range(steps)]


def return_to(model: Model, number: int) -> None:
    undo(model, len(versions(model)) - number)


def taught(found: Taught) -> dict[str, Any]:
    return {
        "images": found.images, "new_classes": found.new_classes, "grown_classes": found.grown_classes,
        "known_images": found.known_images, "copies": found.copies, "broken": found.broken, "accuracy": found.accuracy,
        "accuracy_before": found.accuracy_before,
        "suffering": [{"class": n, "before": b, "now": a} for n, b, a in found.suffering], "notes": found.notes,
        "seconds": round(found.seconds, 2), "effort": found.effort,
    }  # fmt: skip

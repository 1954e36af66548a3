"""Messages and progress of the commands for a model of your own."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt.commands.console import print_plain
from vqprompt.core.words import counted, duration

if TYPE_CHECKING:
    from vqprompt.core.progress import Report
    from vqprompt.product.model.model import Model, Plan, Taught


def announce(plan: Plan) -> None:
    new = f" ({len(plan.new_classes)} new)" if plan.new_classes else ""
    effort = "" if plan.effort == "instant" else f" at effort {plan.effort}"
    what = f"{counted(plan.images, 'image')} of {counted(plan.classes, 'class')}{new}{effort}"
    print(f"{what}: about {duration(plan.seconds)}", file=sys.stderr, flush=True)


def tell(found: Taught, model: Model, path: Path, noticed: str | None) -> None:
    for note in found.notes:
        print_plain(f"note: {note}")
    if found.known_images:
        print_plain(f"note: left out {counted(found.known_images, 'image')} that the model knows already")
    if found.copies:
        print_plain(f"note: left out {counted(found.copies, 'repeated image')}")
    for message in found.broken[:10]:
        print_plain(f"left out: {message}")
    if len(found.broken) > 10:
        print_plain(f"left out: … and {len(found.broken) - 10} more")
    if not found.images:
        print_plain("nothing was learned; the model is as it was")
        return
    grown = f", more images of {counted(len(found.grown_classes), 'known class')}" if found.grown_classes else ""
    print_plain(
        f"learned {counted(found.images, 'image')} in {duration(found.seconds)}: "
        f"{counted(len(found.new_classes), 'new class')}{grown}; {path} knows {counted(len(model.classes), 'class')}"
    )
    if found.accuracy is not None:
        before = f" (before: {percent(found.accuracy_before)})" if found.accuracy_before is not None else ""
        print_plain(f"accuracy now: {percent(found.accuracy)} on images it has not learned{before}")
    for name, was, now in found.suffering[:5]:
        print_plain(f"  {name} is recognized less often: {percent(was)} → {percent(now)}")
    if noticed is not None:
        print_plain(f"note: {noticed}")


def as_dict(found: Taught) -> dict[str, Any]:
    return {
        "images": found.images, "new_classes": found.new_classes, "grown_classes": found.grown_classes,
        "known_images": found.known_images, "copies": found.copies, "broken": found.broken, "accuracy": found.accuracy,
        "accuracy_before": found.accuracy_before,
        "suffering": [{"class": n, "before": b, "now": a} for n, b, a in found.suffering], "notes": found.notes,
        "seconds": round(found.seconds, 2), "effort": found.effort,
    }  # fmt: skip


def progress_shown() -> AbstractContextManager[Report]:
    """On standard error, because standard output may be read by other programs."""
    from rich.console import Console

    from vqprompt.commands.progress_bar import progress_bar

    return progress_bar(Console(stderr=True))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"

"""Messages of the commands for a model of your own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vqprompt.commands.console import print_json, print_note, print_plain, running
from vqprompt.core.words import counted, duration

if TYPE_CHECKING:
    from vqprompt.product.model.correcting import Correction
    from vqprompt.product.model.model import Model
    from vqprompt.product.model.teaching import LostAnswers, Plan, Taught


def announce(plan: Plan) -> None:
    if running.quiet:
        return
    new = f" ({len(plan.new_classes)} new)" if plan.new_classes else ""
    effort = "" if plan.effort == "instant" else f" at effort {plan.effort}"
    classes = f"{counted(plan.classes, 'class')}{new}{effort}" if plan.classes else "none of the classes"
    what = f"{counted(plan.images, 'image')} of {classes}"
    says = f"about {duration(plan.seconds)}"
    if plan.gain is not None:
        worth = "not worth it" if plan.effort == "instant" else "worth it"
        says = f"training takes {says} and may bring {100 * plan.gain:.1f} points of accuracy: {worth}"
    print(f"{what}: {says}", file=sys.stderr, flush=True)


def tell(taught: Taught, model: Model, path: Path, noticed: str | None) -> None:
    for note in taught.notes:
        print_note(note)
    if taught.known_images:
        print_note(f"left out {counted(taught.known_images, 'image')} that the model knows already")
    if taught.copies:
        print_note(f"left out {counted(taught.copies, 'repeated image')}")
    for message in taught.broken[:10]:
        print_plain(f"left out: {message}")
    if len(taught.broken) > 10:
        print_plain(f"left out: … and {len(taught.broken) - 10} more")
    if taught.changes is not None:
        print_plain(f"preview, nothing is changed: {taught.changes}")
        print_warnings(taught.warnings)
        return
    if not taught.images:
        print_plain("nothing was learned; the model is as it was")
        return
    against = f", {counted(taught.counterexamples, 'counterexample')}" if taught.counterexamples else ""
    grown = f", more images of {counted(len(taught.grown_classes), 'known class')}" if taught.grown_classes else ""
    known = counted(len(model.classes), "class")
    print_plain(
        f"learned {counted(taught.images, 'image')} in {duration(taught.seconds)}: "
        f"{counted(len(taught.new_classes), 'new class')}{grown}{against}; {path} knows {known}"
    )
    if taught.accuracy is not None:
        before = f" (before: {percent(taught.accuracy_before)})" if taught.accuracy_before is not None else ""
        sure = percent(taught.accuracy, taught.accuracy_interval)
        print_plain(f"accuracy now: {sure} on images it has not learned{before}")
    for one in taught.suffering[:5]:
        print_plain(f"  {one.name} is recognized less often: {percent(one.before)} → {percent(one.now)}")
    print_warnings(taught.warnings, path)
    if noticed is not None:
        print_note(noticed)


def tell_correction(what: str, done: Correction, path: Path, preview: bool, as_json: bool) -> None:
    if as_json:
        print_json(done.to_json())
        return
    for note in done.notes:
        print_note(note)
    if not done.images:
        return
    print_plain(f"{'preview, nothing is changed: ' if preview else ''}{what}")
    print_plain(str(done.changes))
    if done.accuracy is not None:
        sure = percent(done.accuracy, done.accuracy_interval)
        print_plain(f"accuracy: {sure} (before: {percent(done.accuracy_before)})")
    print_warnings(done.warnings, None if preview else path)


def print_warnings(warnings: Sequence[LostAnswers], path: Path | None = None) -> None:
    """path: of a model that was changed, so that it can be undone."""
    for warning in warnings[:5]:
        print_plain(f"warning: {warning}")
    if warnings and path is not None:
        print_plain(f"to take this back: vqprompt undo {path}")


def percent(share: float | None, interval: Sequence[float] | None = None) -> str:
    """interval: where the share is, 19 times in 20."""
    sure = f" ({interval[0]:.0%} to {interval[1]:.0%})" if interval else ""
    return "–" if share is None else f"{share:.1%}{sure}"

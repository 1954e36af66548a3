"""Messages and progress of the commands for a model of your own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vqprompt.commands.console import print_plain
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.core.progress import Progress, Report
    from vqprompt.product.model.model import Model
    from vqprompt.product.model.teaching import Plan, Taught

SECONDS_BETWEEN_LINES = 5.0  # of progress, into a file or pipe


def announce(plan: Plan) -> None:
    new = f" ({len(plan.new_classes)} new)" if plan.new_classes else ""
    effort = "" if plan.effort == "instant" else f" at effort {plan.effort}"
    what = f"{counted(plan.images, 'image')} of {counted(plan.classes, 'class')}{new}{effort}"
    print(f"{what}: about {duration(plan.seconds)}", file=sys.stderr, flush=True)


def tell(taught: Taught, model: Model, path: Path, noticed: str | None) -> None:
    for note in taught.notes:
        print_plain(f"note: {note}")
    if taught.known_images:
        print_plain(f"note: left out {counted(taught.known_images, 'image')} that the model knows already")
    if taught.copies:
        print_plain(f"note: left out {counted(taught.copies, 'repeated image')}")
    for message in taught.broken[:10]:
        print_plain(f"left out: {message}")
    if len(taught.broken) > 10:
        print_plain(f"left out: … and {len(taught.broken) - 10} more")
    if not taught.images:
        print_plain("nothing was learned; the model is as it was")
        return
    grown = f", more images of {counted(len(taught.grown_classes), 'known class')}" if taught.grown_classes else ""
    print_plain(
        f"learned {counted(taught.images, 'image')} in {duration(taught.seconds)}: "
        f"{counted(len(taught.new_classes), 'new class')}{grown}; {path} knows {counted(len(model.classes), 'class')}"
    )
    if taught.accuracy is not None:
        before = f" (before: {percent(taught.accuracy_before)})" if taught.accuracy_before is not None else ""
        print_plain(f"accuracy now: {percent(taught.accuracy)} on images it has not learned{before}")
    for one in taught.suffering[:5]:
        print_plain(f"  {one.name} is recognized less often: {percent(one.before)} → {percent(one.now)}")
    if noticed is not None:
        print_plain(f"note: {noticed}")


@contextmanager
def progress_shown() -> Iterator[Report]:
    """A live bar in a terminal; lines with the remaining time in a file or pipe. All of it on standard error."""
    from rich.console import Console

    from vqprompt.commands.progress_bar import live_bars

    console = Console(stderr=True)
    if console.is_terminal:
        with live_bars(console) as bar:
            line = bar.add_task("starting", total=None)

            def live(event: Progress) -> None:
                bar.update(
                    line, completed=event.done, total=event.total or None, description=event.detail or str(event.stage)
                )

            yield live
        return
    started: dict[str, float] = {}
    last = 0.0

    def lines(event: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        begun = started.setdefault(event.stage, now)
        first = begun == now
        if event.done < event.total and (now - last < SECONDS_BETWEEN_LINES or first):
            if first:
                last = now
            return
        if event.done >= event.total and now - begun < SECONDS_BETWEEN_LINES:
            return
        last = now
        share = event.done / event.total if event.total else 0
        remaining = (now - begun) / max(event.done, 1) * (event.total - event.done)
        what = event.detail or str(event.stage)
        print(
            f"{what}: {share:.0%} done, {duration(now - begun)} elapsed, "
            f"{duration(remaining)} remaining", file=sys.stderr, flush=True,
        )  # fmt: skip

    yield lines


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"

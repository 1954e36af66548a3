"""Progress of the commands for a model of one's own: a live bar in a terminal, lines in a file or pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vqprompt.progress import Progress, Report

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress_lines() -> Iterator[Report]:
    """A live bar in a terminal; lines with the remaining time in a file or pipe. All of it on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as LiveBar

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with LiveBar(*columns, console=console, transient=True) as bar:
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
        remaining = (now - begun) / max(event.done, 1) * (event.total - event.done)
        what = event.detail or str(event.stage)
        print(
            f"{what}: {event.done:.0f} of {event.total:.0f}, {duration(now - begun)} so far, "
            f"{duration(remaining)} remaining", file=sys.stderr, flush=True,
        )  # fmt: skip

    yield lines


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"

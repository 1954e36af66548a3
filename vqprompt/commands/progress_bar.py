"""Progress for people: live bars in a terminal, plain lines in a file or pipe. Short work prints no line.

`run`, `demo`, `learn`, `check` and `test` show one bar, `bench run` one bar per run in progress. All of them show how
much is done, the time elapsed and the time remaining.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from vqprompt.commands.console import running
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.words import duration, printable

if TYPE_CHECKING:
    from rich.progress import Task

SECONDS_BETWEEN_LINES = 10.0
SPEED_PERIOD = 3600.0  # seconds of which the speed is the average; one epoch may take minutes


@dataclass
class Bar:
    """The bar of some work, and what is needed to print a line about it now and then."""

    rich: Task  # knows how much is done, the time elapsed and the time remaining
    last_line: float  # when
    stage: Stage | None = None
    task: int | None = None

    def is_line_due(self, event: Progress, now: float) -> bool:
        """Into a file: one line per task, and one after every ten seconds."""
        new_task = event.task is not None and event.task != self.task
        if not new_task and now - self.last_line < SECONDS_BETWEEN_LINES:
            return False
        self.last_line, self.task = now, event.task
        return True


class Bars:
    """Bars by name, shown inside `with bars.live:`; at its end bars disappear, lines stay."""

    def __init__(self, console: Console) -> None:
        from rich import progress as rich  # slow to import, and most commands show no bar

        self.console = console
        self.live = rich.Progress(  # the description comes last: a narrow terminal cuts off the end of a line
            rich.BarColumn(20), rich.TaskProgressColumn(), rich.TimeElapsedColumn(), rich.TextColumn("elapsed,"),
            rich.TimeRemainingColumn(), rich.TextColumn("remaining"),
            rich.TextColumn("{task.description}", markup=False),
            console=console, transient=True, disable=running.quiet or not console.is_terminal,
            speed_estimate_period=SPEED_PERIOD,
        )  # fmt: skip
        self.bars: dict[str, Bar] = {}

    def start(self, name: str, total: float | None = None, where: str = "") -> None:
        """where: the machine, if it is another one."""
        starting = f"starting on {where}" if where else "starting"
        text = printable(f"{name} · {starting}" if name else starting)
        self.live.add_task(text, total=total)
        self.bars[name] = Bar(self.live.tasks[-1], self.live.get_time())

    def show(self, name: str, event: Progress) -> None:
        if name not in self.bars:  # of a run on another machine, the start may have been missed
            self.start(name)
        bar, text = self.bars[name], printable(f"{name} · {event}" if name else str(event))
        stage = event.stage if event.task is None else Stage.LEARNING  # a run's events are about all of its work
        if stage is not bar.stage:
            self._begin(bar, stage)
        self.live.update(bar.rich.id, completed=event.done, total=event.total or None, description=text)
        if not self.console.is_terminal and not running.quiet and bar.is_line_due(event, self.live.get_time()):
            text += f", {event.done / event.total:.0%} done" if event.total else ""
            text += f", {duration(bar.rich.elapsed or 0)} elapsed"
            remaining = bar.rich.time_remaining
            text += f", {duration(remaining)} remaining" if remaining is not None else ""
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _begin(self, bar: Bar, stage: Stage) -> None:
        """Forget the speed of the stage before, and that it was finished; the time elapsed goes on."""
        started = bar.rich.start_time
        self.live.reset(bar.rich.id)
        bar.rich.start_time, bar.rich.total, bar.stage = started, None, stage

    def set(self, name: str, completed: float) -> None:
        """For a bar that gets no events, such as the one of all runs together."""
        self.live.update(self.bars[name].rich.id, completed=completed, description=printable(name))

    def remove(self, name: str) -> None:
        if name in self.bars:
            self.live.remove_task(self.bars.pop(name).rich.id)


@contextmanager
def progress_bar(console: Console | None = None, title: str = "") -> Iterator[Report]:
    """One bar, and the function that takes its events. Without a console it is on standard error, because standard
    output may be read by other programs."""
    bars = Bars(console or Console(stderr=True))
    with bars.live:
        bars.start(title)
        yield lambda event: bars.show(title, event)

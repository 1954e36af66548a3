"""Progress of long work: one event type for every layer, from decoding an image to a whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """What is being done; the value is what people read."""

    STARTING = "starting"
    DOWNLOADING = "downloading"
    DECODING = "decoding images"
    LEARNING = "learning"
    STATISTICS = "taking statistics"
    TESTING = "testing"


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of work; a total of 0 means that it is not known.

    A stage reports its own work. A run reports the work of all its tasks, and the current task.
    """

    stage: Stage
    done: float = 0
    total: float = 0
    task: int | None = None  # from 0
    tasks: int | None = None
    detail: str = ""  # what is done, more exactly; of a download, the file's name

    def __str__(self) -> str:
        """`task 3/10 · learning`, `downloading cub.tgz 17/90`."""
        if self.task is not None:
            return f"task {self.task + 1}/{self.tasks} · {self.stage}"
        count = f" {self.done:.0f}/{self.total:.0f}" if self.total else ""
        if self.stage is Stage.DOWNLOADING:
            return f"{self.stage} {self.detail}{count}"
        return f"{self.detail or self.stage}{count}"


Report = Callable[[Progress], None]
"""A function that receives progress events."""


def ignore(event: Progress) -> None:
    """For callers who do not want progress events."""

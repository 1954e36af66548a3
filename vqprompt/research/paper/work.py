"""One run of a grid, on any machine, and the events that report about it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress
from vqprompt.research.paper.grids import Run
from vqprompt.research.results.config import RunConfig
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner

ERROR_FILE = "error.txt"  # in a run's folder: the traceback of a failure that was not the user's


@dataclass(frozen=True)
class Started:
    """A worker has begun a run. where: its machine, if it is another one."""

    where: str = ""


@dataclass(frozen=True)
class Advanced:
    """A run has made progress."""

    progress: Progress


@dataclass(frozen=True)
class Lost:
    """A run has lost its machine or process, and continues on another one from its last checkpoint."""

    reason: str


@dataclass(frozen=True)
class Finished:
    result: RunResult


@dataclass(frozen=True)
class Failed:
    reason: str


Event = Started | Advanced | Lost | Finished | Failed
"""What happens to a run."""

Listener = Callable[[Run, Event], None]


class Executor(Protocol):
    """Where the runs of a grid are done."""

    def run(self, todo: Sequence[Run], out: Path, listener: Listener, track: Sequence[str] = ()) -> dict[str, str]:
        """Do the runs, each in `out`/its name, and send events to the listener. Returns the reasons of failures by run
        name; a failure does not stop the other runs. What would fail in every run is refused before the first one."""


def do_run(
    config: RunConfig,
    folder: Path,
    send: Callable[[Advanced], None],
    seconds_between: float,
    *,
    shown_folder: Path | None = None,
    shared_queries: Path | None = None,
    track: Sequence[str] = (),
    at_once: int = 1,
    checkpoint_seconds: float = runner.CHECKPOINT_SECONDS,
) -> Finished | Failed:
    """Do a run, or continue it. Raises only what `send` raises.

    seconds_between: the least time between two messages. shown_folder: where people find the run's files, if not in
    `folder`. at_once: how many runs share the hardware.
    """
    last_sent = 0.0
    refused: list[BaseException] = []  # what `send` raised: not a failure of the run

    def progress(event: Progress) -> None:
        nonlocal last_sent
        if time.monotonic() - last_sent >= seconds_between:
            last_sent = time.monotonic()
            try:
                send(Advanced(event))
            except BaseException as error:
                refused.append(error)
                raise

    error_file = folder / ERROR_FILE
    try:
        result = runner.run(
            config, folder, resume=True, progress=progress, checkpoint_seconds=checkpoint_seconds,
            shared_queries=shared_queries, track=track, at_once=at_once,
        )  # fmt: skip
        error_file.unlink(missing_ok=True)
        return Finished(result)
    except UserError as error:
        if refused:
            raise
        return Failed(str(error))
    except Exception as error:
        if refused:
            raise
        folder.mkdir(parents=True, exist_ok=True)
        error_file.write_text(traceback.format_exc(), encoding="utf-8")
        shown = (shown_folder or folder) / ERROR_FILE
        return Failed(f"{type(error).__name__}: {error} (traceback in {shown})")

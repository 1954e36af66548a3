"""How the runs of a grid are done: the events of a run, its job, and the loop that all executors share."""

from __future__ import annotations

import os
import platform
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.plugins import Registry
from vqprompt.core.progress import Progress
from vqprompt.research.learner.checkpoint import INFO
from vqprompt.research.paper.grids import Run
from vqprompt.research.paper.requirements import Requirements
from vqprompt.research.results.config import RunConfig
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner

ERROR_FILE = "error.txt"  # in a run's folder: the traceback of a failure that was not the user's
MOST_LOSSES = 3  # in a row, without a new checkpoint: then the run itself probably kills its machines
PASSED_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # variables that other machines get
CORES_PER_RUN = 8  # with more, a single run gets hardly faster


class Started(NamedTuple):
    where: str = ""  # the machine, if it is another one


class Advanced(NamedTuple):
    progress: Progress


class Lost(NamedTuple):
    """A run has lost its machine or process, and continues on another one from its last checkpoint."""

    reason: str


class Finished(NamedTuple):
    result: RunResult


class Failed(NamedTuple):
    reason: str


class Refused(Failed):
    """The machine lacks something that all runs need, so the whole work stops: it would refuse one after the other."""


Event = Started | Advanced | Lost | Finished | Failed
"""What happens to a run."""


@dataclass(frozen=True)
class Job:
    """A run, as a worker gets it.

    folder: where people will find the run's files. seconds_between: the least time between two messages. threads: that
    PyTorch may use. at_once: how many runs share the hardware. shared_queries: see `runner.run`. requirements,
    environment: for other machines, what they must have, and variables to set there.
    """

    config: RunConfig
    folder: Path
    track: tuple[str, ...]
    seconds_between: float
    threads: int
    at_once: int = 1
    shared_queries: Path | None = None
    requirements: Requirements | None = None
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    )
    checkpoint_seconds: float = field(default_factory=lambda: runner.CHECKPOINT_SECONDS)

    def do(self, send: Callable[[Event], None], folder: Path | None = None) -> Finished | Failed:
        """In a worker: do the run, or continue it. Every exception is a failure of the run. folder: to work in, if it
        is another one than where people will find the files."""
        if self.requirements is not None and (missing := self.requirements.missing()):
            return Refused(f"the machine {platform.node()} cannot be used: {missing}")
        os.environ.update(self.environment)
        torch.set_num_threads(self.threads)
        send(Started(platform.node() if self.requirements is not None else ""))
        folder, last_sent = folder or self.folder, 0.0

        def progress(event: Progress) -> None:
            nonlocal last_sent
            if time.monotonic() - last_sent >= self.seconds_between:
                last_sent = time.monotonic()
                send(Advanced(event))

        try:
            result = runner.run(
                self.config, folder, resume=True, progress=progress, checkpoint_seconds=self.checkpoint_seconds,
                shared_queries=self.shared_queries, track=self.track, at_once=self.at_once,
            )  # fmt: skip
            (folder / ERROR_FILE).unlink(missing_ok=True)
            return Finished(result)
        except UserError as error:
            return Failed(str(error))
        except Exception as error:
            write_atomically(folder / ERROR_FILE, traceback.format_exc())
            return Failed(f"{type(error).__name__}: {error} (traceback in {self.folder / ERROR_FILE})")


class Executor(ABC):
    """Where the runs of a grid are done, at most `at_once` at a time. A run that loses its machine is started again."""

    at_once: int

    def run(
        self, todo: Sequence[Run], out: Path, track: Sequence[str] = (), more: Callable[[], Sequence[Run]] = list,
        total: int = 0,
    ) -> Generator[tuple[Run, Event]]:  # fmt: skip
        """Do the runs, each in `out`/its name, and yield what happens to them. A failure does not stop the other runs;
        what would fail in every run is refused before the first one. Close it (`contextlib.closing`) to stop early.

        more: asked when all runs are over for the next ones, which need the same as the first; none to end. total: how
        many runs there are with those to come."""
        self.out, self.track, self.total = out, tuple(track), max(total, len(todo))
        self.jobs: dict[Any, Run] = {}  # those that are not over
        self.losses: dict[str, tuple[int, Any]] = {}  # by run name: in a row, and the checkpoint at the last one
        if not todo:
            return
        waiting = deque(todo)
        with self.opened(todo):
            while waiting or self.jobs:
                while waiting and len(self.jobs) < self.at_once:
                    run = self.choose(waiting)
                    waiting.remove(run)
                    try:
                        self.jobs[self.start(run)] = run
                    except (UserError, OSError) as error:
                        yield run, Failed(str(error))
                for job, event in self.events() if self.jobs else ():  # none, if the last run could not be started
                    run = self.jobs[job]
                    if isinstance(event, Refused):
                        raise UserError(event.reason)
                    if isinstance(event, Lost):
                        waiting.appendleft(run)
                    if isinstance(event, Finished | Failed | Lost):
                        del self.jobs[job]
                    yield run, event
                if not waiting and not self.jobs:
                    waiting.extend(more())

    @abstractmethod
    def opened(self, todo: Sequence[Run]) -> AbstractContextManager[None]:
        """Get ready for these runs, or refuse; in the end cancel what is left of them, and tidy up."""

    def choose(self, waiting: Sequence[Run]) -> Run:
        """The run to start next."""
        return waiting[0]

    @abstractmethod
    def start(self, run: Run) -> Any:
        """Start a run; returns what stands for its job, as a key. Raises UserError or OSError if it cannot be
        started."""

    @abstractmethod
    def events(self) -> Iterator[tuple[Any, Event]]:
        """Wait for something to happen to the jobs, and yield it. The last event of a job is Finished, Failed or
        Lost."""

    def after_loss(self, run: Run, reason: str) -> Lost | Failed:
        """What becomes of a run that lost its machine."""
        (times, before), now = self.losses.get(run.name, (0, None)), checkpoint_stamp(self.out / run.name)
        times = times + 1 if now == before else 1
        self.losses[run.name] = times, now
        if times > MOST_LOSSES:
            return Failed(f"it lost its machine {times} times without making progress ({reason})")
        return Lost(reason)


def checkpoint_stamp(folder: Path) -> tuple[int, int] | None:
    """Changes with every checkpoint of a run."""
    with suppress(OSError):
        status = (folder / INFO).stat()
        return status.st_ino, status.st_mtime_ns
    return None


# on other machines; called with what follows `--on NAME=`, CPUs and GPUs per run, and the most runs at a time
EXECUTORS: Registry[Callable[..., Executor]] = Registry("vqprompt.executors", Executor, {})


def find_executor(on: str, workers: int | None, cpus: int | None, gpus: float | None) -> Executor:
    """on: as `--on`. workers: the most runs at a time. cpus, gpus: per run, on other machines."""
    kind, equals, place = on.partition("=")
    if kind == "local" and not equals:
        if cpus is not None or gpus is not None:
            raise UserError(
                "--cpus and --gpus are for other machines (--on ray, --on slurm); on this one, --workers divides them"
            )
        from vqprompt.research.paper.pool import LocalExecutor

        return LocalExecutor(workers)
    if kind in ("ray", "slurm") and kind not in EXECUTORS:
        raise UserError(f"--on {on}: the package for clusters is missing; pip install ./examples/vqprompt-clusters")
    if kind not in EXECUTORS or (equals and not place):
        raise UserError(f"--on {on}: expected local, ray, ray=HOST:PORT, slurm or slurm=PARTITION")
    return EXECUTORS[kind](place or None, cpus, gpus, workers)

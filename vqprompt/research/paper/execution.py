"""How the runs of a grid are done: the events of a run, and executors that do many, here or on other machines."""

from __future__ import annotations

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress
from vqprompt.research.cluster import parse_on
from vqprompt.research.cluster.requirements import Requirements, host_name
from vqprompt.research.learner.checkpoint import INFO
from vqprompt.research.paper.grids import Run
from vqprompt.research.results.config import RunConfig
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner

ERROR_FILE = "error.txt"  # in a run's folder: the traceback of a failure that was not the user's
MOST_LOSSES = 3  # in a row, without a new checkpoint: then the run itself probably kills its machines
PASSED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # variables that other machines get
CORES_PER_RUN = 8  # with more, a single run gets hardly faster


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


# ---------------------------------------------------------------------------------------------- other machines


@dataclass(frozen=True)
class RemoteRun:
    """A run for another machine. threads: that PyTorch may use there. environment: variables to set there. The other
    fields are as in `do_run`."""

    config: RunConfig
    track: tuple[str, ...]
    requirements: Requirements
    threads: int
    seconds_between: float
    checkpoint_seconds: float = field(default_factory=lambda: runner.CHECKPOINT_SECONDS)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    )

    def refusal(self) -> Failed | None:
        """On the other machine: why it cannot do the run; None if it can."""
        missing = self.requirements.missing()
        return None if missing is None else Failed(f"the machine {host_name()} cannot be used: {missing}")

    def do(
        self, folder: Path, send: Callable[[Advanced], None], shown_folder: Path | None = None, at_once: int = 1
    ) -> Finished | Failed:
        """On the other machine: do the run."""
        os.environ.update(self.environment)
        torch.set_num_threads(self.threads)
        return do_run(
            self.config, folder, send, self.seconds_between, shown_folder=shown_folder, track=self.track,
            at_once=at_once, checkpoint_seconds=self.checkpoint_seconds,
        )  # fmt: skip


def requirements_of(runs: Sequence[Run]) -> Requirements:
    """What a machine must have for these runs."""
    configs = [run.config for run in runs]
    return Requirements.here((c.backbone for c in configs), (c.data for c in configs), (c.method for c in configs))


class RemoteGrid(ABC):
    """Does runs on other machines, at most `at_once` at a time. A run that loses its machine is started again."""

    def __init__(self, out: Path, listener: Listener, at_once: int) -> None:
        self.out, self.listener, self.at_once = out, listener, at_once
        self.failed: dict[str, str] = {}  # reasons by run name
        self.losses: dict[str, tuple[int, tuple[int, int] | None]] = {}  # in a row, and the checkpoint at the last one

    @abstractmethod
    def start(self, run: Run) -> Any:
        """A job, as a key. Raises UserError or OSError if the run cannot be started."""

    @abstractmethod
    def events(self, jobs: dict[Any, Run]) -> Iterator[tuple[Any, Event]]:
        """Wait for something to happen, and yield it. The last event of a job is Finished, Failed or Lost."""

    @abstractmethod
    def stop(self, jobs: dict[Any, Run]) -> None:
        """Cancel what is left, and tidy up."""

    def run(self, todo: Sequence[Run]) -> dict[str, str]:
        waiting, jobs = deque(todo), dict[Any, Run]()
        try:
            while waiting or jobs:
                while waiting and len(jobs) < self.at_once:
                    run = waiting.popleft()
                    try:
                        jobs[self.start(run)] = run
                    except (UserError, OSError) as error:
                        self.tell(run, Failed(str(error)))
                for job, event in self.events(jobs):
                    self.tell(jobs[job], event)
                    if isinstance(event, Lost):
                        waiting.appendleft(jobs[job])
                    if isinstance(event, Finished | Failed | Lost):
                        del jobs[job]
            return self.failed
        finally:
            self.stop(jobs)

    def tell(self, run: Run, event: Event) -> None:
        if isinstance(event, Failed):
            self.failed[run.name] = event.reason
        self.listener(run, event)

    def lost(self, run: Run, reason: str) -> Lost | Failed:
        """What becomes of a run that lost its machine."""
        times, before = self.losses.get(run.name, (0, None))
        now = checkpoint_stamp(self.out / run.name)
        times = times + 1 if now == before else 1
        self.losses[run.name] = times, now
        if times > MOST_LOSSES:
            return Failed(f"it lost its machine {times} times without making progress ({reason})")
        return Lost(reason)


def checkpoint_stamp(folder: Path) -> tuple[int, int] | None:
    """Changes with every checkpoint of a run."""
    try:
        status = (folder / INFO).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def refuse_local_tracking(track: Sequence[str]) -> None:
    if "mlflow" in track and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UserError(
            "--track mlflow on other machines needs a server that all of them can reach; set MLFLOW_TRACKING_URI to it"
        )


def find_executor(
    on: str = "local", workers: int | None = None, cpus: int | None = None, gpus: float | None = None
) -> Executor:
    """on: as `--on`. workers: the most runs at a time. cpus, gpus: per run, on other machines."""
    kind, address = parse_on(on)
    if kind == "local":
        if cpus is not None or gpus is not None:
            raise UserError(
                "--cpus and --gpus are for other machines (--on ray, --on slurm); on this one, --workers divides them"
            )
        from vqprompt.research.paper.pool import LocalExecutor

        return LocalExecutor(workers)
    if gpus is not None and not 0 <= gpus <= 1024:
        raise UserError(f"--gpus {gpus:g}: expected GPUs per run, such as 1, 0.25 or 0")
    if gpus is not None and gpus > 1:
        raise UserError(f"--gpus {gpus:g}: a run uses one GPU at most; give 1, or a fraction to let several share one")
    if kind == "ray":
        from vqprompt.research.paper.ray_executor import RayExecutor

        return RayExecutor(address, cpus, gpus, workers)
    from vqprompt.research.paper.slurm_executor import SlurmExecutor

    return SlurmExecutor(address, cpus, gpus, workers)

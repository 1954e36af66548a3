"""How the runs of a grid are done: the events of a run, its job, and the loop that all executors share."""

from __future__ import annotations

import hashlib
import os
import platform
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import vqprompt
from vqprompt._version import __version__
from vqprompt.core.backbones.weights import read_weights
from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.progress import Progress
from vqprompt.research.datasets import DATASETS, check_data, parse_data
from vqprompt.research.learner.checkpoint import INFO
from vqprompt.research.methods import METHODS
from vqprompt.research.paper.grids import Run
from vqprompt.research.results.config import RunConfig
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner

ERROR_FILE = "error.txt"  # in a run's folder: the traceback of a failure that was not the user's
MOST_LOSSES = 3  # in a row, without a new checkpoint: then the run itself probably kills its machines
PASSED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # variables that other machines get
CORES_PER_RUN = 8  # with more, a single run gets hardly faster
PLACES = "local, ray, ray=HOST:PORT, slurm or slurm=PARTITION"


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
More = Callable[[dict[str, str]], Sequence[Run]]


@dataclass(frozen=True)
class Job:
    """A run, as a worker gets it.

    folder: where people will find the run's files. seconds_between: the least time between two messages. at_once: how
    many runs share the hardware. shared_queries: see `runner.run`. threads: that PyTorch may use. requirements,
    environment: for other machines, what they must have, and variables to set there.
    """

    config: RunConfig
    folder: Path
    track: tuple[str, ...]
    seconds_between: float
    at_once: int = 1
    shared_queries: Path | None = None
    threads: int | None = None
    requirements: Requirements | None = None
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    )
    checkpoint_seconds: float = field(default_factory=lambda: runner.CHECKPOINT_SECONDS)

    def do(self, send: Callable[[Event], None], folder: Path | None = None) -> Finished | Failed:
        """In a worker: do the run, or continue it. Raises only what `send` raises. folder: to work in, if it is another
        one than where people will find the files."""
        missing = None if self.requirements is None else self.requirements.missing()
        if missing is not None:
            return Failed(f"the machine {host_name()} cannot be used: {missing}")
        os.environ.update(self.environment)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        send(Started(host_name() if self.requirements is not None else ""))
        folder, last_sent = folder or self.folder, 0.0
        refused: list[BaseException] = []  # what `send` raised: not a failure of the run

        def progress(event: Progress) -> None:
            nonlocal last_sent
            if time.monotonic() - last_sent >= self.seconds_between:
                last_sent = time.monotonic()
                try:
                    send(Advanced(event))
                except BaseException as error:
                    refused.append(error)
                    raise

        try:
            result = runner.run(
                self.config, folder, resume=True, progress=progress, checkpoint_seconds=self.checkpoint_seconds,
                shared_queries=self.shared_queries, track=self.track, at_once=self.at_once,
            )  # fmt: skip
            (folder / ERROR_FILE).unlink(missing_ok=True)
            return Finished(result)
        except Exception as error:
            if refused:
                raise
            if isinstance(error, UserError):
                return Failed(str(error))
            write_atomically(folder / ERROR_FILE, traceback.format_exc())
            return Failed(f"{type(error).__name__}: {error} (traceback in {self.folder / ERROR_FILE})")


class Executor(ABC):
    """Where the runs of a grid are done, at most `at_once` at a time. A run that loses its machine is started again."""

    at_once: int

    def run(
        self,
        todo: Sequence[Run],
        out: Path,
        listener: Listener,
        track: Sequence[str] = (),
        more: More = lambda failed: [],
    ) -> dict[str, str]:
        """Do the runs, each in `out`/its name, and send events to the listener. Returns the reasons of failures by run
        name; a failure does not stop the other runs. What would fail in every run is refused before the first one.

        more: asked when all runs are over, with the failures so far: the next runs, which need the same as the first;
        none to end."""
        self.out, self.listener, self.track = out, listener, tuple(track)
        self.failed: dict[str, str] = {}  # reasons by run name
        self.losses: dict[str, tuple[int, Any]] = {}  # by run name: in a row, and the checkpoint at the last one
        self.jobs: dict[Any, Run] = {}
        waiting = deque(todo)
        if not waiting:
            return {}
        with self.opened(todo):
            while waiting or self.jobs:
                while waiting and len(self.jobs) < self.at_once:
                    run = self.choose(waiting)
                    waiting.remove(run)
                    try:
                        self.jobs[self.start(run)] = run
                    except (UserError, OSError) as error:
                        self.tell(run, Failed(str(error)))
                for job, event in self.events():
                    self.tell(self.jobs[job], event)
                    if isinstance(event, Lost):
                        waiting.appendleft(self.jobs[job])
                    if isinstance(event, Finished | Failed | Lost):
                        del self.jobs[job]
                if not waiting and not self.jobs:
                    waiting.extend(more(self.failed))
        return self.failed

    @abstractmethod
    def opened(self, todo: Sequence[Run]) -> AbstractContextManager[None]:
        """Get ready for these runs, or refuse; in the end cancel what is left of them, and tidy up."""

    def choose(self, waiting: Sequence[Run]) -> Run:
        """The run to start next."""
        return waiting[0]

    @abstractmethod
    def start(self, run: Run) -> Any:
        """A job, as a key. Raises UserError or OSError if the run cannot be started."""

    @abstractmethod
    def events(self) -> Iterator[tuple[Any, Event]]:
        """Wait for something to happen to the jobs, and yield it. The last event of a job is Finished, Failed or
        Lost."""

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

    def requirements_of(self, runs: Sequence[Run]) -> Requirements:
        """What another machine must have for these runs."""
        if "mlflow" in self.track and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise UserError(
                "--track mlflow on other machines needs a server that all of them can reach; set MLFLOW_TRACKING_URI "
                "to it"
            )
        configs = [run.config for run in runs]
        return Requirements.here((c.backbone for c in configs), (c.data for c in configs), (c.method for c in configs))


def checkpoint_stamp(folder: Path) -> tuple[int, int] | None:
    """Changes with every checkpoint of a run."""
    try:
        status = (folder / INFO).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def find_executor(
    on: str = "local", workers: int | None = None, cpus: int | None = None, gpus: float | None = None
) -> Executor:
    """on: as `--on`. workers: the most runs at a time. cpus, gpus: per run, on other machines."""
    kind, equals, address = on.partition("=")
    if kind not in ("local", "ray", "slurm") or (equals and (kind == "local" or not address)):
        raise UserError(f"--on {on}: expected {PLACES}")
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

        return RayExecutor(address or None, cpus, gpus, workers)
    from vqprompt.research.paper.slurm_executor import SlurmExecutor

    return SlurmExecutor(address or None, cpus, gpus, workers)


# ---------------------------------------------------------------------------------------------- other machines
# What one must have before it gets work: this version of the package, these weights, these images. Nobody would notice
# that numbers come from other code or other weights, so such machines are refused before work starts.


@lru_cache(maxsize=1)
def source_digest() -> str:
    """12 hex digits of the package's source files, because two copies of the same version may differ."""
    folder, digest = Path(vqprompt.__file__).parent, hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".toml")):
        digest.update(f"{file.relative_to(folder).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=16)
def weights_digest(backbone: str, folder: str) -> str:
    """The fingerprint of a backbone's weights. folder: the base of a relative path."""
    return read_weights(backbone).fingerprint


@dataclass(frozen=True)
class Requirements:
    """version, sources: of this package. weights: backbones and their fingerprints. data: as for `--data`. folder: the
    base of relative paths. packages: those that bring methods or data sets, as NAME VERSION."""

    version: str
    sources: str
    weights: tuple[tuple[str, str], ...]
    data: tuple[str, ...]
    folder: str
    packages: tuple[str, ...] = ()

    @classmethod
    def here(cls, backbones: Iterable[str], data: Iterable[str], methods: Iterable[str] = ()) -> Requirements:
        """What this process has. Raises if weights cannot be read."""
        folder = str(Path.cwd())
        weights = tuple((name, weights_digest(name, folder)) for name in dict.fromkeys(backbones))
        sets = tuple(dict.fromkeys(data))
        brought = {*map(METHODS.version, methods), *(DATASETS.version(parse_data(each)[0] or "") for each in sets)}
        return cls(__version__, source_digest(), weights, sets, folder, tuple(sorted(brought - {""})))

    def missing(self) -> str | None:
        """Why this process cannot do the work; None if it can. Changes the working directory to the base of relative
        paths, if this machine has that folder."""
        if __version__ != self.version:
            return f"it has vqprompt {__version__}, and the work is for {self.version}; install the same version there"
        if source_digest() != self.sources:
            return (
                f"its vqprompt {__version__} has other source files ({source_digest()}, not {self.sources}); install "
                "the same ones there"
            )
        for package in self.packages:
            name, _, expected = package.rpartition(" ")
            installed = next((each.version for each in distributions(name=name)), "in no version")
            if installed != expected:
                return f"it has {name} {installed}, and the work needs {expected}; install the same version there"
        with suppress(OSError):
            os.chdir(self.folder)
        for name, expected in self.weights:
            try:
                digest = weights_digest(name, self.folder)
            except (UserError, OSError) as error:
                return f"it cannot read the backbone {name} ({error})"
            if digest != expected:
                return f"its backbone {name} has other weights ({digest}, not {expected}); copy the right ones there"
        for data in self.data:
            try:
                check_data(data)
            except UserError as error:
                return f"it cannot see the images ({error}); copy them there, or use a folder that all machines share"
        return None


def host_name() -> str:
    return platform.node() or "a machine without a name"

"""The runs of a grid on other machines: a Ray cluster, or SLURM jobs that are submitted through submitit.

A run on Ray is a task that yields events: progress, and its files after every checkpoint. The files arrive here as
bytes and are kept in the table's folder, so no shared disk is needed. SLURM's machines share a disk, so a run works in
its own folder there, and reports its progress in a small file. A run that loses its machine is started again on
another one, with the files of its last checkpoint; so is a job that SLURM stops (preemption, time limit).
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import lock_folder, write_atomically
from vqprompt.research.paper import execution
from vqprompt.research.paper.execution import CORES_PER_RUN, Event, Failed, Finished, Job, Refused
from vqprompt.research.paper.grids import Run
from vqprompt.research.paper.requirements import Requirements, installed

PACKAGE = "vqprompt-clusters"
SECONDS_BETWEEN_MESSAGES = 1.0
SECONDS_TO_ANSWER = 5.0
ADVICE = (
    "start one with `ray start --head`, and run this command on a machine of the cluster, with the address that Ray "
    "printed, as in --on ray=10.0.0.1:6379"
)
WRITTEN_LAST = ("metrics.json", "checkpoint.json")  # they name the other files, so they are written last
FolderContent = dict[str, bytes]

SLURM_FOLDER = ".slurm"  # in the table's folder: submitit's scripts and logs, and the progress of runs
SLURM_HOURS = 24  # SBATCH_TIMELIMIT sets another limit
SECONDS_BETWEEN_LOOKS = 1.0
REQUEUES = 100  # after a time limit; each time the run gets further


class ClusterExecutor(execution.Executor):
    """address: of the cluster, or a part of it; None for the usual one. cpus, gpus: per run. at_once: the most runs at
    a time; without it, all are sent, and wait in the cluster's queue."""

    needed: Requirements

    def __init__(
        self, address: str | None = None, cpus: int | None = None, gpus: float | None = None, at_once: int | None = None
    ) -> None:
        self.address, self.cpus, self.gpus, self.at_once = address, cpus, gpus, at_once or sys.maxsize
        if gpus is not None and not 0 <= gpus <= 1:
            raise UserError(
                f"--gpus {gpus:g}: a run uses one GPU at most; give 1, 0, or a fraction to let several share one"
            )

    def needs(self, todo: Sequence[Run]) -> Requirements:
        """What other machines must have for these runs, this package included."""
        needed = Requirements.of(todo, self.track)
        return replace(needed, packages={**needed.packages, PACKAGE: installed(PACKAGE)})

    def job(self, run: Run, cpus: int, at_once: int = 1) -> Job:
        folder, seconds = self.out / run.name, SECONDS_BETWEEN_MESSAGES
        return Job(run.config, folder, self.track, seconds, cpus, at_once, requirements=self.needed)


# ---------------------------------------------------------------------------------------------- Ray


class RayExecutor(ClusterExecutor):
    """address: HOST:PORT of the head; None: the cluster that this machine is part of. Fractions of a GPU are allowed. A
    run's folder is locked here while another machine does it."""

    @contextmanager
    def opened(self, todo: Sequence[Run]) -> Iterator[None]:
        self.needed = self.needs(todo)
        with connected(self.address) as self.ray, ExitStack() as self.locks:
            self.locked: set[str] = set()  # names of runs
            self.run_cpus, self.run_gpus = self._resources()
            # no retries by Ray, which would start a lost run from the beginning; we start it again with its files
            settings = {"max_retries": 0, "num_returns": "streaming"}
            settings |= {"num_cpus": self.run_cpus, "num_gpus": self.run_gpus}
            self.task = self.ray.remote(**settings)(work)
            try:
                yield
            finally:
                for stream in self.jobs:
                    self.ray.cancel(stream, force=True)

    def _resources(self) -> tuple[int, float]:
        """CPUs and GPUs per run: as asked for, else one GPU if there are any, and at most eight cores. Refuses what no
        machine has."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        has = [(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)) for node in nodes]
        gpus = min(1.0, max(g for _, g in has)) if self.gpus is None else self.gpus
        most = max((c for c, g in has if g >= gpus), default=0.0)
        cpus = self.cpus or max(1, min(CORES_PER_RUN, int(most)))
        if most < cpus:
            names = (node["NodeManagerHostname"] for node in nodes)
            machines = [f"{name}: {c:g} CPUs, {g:g} GPUs" for name, (c, g) in zip(names, has, strict=True)]
            raise UserError(
                f"--on ray: no machine has {cpus} CPUs and {gpus:g} GPUs ({'; '.join(machines)}); ask for less per run"
            )
        return cpus, gpus

    def start(self, run: Run) -> Any:
        job = self.job(run, self.run_cpus, at_once=int(1 / self.run_gpus) if self.run_gpus else 1)
        if run.name not in self.locked:
            self.locks.enter_context(lock_folder(job.folder))
            self.locked.add(run.name)
        return self.task.remote(job, pack(job.folder))

    def events(self) -> Iterator[tuple[Any, Event]]:
        """Files that arrive are written to the run's folder."""
        from ray.exceptions import RayError, RayTaskError

        for stream in self.ray.wait(list(self.jobs), num_returns=1)[0]:
            run, item = self.jobs[stream], None
            try:
                item = self.ray.get(next(stream))
            except StopIteration:
                item = Failed("it ended without a result")
            except RayTaskError as error:  # before the run began, most often because vqprompt cannot be imported there
                fault = f"{type(error.cause).__name__}: {error.cause}"
                item = Refused(f"the machine of {run.name} cannot be used ({fault}); install the same vqprompt there")
            except RayError as error:  # its machine or process was lost
                item = self.after_loss(run, str(error).strip().partition("\n")[0])
            if isinstance(item, dict):
                unpack(item, self.out / run.name)
            else:
                yield stream, item


def work(job: Job, files: FolderContent) -> Iterator[Event | FolderContent]:
    """A run's events, and its files after each checkpoint and at the end, in the order in which they come. files: those
    that it has so far."""
    outbox: queue.Queue[Event | FolderContent] = queue.Queue(maxsize=4)
    with tempfile.TemporaryDirectory(prefix="vqprompt-") as name:
        folder = Path(name) / "run"
        unpack(files, folder)
        sent = execution.checkpoint_stamp(folder)

        def send(event: Event) -> None:
            nonlocal sent
            now = execution.checkpoint_stamp(folder)  # between two saves, because the run itself calls this
            if now != sent:
                sent = now
                outbox.put(pack(folder))
            outbox.put(event)

        def do() -> None:
            try:
                ending = job.do(send, folder)
                outbox.put(pack(folder))
            except BaseException as error:  # for example: the folder cannot be read, or the disk is full
                ending = Failed(f"{type(error).__name__}: {error}")
            outbox.put(ending)

        threading.Thread(target=do, daemon=True).start()
        while True:
            item = outbox.get()
            yield item
            if isinstance(item, Finished | Failed):
                return


def files_in(folder: Path) -> dict[str, Path]:
    """All files of a folder by relative path, except hidden ones (locks, partial files)."""
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {path.as_posix(): f for path, f in files.items() if not any(part.startswith(".") for part in path.parts)}


def pack(folder: Path) -> FolderContent:
    return {name: file.read_bytes() for name, file in files_in(folder).items()}


def unpack(content: FolderContent, folder: Path) -> None:
    """Make a folder equal to the packed one. At any moment, a reader finds the whole old or the whole new state."""
    for name in content:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise UserError(f"a run's files include {name!r}, which leads out of its folder; nothing was unpacked")
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(content, key=lambda name: (WRITTEN_LAST.index(name) if name in WRITTEN_LAST else -1, name)):
        place = folder / name
        if not place.is_file() or place.read_bytes() != content[name]:
            write_atomically(place, content[name])
    for name, file in files_in(folder).items():
        if name not in content:
            file.unlink()


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at this address. address=None: the cluster that this machine is part
    of; if there is none, one is started on this machine, and ended after use."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a future Ray's default; else it warns
    import ray

    if address is not None:
        check_answers(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, **quiet) if address else ray.init(include_dashboard=False, **quiet)
    except (Exception, SystemExit) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"--on ray: the cluster at {address or 'this machine'} cannot be used ({reason}); {ADVICE}"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def check_answers(address: str) -> None:
    """Refuse an address where nothing listens, within seconds. (Ray itself would try for two minutes.)"""
    host, colon, port = address.rpartition(":")
    if address.startswith("ray://") or not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--on ray={address}: expected HOST:PORT of the head, as in --on ray=10.0.0.1:6379; {ADVICE}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise UserError(f"--on ray={address}: nobody answers there ({error.strerror or error}); {ADVICE}") from None


# ---------------------------------------------------------------------------------------------- SLURM


@dataclass(frozen=True)
class SlurmJob:
    """Does a run when it is called, on another machine. news: the file with its last event."""

    job: Job
    news: Path

    def __call__(self) -> Finished | Failed:
        return self.job.do(self.report)

    def report(self, event: Event) -> None:
        write_atomically(self.news, pickle.dumps(event))

    def checkpoint(self) -> Any:
        """submitit calls this when SLURM is about to stop the job: the same again, from the last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class SlurmExecutor(ClusterExecutor):
    """address: a partition; None for SLURM's default. cluster: "slurm"; or "local", with which submitit starts
    processes on this machine instead, for tests."""

    cluster = "slurm"

    def __init__(self, *settings: Any, **more: Any) -> None:
        super().__init__(*settings, **more)
        if self.gpus not in (None, 0, 1):
            raise UserError(f"--gpus {self.gpus:g}: SLURM gives whole GPUs; give 0 or 1 (--on ray lets runs share one)")

    @contextmanager
    def opened(self, todo: Sequence[Run]) -> Iterator[None]:
        self.needed = self.needs(todo)
        self.out = self.out.resolve()  # jobs start in another folder
        self.folder = self.out / SLURM_FOLDER
        self.executor = self._open(self.folder)
        try:
            yield
        finally:
            for job in self.jobs:
                job.cancel()
            shutil.rmtree(self.folder / "news", ignore_errors=True)

    def _open(self, folder: Path) -> Any:
        """submitit's executor, with the resources that every job asks for."""
        import submitit

        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise UserError("--on slurm: there is no sbatch here; give the command on a login node of the cluster")
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster, slurm_max_num_timeout=REQUEUES)
        # what is None is not asked for
        executor.update_parameters(name="vqprompt", timeout_min=60 * SLURM_HOURS, slurm_partition=self.address)
        executor.update_parameters(cpus_per_task=self.cpus or CORES_PER_RUN, gpus_per_node=1 if self.gpus else None)
        return executor

    def _news(self, run: Run) -> Path:
        return self.folder / "news" / run.name.replace("/", "+")

    def start(self, run: Run) -> Any:
        self._news(run).unlink(missing_ok=True)
        return self.executor.submit(SlurmJob(self.job(run, self.cpus or CORES_PER_RUN), self._news(run)))

    def events(self) -> Iterator[tuple[Any, Event]]:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for job, run in list(self.jobs.items()):
            done, heard = job.done(), self.folder / "heard"
            with suppress(FileNotFoundError):  # nothing new
                self._news(run).replace(heard)  # taken away, so that nothing is heard twice
                yield job, pickle.loads(heard.read_bytes())  # our own file
            if done:
                yield job, self._end(run, job)

    def _end(self, run: Run, job: Any) -> Event:
        """The last event of a job that has ended."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return job.result()
        except UncompletedJobError as error:  # killed, or its machine was lost: there is no result
            return self.after_loss(run, str(error).strip().partition("\n")[0])
        except FailedJobError as error:
            return Failed(str(error).strip().rpartition("\n")[2])

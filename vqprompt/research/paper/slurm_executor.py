"""The runs of a grid as jobs of a SLURM cluster, submitted through submitit.

SLURM's machines share a disk, so a run works in its own folder there, and reports its progress in a small file. A job
that SLURM stops (preemption, time limit) is queued again and continues from its last checkpoint; so does one whose
machine is lost.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.research.paper.execution import CORES_PER_RUN, Event, Executor, Failed, Finished, Job, Requirements
from vqprompt.research.paper.grids import Run

FOLDER = ".slurm"  # in the table's folder: submitit's scripts and logs, and the progress of runs
HOURS = 24  # SBATCH_TIMELIMIT sets another limit
SECONDS_BETWEEN_MESSAGES = 2.0
SECONDS_BETWEEN_LOOKS = 1.0
REQUEUES = 100  # after a time limit; each time the run gets further


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


class SlurmExecutor(Executor):
    """partition: None for SLURM's default. cpus, gpus: per run. at_once: the most jobs at a time. cluster: "slurm"; or
    "local", with which submitit starts processes on this machine instead, for tests."""

    def __init__(
        self, partition: str | None = None, cpus: int | None = None, gpus: float | None = None,
        at_once: int | None = None, cluster: str = "slurm",
    ) -> None:  # fmt: skip
        if gpus is not None and gpus not in (0, 1):
            raise UserError(f"--gpus {gpus:g}: SLURM gives whole GPUs; give 0 or 1 (--on ray lets runs share one)")
        self.partition, self.cpus, self.gpus, self.cluster = partition, cpus or CORES_PER_RUN, int(gpus or 0), cluster
        self.at_once = at_once or sys.maxsize

    @contextmanager
    def opened(self, todo: Sequence[Run]) -> Iterator[None]:
        self.conditions = {
            "seconds_between": SECONDS_BETWEEN_MESSAGES, "threads": self.cpus,
            "requirements": Requirements.of(todo, self.track),
        }  # fmt: skip
        self.out = self.out.resolve()  # jobs start in another folder
        self.folder = self.out / FOLDER
        self.executor = self._open(self.folder)
        self.heard: dict[str, bytes] = {}  # by run name: its last event
        try:
            yield
        finally:
            for job in self.jobs:
                job.cancel()
            shutil.rmtree(self.folder / "news", ignore_errors=True)

    def _open(self, folder: Path) -> Any:
        """submitit's executor, with the resources that every job asks for."""
        try:
            import submitit
        except ImportError:
            raise UserError("--on slurm needs submitit: pip install 'vqprompt[slurm]'") from None
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise UserError("--on slurm: there is no sbatch here; give the command on a login node of the cluster")
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster, slurm_max_num_timeout=REQUEUES)
        resources = {"cpus_per_task": self.cpus, "gpus_per_node": self.gpus or None, "slurm_partition": self.partition}
        asked = {name: value for name, value in resources.items() if value is not None}
        executor.update_parameters(name="vqprompt", timeout_min=60 * HOURS, **asked)
        return executor

    def _news(self, run: Run) -> Path:
        return self.folder / "news" / run.name.replace("/", "+")

    def start(self, run: Run, job: Job) -> Any:
        self._news(run).unlink(missing_ok=True)
        self.heard[run.name] = b""
        return self.executor.submit(SlurmJob(job, self._news(run)))

    def events(self) -> Iterator[tuple[Any, Event]]:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for job, run in list(self.jobs.items()):
            news, done = self._news(run), job.done()
            said = news.read_bytes() if news.exists() else b""
            if said != self.heard[run.name]:
                self.heard[run.name] = said
                yield job, pickle.loads(said)  # our own file
            if done:
                yield job, self._end(run, job)

    def _end(self, run: Run, job: Any) -> Event:
        """The last event of a job that has ended."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            event: Event = job.result()
        except UncompletedJobError as error:  # killed, or its machine was lost: there is no result
            return self.lost(run, str(error).strip().partition("\n")[0])
        except FailedJobError as error:
            return Failed(str(error).strip().rpartition("\n")[2])
        return event

"""The runs of a grid as jobs of a SLURM cluster, submitted through submitit.

SLURM's machines share a disk, so a run works in its own folder there, and reports its progress in a small file. A job
that SLURM stops (preemption, time limit) is queued again and continues from its last checkpoint; so does one whose
machine is lost.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.research.cluster.requirements import Requirements, host_name
from vqprompt.research.learner.checkpoint import INFO
from vqprompt.research.paper.execution import (
    CORES_PER_RUN,
    Advanced,
    Event,
    Failed,
    Finished,
    Listener,
    Lost,
    RemoteRun,
    Started,
    after_loss,
    refuse_local_tracking,
    requirements_of,
)
from vqprompt.research.paper.grids import Run

FOLDER = ".slurm"  # in the table's folder: submitit's scripts and logs, and the progress of runs
HOURS = 24  # SBATCH_TIMELIMIT sets another limit
SECONDS_BETWEEN_MESSAGES = 2.0
SECONDS_BETWEEN_LOOKS = 1.0
REQUEUES = 100  # after a time limit; each time the run gets further


@dataclass(frozen=True)
class SlurmJob:
    """Does a run when it is called, on another machine. Paths are absolute. news: the file with its last event."""

    run: RemoteRun
    folder: Path
    news: Path

    def __call__(self) -> Finished | Failed:
        refusal = self.run.refusal()
        if refusal is not None:
            return refusal
        self._report(Started(host_name()))
        return self.run.do(self.folder, self._report)

    def _report(self, event: Event) -> None:
        write_atomically(self.news, pickle.dumps(event))

    def checkpoint(self) -> Any:
        """submitit calls this when SLURM is about to stop the job: the same again, from the last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class SlurmExecutor:
    """partition: None for SLURM's default. cpus, gpus: per run. at_once: the most jobs at a time. cluster: "slurm"; or
    "local", with which submitit starts processes on this machine instead, for tests."""

    def __init__(
        self, partition: str | None = None, cpus: int | None = None, gpus: float | None = None,
        at_once: int | None = None, cluster: str = "slurm",
    ) -> None:  # fmt: skip
        if gpus is not None and gpus not in (0, 1):
            raise UserError(f"--gpus {gpus:g}: SLURM gives whole GPUs; give 0 or 1 (--on ray lets runs share one)")
        self.partition, self.cpus, self.gpus, self.at_once = partition, cpus or CORES_PER_RUN, int(gpus or 0), at_once
        self.cluster = cluster

    def run(self, todo: Sequence[Run], out: Path, listener: Listener, track: Sequence[str] = ()) -> dict[str, str]:
        if not todo:
            return {}
        refuse_local_tracking(track)
        requirements = requirements_of(todo)
        folder = out.resolve() / FOLDER
        return _Queue(self._open(folder), folder, out.resolve(), listener, tuple(track), requirements, self).run(todo)

    def _open(self, folder: Path) -> Any:
        """submitit's executor, with the resources that every job asks for."""
        try:
            import submitit
        except ImportError:
            raise UserError("--on slurm needs submitit: pip install 'vqprompt[slurm]'") from None
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise UserError("--on slurm: there is no sbatch here; give the command on a login node of the cluster")
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster, slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(
            name="vqprompt", timeout_min=60 * HOURS, cpus_per_task=self.cpus,
            **({"gpus_per_node": self.gpus} if self.gpus else {}),
            **({"slurm_partition": self.partition} if self.partition else {}),
        )  # fmt: skip
        return executor


class _Queue:
    """Jobs that are submitted, and the events that they report."""

    def __init__(
        self, executor: Any, folder: Path, out: Path, listener: Listener, track: tuple[str, ...],
        requirements: Requirements, settings: SlurmExecutor,
    ) -> None:  # fmt: skip
        self.executor, self.folder, self.out, self.listener = executor, folder, out, listener
        self.track, self.requirements, self.settings = track, requirements, settings
        self.failed: dict[str, str] = {}
        self.losses: dict[str, int] = {}
        self.saved: dict[str, int | None] = {}  # by run name: when the checkpoint at the last loss was written
        self.heard: dict[str, bytes] = {}  # by run name: its last event

    def run(self, todo: Sequence[Run]) -> dict[str, str]:
        waiting, going = deque(todo), dict[str, tuple[Run, Any]]()
        try:
            while waiting or going:
                while waiting and len(going) < (self.settings.at_once or len(todo)):
                    run = waiting.popleft()
                    going[run.name] = run, self._submit(run)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                for run, job in list(going.values()):
                    self._listen(run)
                    if job.done():
                        del going[run.name]
                        if isinstance(self._end(run, job), Lost):
                            waiting.appendleft(run)
            return self.failed
        finally:
            for _, job in going.values():
                job.cancel()
            shutil.rmtree(self.folder / "news", ignore_errors=True)

    def _news(self, run: Run) -> Path:
        return self.folder / "news" / run.name.replace("/", "+")

    def _submit(self, run: Run) -> Any:
        self._news(run).unlink(missing_ok=True)
        remote = RemoteRun(run.config, self.track, self.requirements, self.settings.cpus, SECONDS_BETWEEN_MESSAGES)
        return self.executor.submit(SlurmJob(remote, self.out / run.name, self._news(run)))

    def _listen(self, run: Run) -> None:
        try:
            news = self._news(run).read_bytes()
        except OSError:
            return
        if news == self.heard.get(run.name):
            return
        event = pickle.loads(news)  # our own file
        if isinstance(event, Advanced) and run.name not in self.heard:
            self.listener(run, Started())
        self.heard[run.name] = news
        self.listener(run, event)

    def _end(self, run: Run, job: Any) -> Event:
        """The last event of a job that has ended."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        if run.name not in self.heard:
            self.listener(run, Started())
        self.heard.pop(run.name, None)
        try:
            event: Event = job.result()
        except UncompletedJobError as error:  # killed, or its machine was lost: there is no result
            event = self._lost(run, str(error).strip().partition("\n")[0])
        except FailedJobError as error:
            event = Failed(str(error).strip().rpartition("\n")[2])
        if isinstance(event, Failed):
            self.failed[run.name] = event.reason
        self.listener(run, event)
        return event

    def _lost(self, run: Run, reason: str) -> Lost | Failed:
        try:
            saved = (self.out / run.name / INFO).stat().st_mtime_ns
        except OSError:
            saved = None
        made_progress = saved != self.saved.get(run.name)
        self.saved[run.name] = saved
        self.losses[run.name] = 1 if made_progress else self.losses.get(run.name, 0) + 1
        return after_loss(self.losses[run.name], reason)

"""The runs of a grid as jobs of a SLURM cluster, submitted through submitit.

SLURM's machines share a disk, so a run works in its own folder there, and what it says about its progress is a small
file beside it. A job that SLURM stops (preemption, time limit) is queued again and goes on from its last checkpoint; so
does one whose machine is lost.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.cluster.wanted import Wanted, host_name
from vqprompt.errors import UserError
from vqprompt.files import write_atomically
from vqprompt.learner.checkpoint import INFO
from vqprompt.paper.grids import Run
from vqprompt.paper.on_ray import MOST_LOSSES, PASSED_ON, refuse_local_tracking
from vqprompt.paper.pool import CORES_PER_RUN
from vqprompt.paper.work import Advanced, Event, Failed, Finished, Listener, Lost, Started, do_run
from vqprompt.runs import runner
from vqprompt.runs.config import RunConfig

FOLDER = ".slurm"  # in the table's folder: submitit's scripts and logs, and what runs say about their progress
HOURS = 24  # SBATCH_TIMELIMIT sets another limit
SECONDS_BETWEEN_MESSAGES = 2.0
SECONDS_BETWEEN_LOOKS = 1.0
REQUEUES = 100  # after a time limit; each one gets further


@dataclass(frozen=True)
class SlurmJob:
    """What a job does when it is called, on another machine. Paths are absolute; said: where it tells its progress."""

    config: RunConfig
    folder: Path
    said: Path
    track: tuple[str, ...]
    threads: int
    checkpoint_seconds: float
    message_seconds: float
    wanted: Wanted
    environment: dict[str, str]

    def __call__(self) -> Finished | Failed:
        import torch

        lacking = self.wanted.lacking()
        if lacking is not None:
            return Failed(f"the machine {host_name()} is of no use: {lacking}")
        os.environ.update(self.environment)
        torch.set_num_threads(self.threads)
        self._say(Started(host_name()))
        return do_run(
            self.config, self.folder, self._say, self.message_seconds, track=self.track,
            checkpoint_seconds=self.checkpoint_seconds,
        )  # fmt: skip

    def _say(self, event: Event) -> None:
        write_atomically(self.said, pickle.dumps(event))

    def checkpoint(self) -> Any:
        """submitit calls this when SLURM is about to stop the job: the same again, from the last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class SlurmExecutor:
    """partition: SLURM's default where None. cpus, gpus: per run. at_once: at most so many jobs at a time.
    cluster: "slurm"; or "local", submitit's stand-in that starts processes on this machine."""

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
        wanted = Wanted.here((run.config.backbone for run in todo), (run.config.data for run in todo))
        folder = out.resolve() / FOLDER
        return _Queue(self._open(folder), folder, out.resolve(), listener, tuple(track), wanted, self).run(todo)

    def _open(self, folder: Path) -> Any:
        """submitit's executor, with what every job asks for."""
        try:
            import submitit
        except ImportError:
            raise UserError("--on slurm takes submitit: pip install 'vqprompt[slurm]'") from None
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
    """Jobs that are submitted, and what they say."""

    def __init__(
        self, executor: Any, folder: Path, out: Path, listener: Listener, track: tuple[str, ...], wanted: Wanted,
        settings: SlurmExecutor,
    ) -> None:  # fmt: skip
        self.executor, self.folder, self.out, self.listener = executor, folder, out, listener
        self.track, self.wanted, self.settings = track, wanted, settings
        self.failed: dict[str, str] = {}
        self.losses: dict[str, int] = {}
        self.saved: dict[str, Any] = {}  # by run name: the checkpoint at the last loss
        self.heard: dict[str, bytes] = {}  # by run name: what was said last

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
            shutil.rmtree(self.folder / "said", ignore_errors=True)

    def _said(self, run: Run) -> Path:
        return self.folder / "said" / run.name.replace("/", "+")

    def _submit(self, run: Run) -> Any:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._said(run).unlink(missing_ok=True)
        return self.executor.submit(
            SlurmJob(run.config, self.out / run.name, self._said(run), self.track, self.settings.cpus,
                     runner.CHECKPOINT_SECONDS, SECONDS_BETWEEN_MESSAGES, self.wanted, environment)
        )  # fmt: skip

    def _listen(self, run: Run) -> None:
        try:
            said = self._said(run).read_bytes()
        except OSError:
            return
        if said == self.heard.get(run.name):
            return
        event = pickle.loads(said)  # our own file
        if isinstance(event, Advanced) and run.name not in self.heard:
            self.listener(run, Started())
        self.heard[run.name] = said
        self.listener(run, event)

    def _end(self, run: Run, job: Any) -> Event:
        """What became of a job that is over."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        if run.name not in self.heard:
            self.listener(run, Started())
        self.heard.pop(run.name, None)
        try:
            event: Event = job.result()
        except UncompletedJobError as error:  # killed, or its machine is gone: it left no result
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
        ahead = saved != self.saved.get(run.name)
        self.saved[run.name] = saved
        self.losses[run.name] = 1 if ahead else self.losses.get(run.name, 0) + 1
        if self.losses[run.name] > MOST_LOSSES:
            return Failed(f"it lost its machine {MOST_LOSSES + 1} times without getting ahead ({reason})")
        return Lost(reason)

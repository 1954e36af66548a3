"""The runs of a grid on a Ray cluster.

A run is a task that yields what happens to it: progress, and its files after every checkpoint. They arrive here as
bytes and are kept in the table's folder, so no disk needs to be shared. A run that loses its machine is started again
elsewhere, with the files of its last checkpoint.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vqprompt.cluster.parcels import Parcel, pack, unpack
from vqprompt.cluster.rays import alive_nodes, connected, name_of_worker, refuse_unlike
from vqprompt.cluster.wanted import Wanted
from vqprompt.errors import UserError
from vqprompt.files import lock_folder
from vqprompt.learner.checkpoint import INFO
from vqprompt.paper.grids import Run
from vqprompt.paper.pool import CORES_PER_RUN
from vqprompt.paper.work import Advanced, Event, Failed, Finished, Listener, Lost, Started, do_run
from vqprompt.runs import runner
from vqprompt.runs.config import RunConfig

SECONDS_BETWEEN_MESSAGES = 0.5
MOST_LOSSES = 3  # in a row, without a new checkpoint: then it is the run that kills its machines
PASSED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # to the workers


@dataclass(frozen=True)
class RayJob:
    """What a worker is asked to do. files: what there is of the run. shown_folder: where people will find it."""

    config: RunConfig
    files: Parcel
    shown_folder: Path
    track: tuple[str, ...]
    threads: int
    at_once: int
    checkpoint_seconds: float
    message_seconds: float
    wanted: Wanted
    environment: dict[str, str]


class RayExecutor:
    """address: HOST:PORT of the head; None: the cluster that this machine is part of. cpus, gpus: per run; fractions of
    a GPU are allowed. at_once: at most so many runs at a time."""

    def __init__(
        self, address: str | None = None, cpus: int | None = None, gpus: float | None = None, at_once: int | None = None
    ) -> None:
        self.address, self.cpus, self.gpus, self.at_once = address, cpus, gpus, at_once

    def run(self, todo: Sequence[Run], out: Path, listener: Listener, track: Sequence[str] = ()) -> dict[str, str]:
        if not todo:
            return {}
        refuse_local_tracking(track)
        wanted = Wanted.here((run.config.backbone for run in todo), (run.config.data for run in todo))
        with connected(self.address) as ray:
            cpus, gpus = self._resources(ray)
            slots = refuse_unlike(ray, wanted, cpus, gpus)
            grid = _Grid(ray, out, listener, tuple(track), wanted, cpus, gpus, min(self.at_once or slots, slots))
            return grid.run(todo)

    def _resources(self, ray: Any) -> tuple[int, float]:
        """Per run: what was asked for, else one GPU where there are some, and eight cores or as many as there are."""
        nodes = [node["Resources"] for node in alive_nodes(ray)]
        gpus = self.gpus if self.gpus is not None else min(1.0, max(n.get("GPU", 0.0) for n in nodes))
        most = max((n.get("CPU", 0.0) for n in nodes if n.get("GPU", 0.0) >= gpus), default=1.0)
        return self.cpus or max(1, min(CORES_PER_RUN, int(most))), gpus


def refuse_local_tracking(track: Sequence[str]) -> None:
    if "mlflow" in track and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UserError(
            "--track mlflow on other machines takes a server that all of them reach; set MLFLOW_TRACKING_URI to it"
        )


class _Grid:
    """Runs that wait, runs that go on, and what arrives from them."""

    def __init__(
        self, ray: Any, out: Path, listener: Listener, track: tuple[str, ...], wanted: Wanted, cpus: int, gpus: float,
        at_once: int,
    ) -> None:  # fmt: skip
        self.ray, self.out, self.listener, self.track, self.wanted = ray, out, listener, track, wanted
        self.cpus, self.at_once = cpus, at_once
        self.failed: dict[str, str] = {}
        self.losses: dict[str, int] = {}  # in a row, by run name
        self.locks: dict[str, ExitStack] = {}  # a run's folder is ours while the run goes on, wherever it does
        # lost runs are started again here, with their files: Ray itself would start them from the beginning
        self.task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, num_returns="streaming")(work)

    def run(self, todo: Sequence[Run]) -> dict[str, str]:
        waiting, going = deque(todo), dict[Any, Run]()
        try:
            while waiting or going:
                while waiting and len(going) < self.at_once:
                    run = waiting.popleft()
                    stream = self._start(run)
                    if stream is not None:
                        going[stream] = run
                for stream in self.ray.wait(list(going), num_returns=1)[0] if going else ():
                    run = going[stream]
                    event = self._receive(stream, run)
                    if isinstance(event, Finished | Failed | Lost):
                        del going[stream]
                    if isinstance(event, Lost):
                        waiting.appendleft(run)
                    elif isinstance(event, Finished | Failed):
                        self._over(run)
            return self.failed
        finally:
            for stream in going:
                self.ray.cancel(stream, force=True)
            for lock in self.locks.values():
                lock.close()

    def _start(self, run: Run) -> Any:
        folder = self.out / run.name
        try:
            if run.name not in self.locks:
                self.locks[run.name] = ExitStack()
                self.locks[run.name].enter_context(lock_folder(folder))
            files = pack(folder)
        except (UserError, OSError) as error:
            self._tell(run, Failed(str(error)))
            self._over(run)
            return None
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        job = RayJob(
            run.config, files, folder, self.track, self.cpus, self.at_once, runner.CHECKPOINT_SECONDS,
            SECONDS_BETWEEN_MESSAGES, self.wanted, environment,
        )  # fmt: skip
        return self.task.remote(job)

    def _over(self, run: Run) -> None:
        self.locks.pop(run.name).close()

    def _receive(self, stream: Any, run: Run) -> Event | None:
        """The next thing that a run sent; files are put where they belong."""
        from ray.exceptions import RayError, RayTaskError

        try:
            item: Event | Parcel = self.ray.get(next(stream))
        except StopIteration:
            item = Failed("it ended without a result")
        except RayTaskError as error:  # our own code failed there, outside of the run
            item = Failed(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:  # its machine or process is gone
            self.losses[run.name] = self.losses.get(run.name, 0) + 1
            reason = str(error).strip().partition("\n")[0]
            if self.losses[run.name] > MOST_LOSSES:
                item = Failed(f"it lost its machine {MOST_LOSSES + 1} times without getting ahead ({reason})")
            else:
                item = Lost(reason)
        if isinstance(item, dict):
            unpack(item, self.out / run.name)
            self.losses.pop(run.name, None)
            return None
        self._tell(run, item)
        return item

    def _tell(self, run: Run, event: Event) -> None:
        if isinstance(event, Failed):
            self.failed[run.name] = event.reason
        self.listener(run, event)


# ---------------------------------------------------------------------------------------------- in a worker


def work(job: RayJob) -> Iterator[Event | Parcel]:
    """A run's events, and its files after each checkpoint and at the end, in the order in which they come."""
    yield Started(name_of_worker())
    lacking = job.wanted.lacking()  # machines may have joined since all were asked
    if lacking is not None:
        yield Failed(f"the machine {name_of_worker()} is of no use: {lacking}")
        return
    os.environ.update(job.environment)
    outbox: queue.Queue[Event | Parcel] = queue.Queue(maxsize=4)
    with tempfile.TemporaryDirectory(prefix="vqprompt-") as name:
        folder = Path(name) / "run"
        unpack(job.files, folder)
        threading.Thread(target=_work, args=(job, folder, outbox), daemon=True).start()
        while True:
            item = outbox.get()
            yield item
            if isinstance(item, Finished | Failed):
                return


def _work(job: RayJob, folder: Path, outbox: queue.Queue[Event | Parcel]) -> None:
    torch.set_num_threads(job.threads)
    sent = _stamp(folder)

    def send(event: Advanced) -> None:
        nonlocal sent
        if (now := _stamp(folder)) != sent:  # between two saves, because the run itself calls this
            sent = now
            outbox.put(pack(folder))
        outbox.put(event)

    try:
        found = do_run(
            job.config, folder, send, job.message_seconds, shown_folder=job.shown_folder, track=job.track,
            at_once=job.at_once, checkpoint_seconds=job.checkpoint_seconds,
        )  # fmt: skip
        outbox.put(pack(folder))
    except BaseException as error:  # the folder cannot be read, for example: the disk is full
        found = Failed(f"{type(error).__name__}: {error}")
    outbox.put(found)


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Changes with every checkpoint."""
    try:
        status = (folder / INFO).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

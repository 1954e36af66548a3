"""The runs of a grid on a Ray cluster.

A run is a Ray task that yields events: progress, and its files after every checkpoint. The files arrive here as bytes
and are kept in the table's folder, so no shared disk is needed. A run that loses its machine is started again on
another one, with the files of its last checkpoint.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import lock_folder
from vqprompt.research.cluster.ray_cluster import alive_nodes, check_machines, connected
from vqprompt.research.cluster.requirements import Requirements, host_name
from vqprompt.research.cluster.transfer import FolderContent, pack, unpack
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

SECONDS_BETWEEN_MESSAGES = 0.5


@dataclass(frozen=True)
class RayJob:
    """What a worker has to do. files: of the run, so far. shown_folder: where people will find them. at_once: how many
    runs share the hardware."""

    run: RemoteRun
    files: FolderContent
    shown_folder: Path
    at_once: int


class RayExecutor:
    """address: HOST:PORT of the head; None: the cluster that this machine is part of. cpus, gpus: per run; fractions of
    a GPU are allowed. at_once: the most runs at a time."""

    def __init__(
        self, address: str | None = None, cpus: int | None = None, gpus: float | None = None, at_once: int | None = None
    ) -> None:
        self.address, self.cpus, self.gpus, self.at_once = address, cpus, gpus, at_once

    def run(self, todo: Sequence[Run], out: Path, listener: Listener, track: Sequence[str] = ()) -> dict[str, str]:
        if not todo:
            return {}
        refuse_local_tracking(track)
        requirements = requirements_of(todo)
        with connected(self.address) as ray:
            cpus, gpus = self._resources(ray)
            slots = check_machines(ray, requirements, cpus, gpus)
            grid = _Grid(ray, out, listener, tuple(track), requirements, cpus, gpus, min(self.at_once or slots, slots))
            return grid.run(todo)

    def _resources(self, ray: Any) -> tuple[int, float]:
        """CPUs and GPUs per run: as asked for, else one GPU if there are any, and at most eight cores."""
        nodes = [node["Resources"] for node in alive_nodes(ray)]
        gpus = self.gpus if self.gpus is not None else min(1.0, max(n.get("GPU", 0.0) for n in nodes))
        most = max((n.get("CPU", 0.0) for n in nodes if n.get("GPU", 0.0) >= gpus), default=1.0)
        return self.cpus or max(1, min(CORES_PER_RUN, int(most))), gpus


class _Grid:
    """Runs that wait, runs that are being done, and what arrives from these."""

    def __init__(
        self, ray: Any, out: Path, listener: Listener, track: tuple[str, ...], requirements: Requirements, cpus: int,
        gpus: float, at_once: int,
    ) -> None:  # fmt: skip
        self.ray, self.out, self.listener, self.track, self.requirements = ray, out, listener, track, requirements
        self.cpus, self.at_once = cpus, at_once
        self.failed: dict[str, str] = {}
        self.losses: dict[str, int] = {}  # in a row, by run name
        self.locks: dict[str, ExitStack] = {}  # a run's folder is locked here while another machine does the run
        # no retries by Ray, which would start a lost run from the beginning; we start it again with its files
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
        remote = RemoteRun(run.config, self.track, self.requirements, self.cpus, SECONDS_BETWEEN_MESSAGES)
        return self.task.remote(RayJob(remote, files, folder, self.at_once))

    def _over(self, run: Run) -> None:
        self.locks.pop(run.name).close()

    def _receive(self, stream: Any, run: Run) -> Event | None:
        """The next event of a run. Files are written to the run's folder, and give None."""
        from ray.exceptions import RayError, RayTaskError

        try:
            item: Event | FolderContent = self.ray.get(next(stream))
        except StopIteration:
            item = Failed("it ended without a result")
        except RayTaskError as error:  # our own code failed there, outside of the run
            item = Failed(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:  # its machine or process was lost
            self.losses[run.name] = self.losses.get(run.name, 0) + 1
            item = after_loss(self.losses[run.name], str(error).strip().partition("\n")[0])
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


def work(job: RayJob) -> Iterator[Event | FolderContent]:
    """A run's events, and its files after each checkpoint and at the end, in the order in which they come."""
    yield Started(host_name())
    refusal = job.run.refusal()  # machines may have joined since all were asked
    if refusal is not None:
        yield refusal
        return
    outbox: queue.Queue[Event | FolderContent] = queue.Queue(maxsize=4)
    with tempfile.TemporaryDirectory(prefix="vqprompt-") as name:
        folder = Path(name) / "run"
        unpack(job.files, folder)
        threading.Thread(target=_work, args=(job, folder, outbox), daemon=True).start()
        while True:
            item = outbox.get()
            yield item
            if isinstance(item, Finished | Failed):
                return


def _work(job: RayJob, folder: Path, outbox: queue.Queue[Event | FolderContent]) -> None:
    sent = _stamp(folder)

    def send(event: Advanced) -> None:
        nonlocal sent
        if (now := _stamp(folder)) != sent:  # between two saves, because the run itself calls this
            sent = now
            outbox.put(pack(folder))
        outbox.put(event)

    try:
        ending = job.run.do(folder, send, job.shown_folder, job.at_once)
        outbox.put(pack(folder))
    except BaseException as error:  # for example: the folder cannot be read, or the disk is full
        ending = Failed(f"{type(error).__name__}: {error}")
    outbox.put(ending)


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Changes with every checkpoint."""
    try:
        status = (folder / INFO).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

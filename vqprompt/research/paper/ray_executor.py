"""The runs of a grid on a Ray cluster.

A run is a Ray task that yields events: progress, and its files after every checkpoint. The files arrive here as bytes
and are kept in the table's folder, so no shared disk is needed. A run that loses its machine is started again on
another one, with the files of its last checkpoint.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.core.files import lock_folder
from vqprompt.research.cluster.ray_cluster import alive_nodes, check_machines, connected
from vqprompt.research.cluster.requirements import Requirements, host_name
from vqprompt.research.cluster.transfer import FolderContent, pack, unpack
from vqprompt.research.paper.execution import (
    CORES_PER_RUN,
    Advanced,
    Event,
    Failed,
    Finished,
    Listener,
    RemoteGrid,
    RemoteRun,
    Started,
    checkpoint_stamp,
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


class _Grid(RemoteGrid):
    """The runs as Ray tasks. A run's folder is locked here while another machine does the run."""

    def __init__(
        self, ray: Any, out: Path, listener: Listener, track: tuple[str, ...], requirements: Requirements, cpus: int,
        gpus: float, at_once: int,
    ) -> None:  # fmt: skip
        super().__init__(out, listener, at_once)
        self.ray, self.track, self.requirements, self.cpus = ray, track, requirements, cpus
        self.locks: dict[str, ExitStack] = {}  # by run name
        # no retries by Ray, which would start a lost run from the beginning; we start it again with its files
        self.task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, num_returns="streaming")(work)

    def start(self, run: Run) -> Any:
        folder = self.out / run.name
        if run.name not in self.locks:
            self.locks[run.name] = ExitStack()
            self.locks[run.name].enter_context(lock_folder(folder))
        remote = RemoteRun(run.config, self.track, self.requirements, self.cpus, SECONDS_BETWEEN_MESSAGES)
        return self.task.remote(RayJob(remote, pack(folder), folder, self.at_once))

    def events(self, jobs: dict[Any, Run]) -> Iterator[tuple[Any, Event]]:
        """Files that arrive are written to the run's folder."""
        for stream in self.ray.wait(list(jobs), num_returns=1)[0] if jobs else ():
            item = self._receive(stream, jobs[stream])
            if isinstance(item, dict):
                unpack(item, self.out / jobs[stream].name)
            else:
                yield stream, item

    def _receive(self, stream: Any, run: Run) -> Event | FolderContent:
        from ray.exceptions import RayError, RayTaskError

        try:
            item: Event | FolderContent = self.ray.get(next(stream))
        except StopIteration:
            return Failed("it ended without a result")
        except RayTaskError as error:  # our own code failed there, outside of the run
            return Failed(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:  # its machine or process was lost
            return self.lost(run, str(error).strip().partition("\n")[0])
        return item

    def tell(self, run: Run, event: Event) -> None:
        super().tell(run, event)
        if isinstance(event, Finished | Failed):
            self.locks.pop(run.name).close()

    def stop(self, jobs: dict[Any, Run]) -> None:
        for stream in jobs:
            self.ray.cancel(stream, force=True)
        for lock in self.locks.values():
            lock.close()


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
    sent = checkpoint_stamp(folder)

    def send(event: Advanced) -> None:
        nonlocal sent
        if (now := checkpoint_stamp(folder)) != sent:  # between two saves, because the run itself calls this
            sent = now
            outbox.put(pack(folder))
        outbox.put(event)

    try:
        ending = job.run.do(folder, send, job.shown_folder, job.at_once)
        outbox.put(pack(folder))
    except BaseException as error:  # for example: the folder cannot be read, or the disk is full
        ending = Failed(f"{type(error).__name__}: {error}")
    outbox.put(ending)

"""The runs of a grid on a Ray cluster.

A run is a Ray task that yields events: progress, and its files after every checkpoint. The files arrive here as bytes
and are kept in the table's folder, so no shared disk is needed. A run that loses its machine is started again on
another one, with the files of its last checkpoint.
"""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import lock_folder, write_atomically
from vqprompt.research.paper.execution import (
    CORES_PER_RUN,
    Event,
    Executor,
    Failed,
    Finished,
    Job,
    Requirements,
    checkpoint_stamp,
)
from vqprompt.research.paper.grids import Run

SECONDS_BETWEEN_MESSAGES = 0.5
SECONDS_TO_ANSWER = 5.0
SECONDS_TO_GREET = 120.0  # a worker's process has to start and to import PyTorch
HOW = (
    "start one with `ray start --head`, and run this command on a machine of the cluster, with the address that Ray "
    "printed, as in --on ray=10.0.0.1:6379"
)
LAST = ("metrics.json", "checkpoint.json")  # they name the other files, so they are written last
FolderContent = dict[str, bytes]


class RayExecutor(Executor):
    """address: HOST:PORT of the head; None: the cluster that this machine is part of. cpus, gpus: per run; fractions of
    a GPU are allowed. at_once: the most runs at a time. A run's folder is locked here while another machine does it."""

    def __init__(
        self, address: str | None = None, cpus: int | None = None, gpus: float | None = None, at_once: int | None = None
    ) -> None:
        self.address, self.cpus, self.gpus, self.most = address, cpus, gpus, at_once

    @contextmanager
    def opened(self, todo: Sequence[Run]) -> Iterator[None]:
        self.requirements = self.requirements_of(todo)
        self.locks: dict[str, ExitStack] = {}  # by run name
        with connected(self.address) as self.ray:
            self.threads, gpus = self._resources()
            slots = check_machines(self.ray, self.requirements, self.threads, gpus)
            self.at_once = min(self.most or slots, slots)
            # no retries by Ray, which would start a lost run from the beginning; we start it again with its files
            settings = {"num_cpus": self.threads, "num_gpus": gpus, "max_retries": 0, "num_returns": "streaming"}
            self.task = self.ray.remote(**settings)(work)
            try:
                yield
            finally:
                for stream in self.jobs:
                    self.ray.cancel(stream, force=True)
                for lock in self.locks.values():
                    lock.close()

    def _resources(self) -> tuple[int, float]:
        """CPUs and GPUs per run: as asked for, else one GPU if there are any, and at most eight cores."""
        nodes = [node["Resources"] for node in alive_nodes(self.ray)]
        gpus = self.gpus if self.gpus is not None else min(1.0, max(n.get("GPU", 0.0) for n in nodes))
        most = max((n.get("CPU", 0.0) for n in nodes if n.get("GPU", 0.0) >= gpus), default=1.0)
        return self.cpus or max(1, min(CORES_PER_RUN, int(most))), gpus

    def start(self, run: Run) -> Any:
        folder = self.out / run.name
        if run.name not in self.locks:
            self.locks[run.name] = ExitStack()
            self.locks[run.name].enter_context(lock_folder(folder))
        job = Job(
            run.config, folder, self.track, SECONDS_BETWEEN_MESSAGES, self.at_once, threads=self.threads,
            requirements=self.requirements,
        )  # fmt: skip
        return self.task.remote(job, pack(folder))

    def events(self) -> Iterator[tuple[Any, Event]]:
        """Files that arrive are written to the run's folder."""
        for stream in self.ray.wait(list(self.jobs), num_returns=1)[0] if self.jobs else ():
            item = self._receive(stream, self.jobs[stream])
            if isinstance(item, dict):
                unpack(item, self.out / self.jobs[stream].name)
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


# ---------------------------------------------------------------------------------------------- in a worker


def work(job: Job, files: FolderContent) -> Iterator[Event | FolderContent]:
    """A run's events, and its files after each checkpoint and at the end, in the order in which they come. files: those
    that it has so far."""
    outbox: queue.Queue[Event | FolderContent] = queue.Queue(maxsize=4)
    with tempfile.TemporaryDirectory(prefix="vqprompt-") as name:
        folder = Path(name) / "run"
        unpack(files, folder)
        threading.Thread(target=_work, args=(job, folder, outbox), daemon=True).start()
        while True:
            item = outbox.get()
            yield item
            if isinstance(item, Finished | Failed):
                return


def _work(job: Job, folder: Path, outbox: queue.Queue[Event | FolderContent]) -> None:
    sent = checkpoint_stamp(folder)

    def send(event: Event) -> None:
        nonlocal sent
        if (now := checkpoint_stamp(folder)) != sent:  # between two saves, because the run itself calls this
            sent = now
            outbox.put(pack(folder))
        outbox.put(event)

    try:
        ending = job.do(send, folder)
        outbox.put(pack(folder))
    except BaseException as error:  # for example: the folder cannot be read, or the disk is full
        ending = Failed(f"{type(error).__name__}: {error}")
    outbox.put(ending)


# ---------------------------------------------------------------------------------------------- the files of a run


def pack(folder: Path) -> FolderContent:
    """All files of a folder by relative path, except hidden ones (locks, partial files)."""
    if not folder.is_dir():
        return {}
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not _hidden(name)}


def unpack(content: FolderContent, folder: Path) -> None:
    """Make a folder equal to the packed one. At any moment, a reader finds the whole old or the whole new state."""
    for name in content:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise UserError(f"a run's files include {name!r}, which leads out of its folder; nothing was unpacked")
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(content, key=lambda name: (LAST.index(name) if name in LAST else -1, name)):
        place = folder / name
        if not place.is_file() or place.stat().st_size != len(content[name]) or place.read_bytes() != content[name]:
            write_atomically(place, content[name])
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in content and not _hidden(name):
            file.unlink()


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


# ---------------------------------------------------------------------------------------------- the cluster


def import_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a future Ray's default; else it warns
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs Ray: pip install 'vqprompt[ray]'") from None
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at this address. address=None: the cluster that this machine is part
    of; if there is none, one is started on this machine, and ended after use."""
    ray = import_ray()
    if address is not None:
        check_answers(address)
    already = ray.is_initialized()
    if not already:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=address, **quiet) if address else ray.init(include_dashboard=False, **quiet)
        except (Exception, SystemExit) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(
                f"--on ray: the cluster at {address or 'this machine'} cannot be used ({reason}); {HOW}"
            ) from None
    try:
        yield ray
    finally:
        if not already:
            ray.shutdown()


def check_answers(address: str) -> None:
    """Refuse an address where nothing listens, within seconds. (Ray itself would try for two minutes.)"""
    host, colon, port = address.rpartition(":")
    if address.startswith("ray://") or not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--on ray={address}: expected HOST:PORT of the head, as in --on ray=10.0.0.1:6379; {HOW}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise UserError(f"--on ray={address}: nobody answers there ({error.strerror or error}); {HOW}") from None


def alive_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def check_machines(ray: Any, requirements: Requirements, cpus: float, gpus: float) -> int:
    """Ask every machine that could get work whether it has what is needed. Refuse if one has not, or if there
    is none. Returns how many runs the cluster can do at once."""
    nodes = alive_nodes(ray)
    able = [n for n in nodes if n["Resources"].get("CPU", 0) >= cpus and n["Resources"].get("GPU", 0) >= gpus]
    if not able:
        resources = "; ".join(
            f"{n['NodeManagerHostname']}: {n['Resources'].get('CPU', 0):g} CPUs, {n['Resources'].get('GPU', 0):g} GPUs"
            for n in nodes
        )
        raise UserError(f"--on ray: no machine has {cpus:g} CPUs and {gpus:g} GPUs ({resources}); ask for less per run")
    asked = [_ask(ray, node, requirements) for node in able]
    for node, answer in zip(able, asked, strict=True):
        if missing := _what_is_missing(ray, node, requirements, answer):
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            raise UserError(f"--on ray: the machine {name} cannot be used: {missing}")
    counts = [n["Resources"].get("CPU", 0) // cpus if cpus else float("inf") for n in able]
    if gpus:
        slots = [
            max(1, int(1 / gpus)) * int(n["Resources"]["GPU"]) if gpus < 1 else n["Resources"]["GPU"] // gpus
            for n in able
        ]
        counts = [min(a, b) for a, b in zip(counts, slots, strict=True)]
    return max(1, int(min(sum(counts), 1_000_000)))


def _ask(ray: Any, node: dict[str, Any], requirements: Requirements) -> Any:
    """The coming answer of a machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(Requirements.missing)
    return task.options(scheduling_strategy=there).remote(requirements)


def _what_is_missing(ray: Any, node: dict[str, Any], requirements: Requirements, answer: Any) -> str | None:
    """What a machine answers. None if nothing is missing, or if it has left the cluster meanwhile."""
    from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError

    latest = time.monotonic() + SECONDS_TO_GREET
    while True:
        try:
            missing: str | None = ray.get(answer, timeout=SECONDS_TO_GREET)
            return missing
        except GetTimeoutError:
            return f"it did not answer within {SECONDS_TO_GREET:.0f} seconds"
        except RayError as error:
            if node["NodeID"] not in {other["NodeID"] for other in alive_nodes(ray)}:
                return None
            if not isinstance(error, TaskUnschedulableError) or time.monotonic() > latest:
                # most often: it has no vqprompt, or one so old that this module is not in it
                reason = str(error).strip().rpartition("\n")[2]
                return f"it cannot run vqprompt {requirements.version} ({reason}); install the same version there"
        time.sleep(0.2)  # it has just joined, and the cluster does not know it everywhere yet
        answer = _ask(ray, node, requirements)

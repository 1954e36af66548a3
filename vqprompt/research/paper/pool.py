"""Does the runs of a grid on this machine, several at once. Finished runs are skipped, interrupted ones are resumed.

Each worker is a process that does many runs, so that it imports and compiles only once. If a worker dies, only its
current run fails, and a new worker takes its place.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from vqprompt.core.backbones.weights import backbone_path
from vqprompt.core.runtime.cores import cpu_cores
from vqprompt.research.datasets import parse_data
from vqprompt.research.paper.execution import CORES_PER_RUN, Advanced, Event, Failed, Listener, Started, do_run
from vqprompt.research.paper.grids import Run
from vqprompt.research.paper.table_rows import read_runs
from vqprompt.research.results.config import MACHINE_SETTINGS, RunConfig, completed

SHARED_FOLDER = ".shared"  # queries that runs on the same images share while the pool works
SECONDS_BETWEEN_MESSAGES = 0.1


@dataclass(frozen=True)
class Job:
    """What a worker has to do."""

    config: RunConfig
    folder: Path
    shared_queries: Path
    track: Sequence[str]


@dataclass(frozen=True)
class Worker:
    process: SpawnProcess
    pipe: Connection
    run: Run | None = None  # None: it is idle
    method: str = ""  # of its last run


def default_workers() -> int:
    """One worker per GPU, or one per 8 cores."""
    return torch.cuda.device_count() or max(1, cpu_cores() // CORES_PER_RUN)


# ---------------------------------------------------------------------------------------------- what is done already


def split_done(runs: Sequence[Run], out: Path) -> tuple[list[Run], dict[str, Path]]:
    """Which runs are not finished; and which are finished only in another table's folder, by their name here."""
    done: dict[str, list[Path]] = {}
    for saved in read_runs(out):
        if saved.result.done and saved.folder is not None:
            done.setdefault(_identity(completed(saved.config)), []).append(saved.folder)
    todo, in_other_tables = [], dict[str, Path]()
    for run in runs:
        folders, place = done.get(_identity(run.config.model_dump(mode="json")), []), out / run.name
        if place in folders:
            continue
        if not folders or place.exists():  # an existing folder holds an interrupted run, which is resumed
            todo.append(run)
        else:
            in_other_tables[run.name] = folders[0]
    return todo, in_other_tables


def _identity(config: dict[str, Any]) -> str:
    """Equal for two runs that are the same: all settings except the machine's. A named data set is the same wherever it
    is kept; other images and weights are the same only if their paths are."""
    name, path = parse_data(config["data"])
    data = name or str(Path(str(path)).expanduser().resolve())
    settings = {**config, "data": data, "backbone": backbone_path(config["backbone"])}
    return json.dumps({key: value for key, value in sorted(settings.items()) if key not in MACHINE_SETTINGS})


def adopt(folder: Path, place: Path) -> None:
    """Use a finished run of another table in this one: link its files to where this table has its runs."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder, partial, copy_function=_link, ignore=shutil.ignore_patterns(".*"))
    partial.rename(place)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # safe, because files of a run are replaced, never changed in place
    except OSError:  # the file system has no links
        shutil.copy2(source, target)


# ---------------------------------------------------------------------------------------------- the pool


class LocalExecutor:
    """A pool on this machine."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or default_workers()

    def run(self, todo: Sequence[Run], out: Path, listener: Listener, track: Sequence[str] = ()) -> dict[str, str]:
        return Pool(min(self.workers, len(todo)), out, listener, track).run(todo)


class Pool:
    def __init__(self, size: int, out: Path, listener: Listener, track: Sequence[str]) -> None:
        self.size, self.out, self.listener, self.track = size, out, listener, track
        self.failed: dict[str, str] = {}
        self.workers = [start_worker(slot, size) for slot in range(size)]

    def run(self, todo: Sequence[Run]) -> dict[str, str]:
        waiting = deque(todo)
        try:
            while True:
                for slot, worker in enumerate(self.workers):
                    if worker.run is None and waiting:
                        self._assign(slot, waiting)
                busy = {worker.pipe: slot for slot, worker in enumerate(self.workers) if worker.run is not None}
                if not busy:
                    return self.failed
                for pipe in wait(list(busy)):
                    self._receive(busy[pipe])  # type: ignore[index]
        finally:
            self._stop()

    def _assign(self, slot: int, waiting: deque[Run]) -> None:
        worker = self.workers[slot]
        run = _next(waiting, worker.method, {other.method for other in self.workers if other.run is not None})
        waiting.remove(run)
        self.workers[slot] = replace(worker, run=run, method=run.config.method)
        self.listener(run, Started())
        worker.pipe.send(Job(run.config, self.out / run.name, self.out / SHARED_FOLDER, self.track))

    def _receive(self, slot: int) -> None:
        worker, died = self.workers[slot], False
        assert worker.run is not None
        try:
            event: Event = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            died = True
            worker.process.join()
            event = Failed(f"its process ended with status {worker.process.exitcode} (−9: out of memory?)")
        if isinstance(event, Failed):
            self.failed[worker.run.name] = event.reason
        self.listener(worker.run, event)
        if not isinstance(event, Advanced):
            self.workers[slot] = start_worker(slot, self.size) if died else replace(worker, run=None)

    def _stop(self) -> None:
        for worker in self.workers:
            worker.pipe.close()  # an idle worker ends when its pipe closes
            if worker.run is not None:
                worker.process.terminate()
            worker.process.join()
        shutil.rmtree(self.out / SHARED_FOLDER, ignore_errors=True)


def _next(waiting: Sequence[Run], method: str, others: set[str]) -> Run:
    """The next run for a worker: one of the method it has compiled code for, else of a method no other worker has."""
    same = (run for run in waiting if run.config.method == method)
    new = (run for run in waiting if run.config.method not in others)
    return next(same, None) or next(new, waiting[0])


# ---------------------------------------------------------------------------------------------- a worker


def start_worker(slot: int, workers: int) -> Worker:
    spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
    ours, theirs = spawn.Pipe()
    gpus = torch.cuda.device_count()
    threads = max(1, torch.get_num_threads() // workers)
    device = f"cuda:{slot % gpus}" if gpus > 1 else None
    process = spawn.Process(target=_work, args=(theirs, threads, workers, device), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _work(pipe: Connection, threads: int, workers: int, device: str | None) -> None:
    """What a worker does: receive jobs and send events, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent process decides what to do
    torch.set_num_threads(threads)
    compiled_for: tuple[str, str, int] | None = None
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        config = job.config
        shapes = (config.method, config.backbone, config.size)
        if shapes != compiled_for and torch.cuda.is_available():
            torch._dynamo.reset()  # so that variants for other shapes do not add up to dynamo's limit
            torch.cuda.empty_cache()
        compiled_for = shapes
        if device and config.device in ("auto", "cuda"):
            config = config.model_copy(update={"device": device})
        try:
            pipe.send(
                do_run(config, job.folder, pipe.send, SECONDS_BETWEEN_MESSAGES, shared_queries=job.shared_queries,
                       track=job.track, at_once=workers)
            )  # fmt: skip
        except (BrokenPipeError, KeyboardInterrupt):
            return  # the parent process has ended

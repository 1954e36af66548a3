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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from vqprompt.core.backbones.weights import backbone_path
from vqprompt.core.files import delete_abandoned, partial_path
from vqprompt.core.runtime.cores import cpu_cores
from vqprompt.research.datasets import parse_data
from vqprompt.research.paper.execution import CORES_PER_RUN, Event, Executor, Failed, Job
from vqprompt.research.paper.grids import Run
from vqprompt.research.paper.table_rows import read_runs
from vqprompt.research.results.config import MACHINE_SETTINGS, completed
from vqprompt.research.runs.refusals import by_content

SECONDS_BETWEEN_MESSAGES = 0.1
SHARED_FOLDER = ".shared"  # queries that runs on the same images share while the pool works


def left_to_do(runs: Sequence[Run], out: Path) -> list[Run]:
    """The runs that are not finished. What is finished only in another table's folder is linked to its place here."""
    done: dict[str, list[Path]] = {}
    for saved in read_runs(out):
        if saved.result.done and saved.folder is not None:
            done.setdefault(_identity(completed(saved.config), saved.folder), []).append(saved.folder)
    todo = []
    for run in runs:
        folders, place = done.get(_identity(run.config.model_dump(mode="json")), []), out / run.name
        if place in folders:
            continue
        if not folders or place.exists():  # an existing folder holds an interrupted run, which is resumed
            todo.append(run)
        else:
            delete_abandoned(place.parent, place.name)
            partial = partial_path(place)
            shutil.copytree(folders[0], partial, copy_function=_link, ignore=shutil.ignore_patterns(".*"))
            partial.rename(place)
    return todo


def _identity(config: dict[str, Any], folder: Path | None = None) -> str:
    """Equal for two runs that are the same: all settings except the machine's. A named data set is the same wherever it
    is kept; other images and weights are the same only if their paths are. folder: of a run that is done."""
    name, path = parse_data(config["data"])
    data = name or str(Path(str(path)).expanduser().resolve())
    settings = {**by_content(config, folder), "data": data, "backbone": backbone_path(config["backbone"])}
    return json.dumps({key: value for key, value in sorted(settings.items()) if key not in MACHINE_SETTINGS})


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # safe, because files of a run are replaced, never changed in place
    except OSError:  # the file system has no links
        shutil.copy2(source, target)


@dataclass(eq=False)
class Worker:
    """A process, and our end of the pipe to it."""

    process: SpawnProcess
    pipe: Connection
    method: str = ""  # of its last run


class LocalExecutor(Executor):
    """A pool on this machine: by default one worker per GPU, or one per 8 cores."""

    def __init__(self, workers: int | None = None) -> None:
        self.most = workers or torch.cuda.device_count() or max(1, cpu_cores() // CORES_PER_RUN)

    @contextmanager
    def opened(self, todo: Sequence[Run]) -> Iterator[None]:
        self.at_once, self.shared_queries = min(self.most, self.total), self.out / SHARED_FOLDER
        self.threads = max(1, torch.get_num_threads() // self.at_once)
        self.workers = [start_worker(slot) for slot in range(self.at_once)]
        try:
            yield
        finally:
            for worker in self.workers:
                worker.pipe.close()  # an idle worker ends when its pipe closes
                if worker in self.jobs:
                    worker.process.terminate()
                worker.process.join()
            shutil.rmtree(self.shared_queries, ignore_errors=True)

    def choose(self, waiting: Sequence[Run]) -> Run:
        """One of the method that the worker has compiled code for, else of a method that no other worker has."""
        self.idle = next(worker for worker in self.workers if worker not in self.jobs)
        others = {run.config.method for run in self.jobs.values()}
        same = (run for run in waiting if run.config.method == self.idle.method)
        new = (run for run in waiting if run.config.method not in others)
        return next(same, None) or next(new, waiting[0])

    def start(self, run: Run) -> Worker:
        folder, seconds = self.out / run.name, SECONDS_BETWEEN_MESSAGES
        job = Job(run.config, folder, self.track, seconds, self.threads, self.at_once, self.shared_queries)
        try:
            self.idle.pipe.send(job)
        except BrokenPipeError:  # it was killed between two runs
            self.idle = self._replaced(self.idle)
            self.idle.pipe.send(job)
        self.idle.method = run.config.method
        return self.idle

    def events(self) -> Iterator[tuple[Worker, Event]]:
        busy = {worker.pipe: worker for worker in self.jobs}
        for pipe in wait(list(busy)):
            worker = busy[pipe]
            try:
                event: Event = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join()
                self._replaced(worker)
                event = Failed(f"its process ended with status {worker.process.exitcode} (−9: out of memory?)")
            yield worker, event

    def _replaced(self, dead: Worker) -> Worker:
        """A new worker in the place of one whose process has ended."""
        slot = self.workers.index(dead)
        self.workers[slot] = start_worker(slot)
        return self.workers[slot]


def start_worker(slot: int) -> Worker:
    spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
    ours, theirs = spawn.Pipe()
    gpus = torch.cuda.device_count()
    device = f"cuda:{slot % gpus}" if gpus > 1 else None
    process = spawn.Process(target=_do_jobs, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _do_jobs(pipe: Connection, device: str | None) -> None:
    """What a worker does: receive jobs and send events, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent process decides what to do

    def send(event: Event) -> None:
        try:
            pipe.send(event)
        except BrokenPipeError:  # the parent process has ended; this is no failure of the run
            raise SystemExit from None

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
            job = replace(job, config=config.model_copy(update={"device": device}))
        send(job.do(send))

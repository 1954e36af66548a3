"""Does a grid's runs: skips what is done, goes on with what was interrupted, several at once.

Every worker is a process that lives for many runs, so that imports and compiled kernels serve them all; one that dies
takes its own run with it, no other, and is replaced.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vqprompt.backbones.load import backbone_path
from vqprompt.datasets import parse_data
from vqprompt.errors import UserError
from vqprompt.paper.grids import Run
from vqprompt.paper.results import read_runs
from vqprompt.progress import Progress
from vqprompt.runs import runner as runs
from vqprompt.runs.config import MACHINE, completed

ERROR, SHARED = "error.txt", ".shared"


CORES_A_RUN = 8  # more hardly help a single run
SECONDS_A_MESSAGE = 0.1
Event = tuple[str, *tuple[Any, ...]]
"""("begun",), ("at", progress), ("done", metrics), ("failed", why)."""


Tell = Callable[[Run, Event], None]


class Worker(NamedTuple):
    process: SpawnProcess
    pipe: Connection
    run: Run | None = None
    method: str = ""  # of its last run


def default_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.cuda.device_count() or max(1, cores // CORES_A_RUN)


def split_done(runs: Sequence[Run], out: Path) -> tuple[list[Run], dict[str, Path]]:
    """The runs that are still to be done; and, of those that are not, the finished ones that lie in another table's
    folder, by their name in this one."""
    done: dict[str, list[Path]] = {}
    for found in read_runs(out):
        if found.metrics["done"] and found.folder is not None:
            done.setdefault(_identity(completed(found.config)), []).append(found.folder)
    todo, elsewhere = [], dict[str, Path]()
    for run in runs:
        folders, place = done.get(_identity(run.config.model_dump(mode="json")), []), out / run.name
        if place in folders:
            continue
        if not folders or place.exists():  # where something is, it goes on
            todo.append(run)
        else:
            elsewhere[run.name] = folders[0]
    return todo, elsewhere


def _identity(config: dict[str, Any]) -> str:
    """What makes two runs one and the same: all settings but the machine's. A data set that has a name is known by it,
    whatever its place; other images and weights are known by their place alone."""
    name, path = parse_data(config["data"])
    data = name or str(Path(str(path)).expanduser().resolve())
    what = {**config, "data": data, "backbone": backbone_path(config["backbone"])}
    return json.dumps({key: value for key, value in sorted(what.items()) if key not in MACHINE})


def adopt(folder: Path, place: Path) -> None:
    """A run that another table has done is this table's too: the same files, linked to where they would be, so that the
    table, the report and whoever looks for them find them."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder, partial, copy_function=_link, ignore=shutil.ignore_patterns(".*"))
    partial.rename(place)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # safe: a run's files are replaced, never written into
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def run_all(todo: Sequence[Run], out: Path, workers: int, tell: Tell, track: Sequence[str] = ()) -> dict[str, str]:
    """Do the runs, each in `out`/its name; returns why some failed, by name. The others are finished all the same."""
    waiting, failed = deque(todo), dict[str, str]()
    count, shared = min(workers, len(todo)), out / SHARED
    crew = [_hire(slot, count) for slot in range(count)]

    def over(slot: int, event: Event) -> None:
        run = crew[slot].run
        assert run is not None
        if event[0] == "failed":
            failed[run.name] = event[1]
        tell(run, event)
        crew[slot] = crew[slot]._replace(run=None)

    try:
        while True:
            for slot, worker in enumerate(crew):
                if worker.run is None and waiting:
                    run = _next(waiting, worker.method, {other.method for other in crew if other.run is not None})
                    waiting.remove(run)
                    crew[slot] = worker._replace(run=run, method=run.config.method)
                    tell(run, ("begun",))
                    worker.pipe.send((run.config, out / run.name, shared, track))
            busy = {worker.pipe: slot for slot, worker in enumerate(crew) if worker.run is not None}
            if not busy:
                return failed
            for pipe in wait(list(busy)):
                slot = busy[pipe]  # type: ignore[index]
                process, busy_with = crew[slot].process, crew[slot].run
                assert busy_with is not None
                try:
                    event = crew[slot].pipe.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    over(slot, ("failed", f"its process ended with status {process.exitcode} (−9: out of memory?)"))
                    crew[slot] = _hire(slot, count)
                    continue
                if event[0] == "at":
                    tell(busy_with, event)
                else:
                    over(slot, event)
    finally:
        for worker in crew:
            worker.pipe.close()  # an idle one ends by itself
            if worker.run is not None:
                worker.process.terminate()
            worker.process.join()
        shutil.rmtree(shared, ignore_errors=True)


def _next(waiting: Sequence[Run], method: str, others: set[str]) -> Run:
    """A run of the method this worker has compiled code for, or else of one that no other worker is at."""
    own = (run for run in waiting if run.config.method == method)
    new = (run for run in waiting if run.config.method not in others)
    return next(own, None) or next(new, waiting[0])


def _hire(slot: int, count: int) -> Worker:
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = spawn.Pipe()
    gpus = torch.cuda.device_count()
    threads = max(1, torch.get_num_threads() // count)
    process = spawn.Process(
        target=_work, args=(theirs, threads, count, f"cuda:{slot % gpus}" if gpus > 1 else None), daemon=True
    )
    process.start()
    theirs.close()
    return Worker(process, ours)


def _work(pipe: Connection, threads: int, at_once: int, device: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption means
    torch.set_num_threads(threads)
    told, kind = 0.0, ("", "", 0)

    def progress(event: Progress) -> None:
        nonlocal told
        if time.monotonic() - told >= SECONDS_A_MESSAGE:
            told = time.monotonic()
            pipe.send(("at", event))

    while True:
        try:
            config, folder, shared, track = pipe.recv()
        except EOFError:
            return
        if kind != (kind := (config.method, config.backbone, config.size)) and torch.cuda.is_available():
            torch._dynamo.reset()  # other shapes: do not add up to dynamo's limit of variants
            torch.cuda.empty_cache()
        if device and config.device in ("auto", "cuda"):
            config = config.model_copy(update={"device": device})
        error_file = folder / ERROR
        try:
            found = runs.run(
                config, folder, resume=True, progress=progress, shared_queries=shared, track=track, at_once=at_once
            )
            error_file.unlink(missing_ok=True)
            pipe.send(("done", {key: found[key] for key in ("faa", "caa", "seconds")}))
        except (BrokenPipeError, KeyboardInterrupt):
            return  # nobody is listening any more
        except UserError as error:
            pipe.send(("failed", str(error)))
        except Exception as error:
            folder.mkdir(parents=True, exist_ok=True)
            error_file.write_text(traceback.format_exc(), encoding="utf-8")
            pipe.send(("failed", f"{type(error).__name__}: {error} (whole story in {error_file})"))

"""Jobs: everything that changes a model. A second process does them one after another, so that predictions continue
while a model learns.

That process, the worker, does one change at a time (changes.py) and reports its progress. It has a lower priority than
the server, and ends when the server ends, for whatever reason.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress
from vqprompt.product.serve.changes import Change, JobUpdate
from vqprompt.product.serve.errors import Busy, NotThere
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.models import without_folder

FINISHED_KEPT = 100
SECONDS_TO_CANCEL = 3.0  # a worker that has not stopped by then is killed
SECONDS_IDLE = 1.0  # between two checks whether other programs changed the models
SECONDS_BETWEEN_UPDATES = 0.1
NICENESS = 5
CANCEL = "cancel"  # the server sends this to stop the running change
ENDED = ("done", "failed", "cancelled")


@dataclass(eq=False)
class Job:
    """One change of one model. finish: called with the last update, before the job is shown as ended. held: what the
    job uses; it is given back when the job has ended."""

    model: str
    change: Change
    finish: Callable[[JobUpdate], None]
    held: ExitStack = field(default_factory=ExitStack)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "queued"
    stage: str = "waiting"
    done: float = 0
    total: float = 0
    started: float | None = None
    ended: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    _stage_began: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def follow(self, event: Progress | None) -> None:
        if event is None:
            return
        stage = event.detail or str(event.stage)
        if stage != self.stage:
            self.stage, self._stage_began = stage, time.monotonic()
        self.done, self.total = event.done, event.total

    def remaining(self) -> float | None:
        """Estimated seconds until this stage is done; None if unknown."""
        if self.state != "running" or not self.total or not self.done:
            return None
        return (time.monotonic() - self._stage_began) / self.done * (self.total - self.done)

    def to_json(self) -> dict[str, Any]:
        elapsed = None if self.started is None else (self.ended or time.time()) - self.started
        return {
            "id": self.id, "kind": self.change.body.kind, "model": self.model, "state": self.state, "stage": self.stage,
            "done": self.done, "total": self.total, "elapsed": elapsed, "remaining": self.remaining(),
            "result": self.result, "error": self.error,
        }  # fmt: skip


class Jobs:
    """A queue, and the thread that gives its jobs to the worker. Nothing that a job or a model does ends the thread.
    idle: called once per second while there is nothing to do. ended: called with every job that has ended."""

    def __init__(self, limits: Limits, idle: Callable[[], None], ended: Callable[[Job], None]) -> None:
        self.limits, self._idle, self._ended = limits, idle, ended
        self._queue: deque[Job] = deque()
        self._all: OrderedDict[str, Job] = OrderedDict()
        self._wake = threading.Condition()
        self._closing = False
        self._process: Any = None
        self._connection: Any = None
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for requests

    def add(self, job: Job) -> Job:
        with self._wake:
            if len(self._queue) >= self.limits.jobs:
                raise Busy(f"{len(self._queue)} changes are already waiting; try again later", retry_after=10)
            self._queue.append(job)
            self._all[job.id] = job
            over = [j for j in self._all.values() if j.state in ENDED][: max(0, len(self._all) - FINISHED_KEPT)]
            for old in over:
                del self._all[old.id]
            self._wake.notify()
        return job

    def get(self, name: str) -> Job:
        if (job := self._all.get(name)) is None:
            raise NotThere(f"there is no such job; only the last {FINISHED_KEPT} are remembered")
        return job

    def all(self) -> list[Job]:
        with self._wake:
            return list(self._all.values())

    def waiting(self) -> int:
        return len(self._queue)

    def cancel(self, job: Job) -> None:
        """A waiting job ends at once, a running one soon. A job that is already finishing still ends as done."""
        with self._wake:
            job.cancelled.set()
            if job in self._queue:
                self._queue.remove(job)
                self._end(job, JobUpdate("cancelled"))

    def forget_ended(self, model: str) -> None:
        """Forget what the ended jobs of a model were about."""
        with self._wake:
            for job in [j for j in self._all.values() if j.model == model and j.state in ENDED]:
                del self._all[job.id]

    def close(self) -> None:
        with self._wake:
            self._closing = True
            for job in self._all.values():
                job.cancelled.set()
            self._wake.notify()
        self._thread.join(timeout=SECONDS_TO_CANCEL + 5)
        self._stop_worker()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while not self._closing:
            with self._wake:
                if not self._queue and not self._closing:
                    self._wake.wait(SECONDS_IDLE)
                job = self._queue.popleft() if self._queue and not self._closing else None
            try:
                if job is not None:
                    self._end(job, self._run(job))
                elif not self._closing:
                    self._idle()
            except Exception:
                traceback.print_exc()

    def _run(self, job: Job) -> JobUpdate:
        job.started, job.state, job.stage = time.time(), "running", "starting"
        job._stage_began = time.monotonic()
        try:
            return self._hand_over(job)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):  # these: it was killed, by the system or by a person
                traceback.print_exc()
            self._stop_worker()
            return JobUpdate("failed", error="the learning process was killed; the model is as it was")

    def _hand_over(self, job: Job) -> JobUpdate:
        self._start_worker()
        self._connection.send(job.change)
        deadline, asked_to_stop = time.monotonic() + self.limits.job_minutes * 60, None
        while True:
            if self._connection.poll(0.05):
                update: JobUpdate = self._connection.recv()
                if update.state != "running":
                    return update
                job.follow(update.progress)
            now = time.monotonic()
            if now > deadline:
                late = JobUpdate("failed", error=f"it took longer than {self.limits.job_minutes:g} minutes")
                return self._stop_worker() or late
            if job.cancelled.is_set():
                if asked_to_stop is None:
                    asked_to_stop = now
                    self._connection.send(CANCEL)
                if now - asked_to_stop > SECONDS_TO_CANCEL:
                    return self._stop_worker() or JobUpdate("cancelled")

    def _end(self, job: Job, update: JobUpdate) -> None:
        with job.held:
            try:
                job.finish(update)
            except Exception as error:
                update = JobUpdate("failed", error=f"{error}")
        job.result, job.error, job.ended = update.result, update.error or None, time.time()
        job.stage = job.state = update.state
        self._ended(job)

    # ------------------------------------------------------------------ the worker

    def _start_worker(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        (process := context.Process(target=work, args=(theirs,), daemon=True)).start()
        self._process = process
        theirs.close()

    def _stop_worker(self) -> JobUpdate | None:
        """Kill the worker. Returns its last update if it had finished just before."""
        last = None
        if self._process is not None:
            self._process.kill()
            self._process.join(timeout=5)
            with suppress(OSError, EOFError):
                while self._connection.poll(0):
                    update = self._connection.recv()
                    last = update if update.state != "running" else last
            with suppress(OSError):
                self._connection.close()
            self._process = None
        return last


# ---------------------------------------------------------------------------------------------- in the worker


class Cancelled(Exception):
    """The change was cancelled. Raised where progress is reported; nothing has changed on disk."""


def work(connection: Connection) -> None:
    """Do the changes that come through the connection, until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(psutil.Error):
        psutil.Process().nice(getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", NICENESS))  # Windows has classes
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    while True:
        try:
            change = connection.recv()
        except (EOFError, OSError):
            return
        if change != CANCEL:  # else it came too late, for the change before
            connection.send(_do(change, connection))


def _end_with_the_server() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _do(change: Change, connection: Connection) -> JobUpdate:
    last = 0.0

    def tell(event: Progress) -> None:
        nonlocal last
        if connection.poll():
            connection.recv()
            raise Cancelled
        if time.monotonic() - last > SECONDS_BETWEEN_UPDATES or event.done == event.total:
            last = time.monotonic()
            connection.send(JobUpdate("running", event))

    try:
        done: JobUpdate = change.body.do(change, tell)
        return done
    except Cancelled:
        return JobUpdate("cancelled")
    except UserError as error:
        return JobUpdate("failed", error=without_folder(error, change.path))
    except OSError as error:
        return JobUpdate("failed", error=f"{error.strerror or type(error).__name__}; the model is as it was")
    except MemoryError:
        return JobUpdate("failed", error="there is not enough memory; the model is as it was")
    except Exception as error:  # report it; the worker stays ready for the next change
        traceback.print_exc()
        return JobUpdate("failed", error=f"{without_folder(error, change.path)}; the model is as it was")

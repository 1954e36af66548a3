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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_message
from typing import Any, Literal

import psutil
from pydantic import BaseModel, Field, PrivateAttr, computed_field

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress
from vqprompt.product.serve.changes import Change, Outcome
from vqprompt.product.serve.errors import Busy, NotThere
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.models import without_folder
from vqprompt.product.serve.settings import Limits

FINISHED_KEPT = 100
SECONDS_TO_CANCEL = 3.0  # a worker that has not stopped by then is killed
SECONDS_BETWEEN_UPDATES = 0.1
CANCEL = "cancel"  # the server sends this to stop the running change


class Job(BaseModel):
    """A change of a model: waiting, running or ended."""

    id: str = Field(default_factory=lambda: secrets.token_hex(8))
    kind: str
    model: str
    preview: bool = Field(description="It only tells which answers would change.")
    state: Literal["queued", "running", "done", "failed", "cancelled"] = "queued"
    stage: str = Field("waiting", description="What is being done.")
    done: float = 0
    total: float = 0
    result: dict[str, Any] = {}
    error: str | None = None
    _finish: Callable[[Outcome], None] = PrivateAttr()
    _future: Future[None] = PrivateAttr()
    _cancelled: threading.Event = PrivateAttr(default_factory=threading.Event)
    _started: float | None = None
    _ended: float | None = None
    _stage_began: float = 0.0

    @computed_field(description="Seconds since it started.")  # type: ignore[prop-decorator]
    @property
    def elapsed(self) -> float | None:
        return None if self._started is None else (self._ended or time.time()) - self._started

    @computed_field(description="Estimated seconds until this stage is done.")  # type: ignore[prop-decorator]
    @property
    def remaining(self) -> float | None:
        if self.state != "running" or not self.total or not self.done:
            return None
        return (time.monotonic() - self._stage_began) / self.done * (self.total - self.done)

    @property
    def is_active(self) -> bool:
        return self.state in ("queued", "running")

    def wait(self) -> None:
        """Until it has ended, or the server."""
        wait([self._future])

    def follow(self, event: Progress) -> None:
        stage = event.detail or str(event.stage)
        if stage != self.stage:
            self.stage, self._stage_began = stage, time.monotonic()
        self.done, self.total = event.done, event.total


class Jobs:
    """Those that wait, the one that runs, and the last ones that ended. A thread gives them to the worker, one after
    another."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        metrics.jobs_waiting.set_function(self.waiting)
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._process: Any = None
        self._connection: Any = None

    def add(self, job: Job, change: Change, finish: Callable[[Outcome], None]) -> Job:
        """finish: called with the last update, before the job is shown as ended."""
        job._finish = finish
        with self._lock:
            if (waiting := self.waiting()) >= self.limits.jobs:
                raise Busy(f"{waiting} changes are already waiting; try again later", headers={"Retry-After": "10"})
            ended = [j for j in self.all() if not j.is_active]
            for old in ended[: max(0, len(self._jobs) + 1 - FINISHED_KEPT)]:
                self._jobs.pop(old.id, None)
            job._future = self._thread.submit(self._run, job, change)
            self._jobs[job.id] = job
        return job

    def get(self, name: str) -> Job:
        if (job := self._jobs.get(name)) is None:
            raise NotThere(f"there is no such job; only the last {FINISHED_KEPT} are remembered")
        return job

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def waiting(self) -> int:
        return sum(job.state == "queued" for job in self.all())

    def cancel(self, job: Job) -> None:
        """A waiting job ends at once, a running one soon. A job that is already finishing still ends as done."""
        job._cancelled.set()
        with self._lock:
            if not job._future.cancelled() and job._future.cancel():
                self._end(job, Outcome("cancelled"))

    def forget_ended(self, model: str) -> None:
        """Forget what the ended jobs of a model were about."""
        for job in self.all():
            if job.model == model and not job.is_active:
                self._jobs.pop(job.id, None)

    def when_idle(self, work: Callable[[], None]) -> None:
        """Do something between two jobs; nothing while a job waits or runs."""
        if not any(job.is_active for job in self.all()):
            self._thread.submit(work).result()

    def close(self) -> None:
        for job in self.all():
            job._cancelled.set()
        self._thread.shutdown(cancel_futures=True)
        self._stop_worker()

    def _run(self, job: Job, change: Change) -> None:
        job._started, job.state, job.stage = time.time(), "running", "starting"
        job._stage_began = time.monotonic()
        try:
            update = self._hand_over(job, change)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):  # these: it was killed, by the system or by a person
                traceback.print_exc()
            self._stop_worker()
            update = Outcome("failed", error="the learning process was killed; the model is as it was")
        self._end(job, update)

    def _hand_over(self, job: Job, change: Change) -> Outcome:
        self._start_worker()
        self._connection.send(change)
        deadline, asked_to_stop = time.monotonic() + self.limits.job_minutes * 60, None
        while True:
            if self._connection.poll(0.05):
                told: Progress | Outcome = self._connection.recv()
                if isinstance(told, Outcome):
                    return told
                job.follow(told)
            now = time.monotonic()
            if now > deadline:
                late = Outcome("failed", error=f"it took longer than {self.limits.job_minutes:g} minutes")
                return self._stop_worker() or late
            if job._cancelled.is_set():
                if asked_to_stop is None:
                    asked_to_stop = now
                    self._connection.send(CANCEL)
                if now - asked_to_stop > SECONDS_TO_CANCEL:
                    return self._stop_worker() or Outcome("cancelled")

    def _end(self, job: Job, update: Outcome) -> None:
        try:
            job._finish(update)
        except Exception as error:
            update = Outcome("failed", error=f"{error}")
        job.result, job.error, job._ended = update.result, update.error or None, time.time()
        job.stage = job.state = update.state
        self.metrics.jobs.labels(job.kind, job.state).inc()

    def _start_worker(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        (process := context.Process(target=work, args=(theirs,), daemon=True)).start()
        self._process = process
        theirs.close()

    def _stop_worker(self) -> Outcome | None:
        """Kill the worker. Returns its last update if it had finished just before."""
        last = None
        if self._process is not None:
            self._process.kill()
            self._process.join(timeout=5)
            with suppress(OSError, EOFError):
                while self._connection.poll(0):
                    told = self._connection.recv()
                    last = told if isinstance(told, Outcome) else last
            with suppress(OSError):
                self._connection.close()
            self._process = None
        return last


class Cancelled(Exception):
    """The change was cancelled. Raised where progress is reported; nothing has changed on disk."""


def work(connection: Connection) -> None:
    """Do the changes that come through the connection, until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(psutil.Error):
        psutil.Process().nice(getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 5))  # Windows has classes
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
        wait_for_message([parent.sentinel])
        os._exit(1)


def _do(change: Change, connection: Connection) -> Outcome:
    told_at = 0.0

    def tell(event: Progress) -> None:
        nonlocal told_at
        if connection.poll():
            connection.recv()
            raise Cancelled
        if event.done == event.total or time.monotonic() > told_at + SECONDS_BETWEEN_UPDATES:
            connection.send(event)
            told_at = time.monotonic()

    try:
        return change.body.do(change, tell)
    except Cancelled:
        return Outcome("cancelled")
    except UserError as error:
        return Outcome("failed", error=without_folder(error, change.path))
    except OSError as error:
        told = error.strerror or type(error).__name__
    except MemoryError:
        told = "there is not enough memory"
    except Exception as error:  # report it; the worker stays ready for the next change
        traceback.print_exc()
        told = without_folder(error, change.path)
    return Outcome("failed", error=f"{told}; the model is as it was")

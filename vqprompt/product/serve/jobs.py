"""Jobs: everything that changes a model. The teacher process does them one after another, and reports progress."""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vqprompt.product.serve import teacher
from vqprompt.product.serve.errors import Busy, NotThere
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.teacher import Report, Task

FINISHED_KEPT = 100
SECONDS_TO_CANCEL = 3.0  # a teacher that has not stopped by then is killed
SECONDS_IDLE = 1.0  # between two checks whether other programs changed the models
ENDED = ("done", "failed", "cancelled")


@dataclass(eq=False)
class Job:
    """One change of one model. finish: called with the report when it is done, before the job is shown as
    done. in_words: puts the client's file names into messages."""

    id: str
    model: str
    task: Task
    finish: Callable[[Report], None]
    in_words: Callable[[str], str] = str
    state: str = "queued"
    stage: str = "waiting"
    done: float = 0
    total: float = 0
    asked: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    _stage_began: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def follow(self, report: Report) -> None:
        event = report.progress
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

    def as_dict(self) -> dict[str, Any]:
        elapsed = None if self.started is None else (self.ended or time.time()) - self.started
        return {
            "id": self.id, "kind": self.task.kind, "model": self.model, "state": self.state, "stage": self.stage,
            "done": self.done, "total": self.total, "elapsed": elapsed, "remaining": self.remaining(),
            "result": self.result, "error": self.error,
        }  # fmt: skip


class Jobs:
    """A queue, and the thread that gives its jobs to the teacher. idle: called once per second while there is nothing
    to do. ended: called with every job that has ended."""

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

    def add(
        self, model: str, task: Task, finish: Callable[[Report], None], in_words: Callable[[str], str] = str
    ) -> Job:
        with self._wake:
            if len(self._queue) >= self.limits.jobs:
                raise Busy(f"{len(self._queue)} changes are already waiting; try again later", retry_after=10)
            job = Job(secrets.token_hex(8), model, task, finish, in_words)
            self._queue.append(job)
            self._all[job.id] = job
            over = [j for j in self._all.values() if j.state in ENDED][: max(0, len(self._all) - FINISHED_KEPT)]
            for old in over:
                del self._all[old.id]
            self._wake.notify()
        return job

    def get(self, name: str) -> Job:
        if name not in self._all:
            raise NotThere(f"there is no such job; only the last {FINISHED_KEPT} are remembered")
        return self._all[name]

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
                self._end(job, Report("cancelled"))

    def close(self) -> None:
        with self._wake:
            self._closing = True
            for job in self._all.values():
                job.cancelled.set()
            self._wake.notify()
        self._thread.join(timeout=SECONDS_TO_CANCEL + 5)
        self._stop_teacher()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._wake:
                if not self._queue and not self._closing:
                    self._wake.wait(SECONDS_IDLE)
                if self._closing:
                    return
                job = self._queue.popleft() if self._queue else None
            if job is None:
                self._idle()
            else:
                self._run(job)

    def _run(self, job: Job) -> None:
        job.started, job.state, job.stage = time.time(), "running", "starting"
        job._stage_began = time.monotonic()
        try:
            report = self._hand_over(job)
        except (EOFError, OSError):  # it was killed: by the system for lack of memory, or by a person
            self._stop_teacher()
            report = Report("failed", error="the learning process was killed; the model is as it was")
        self._end(job, report)

    def _hand_over(self, job: Job) -> Report:
        self._start_teacher()
        self._connection.send(job.task)
        deadline, asked_to_stop = time.monotonic() + self.limits.job_minutes * 60, None
        while True:
            if self._connection.poll(0.05):
                report: Report = self._connection.recv()
                if report.state != "running":
                    return report
                job.follow(report)
            now = time.monotonic()
            if now > deadline:
                late = Report("failed", error=f"it took longer than {self.limits.job_minutes:g} minutes")
                return self._stop_teacher() or late
            if job.cancelled.is_set():
                if asked_to_stop is None:
                    asked_to_stop = now
                    self._connection.send(teacher.CANCEL)
                if now - asked_to_stop > SECONDS_TO_CANCEL:
                    return self._stop_teacher() or Report("cancelled")

    def _end(self, job: Job, report: Report) -> None:
        try:
            job.finish(report)
        except Exception as error:
            report = replace(report, state="failed", error=f"{error}")
        job.result, job.ended = report.result, time.time()
        job.error = job.in_words(report.error) or None
        job.stage, job.state = report.state, report.state
        self._ended(job)

    # ------------------------------------------------------------------ the teacher

    def _start_teacher(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=teacher.main, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _stop_teacher(self) -> Report | None:
        """Kill the teacher. Returns its report if it had finished just before."""
        last = None
        if self._process is not None:
            self._process.kill()
            self._process.join(timeout=5)
            with suppress(OSError, EOFError):
                while self._connection.poll(0):
                    report = self._connection.recv()
                    last = report if report.state != "running" else last
            with suppress(OSError):
                self._connection.close()
            self._process = None
        return last

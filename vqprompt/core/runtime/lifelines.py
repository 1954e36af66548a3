"""How the processes of a run notice that one of them is lost, and decide which one reports it.

A process that is killed closes its connections, and the others notice at once. One that hangs, or whose machine is cut
off, closes nothing. So each process gives a sign of life every two seconds, in the store that torch.distributed keeps
for the run: the first process watches all others, and these watch the first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NoReturn

from vqprompt.core.errors import number_from_environment

BETWEEN_SIGNS = 2.0  # seconds
LAUNCHED = "VQPROMPT_LAUNCHED"  # set by `vqprompt run --processes`, which reports itself what happened
LOST_STATUS = 75  # exit status of a process that ended because another one had ended
REPORTERS = "vqprompt/reporters"  # in the store: how many processes want to report the end of the run
STATUS = "vqprompt/status"  # in the store: the exit status of the run, as soon as its end is reported
REPORTING = timedelta(seconds=10)


def started_together() -> int:
    """How many processes were started together with this one, from the variables that `torchrun` and others set."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() and {"RANK", "MASTER_ADDR"} <= os.environ.keys() else 1


class ProcessLost(Exception):
    """Another process of this run ended, or no longer answers."""


class Lifeline:
    """Gives signs of life of this process, and watches those of other processes.

    joining: how long to wait for the store. report: says that a process was lost, before this one ends.
    """

    def __init__(self, rank: int, count: int, joining: timedelta, report: Callable[[str], None]) -> None:
        self.rank, self.count, self.report = rank, count, report
        self.patience = number_from_environment("VQPROMPT_PATIENCE", 20)  # seconds of silence until one counts as lost
        self.watched = [other for other in range(count) if other != 0] if rank == 0 else [0]
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: importing torch takes seconds

        # a connection of its own, because requests on one connection wait for each other
        self.store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=joining
        )
        self.released, self.ending = threading.Event(), False
        self.heard = dict.fromkeys(self.watched, time.monotonic())  # when each of them last gave a sign
        self.store.set(self._sign(rank), "0")
        self.store.wait([self._sign(other) for other in self.watched])
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._give_signs, self._watch)]
        for thread in self.threads:
            thread.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ended_by_launcher)
        global _own
        _own = self

    def _sign(self, rank: int) -> str:
        return f"vqprompt/sign of {rank}"

    def _give_signs(self) -> None:
        signs, number = dict.fromkeys(self.watched, b""), 0
        with suppress(RuntimeError):  # the store is lost: no more signs arrive, which `_watch` notices
            while not self.released.wait(BETWEEN_SIGNS):
                number += 1
                self.store.set(self._sign(self.rank), str(number))
                for other in self.watched:
                    sign = self.store.get(self._sign(other))
                    if sign != signs[other]:
                        signs[other], self.heard[other] = sign, time.monotonic()
                if self.store.check([STATUS]):  # the run has ended; this process may be waiting for one that has ended
                    self._leave_now(int(self.store.get(STATUS)))

    def _watch(self) -> None:
        while not self.released.wait(BETWEEN_SIGNS / 2):
            for other, heard in self.heard.items():
                silent = time.monotonic() - heard
                if silent > self.patience:
                    reason = f"process {other + 1} of {self.count} has given no sign of life for {silent:.0f} seconds"
                    self.end(1, partial(self.report, reason))

    def _ended_by_launcher(self, *_: object) -> None:
        if not self.ending:  # else it is ending already, and perhaps printing why
            reason = "ended by its launcher (SIGTERM), perhaps because another process or machine was lost"
            self.end(128 + signal.SIGTERM, partial(self.report, reason), lost=True)

    def end(self, status: int, report: Callable[[], None], lost: bool = False) -> NoReturn:
        """See `end_run`. A process that may not report the end waits until another has done so, because the launcher
        ends all processes as soon as one has ended."""
        self.ending = True
        if not (lost and os.environ.get(LAUNCHED)):
            first = True  # if the store is lost, every process reports it
            with suppress(RuntimeError):
                first = self.store.add(REPORTERS, 1) == 1
            if first:
                report()
            with suppress(RuntimeError):
                if first:
                    self.store.set(STATUS, str(status))
                else:
                    self.store.wait([STATUS], REPORTING)
                    status = int(self.store.get(STATUS))
        self._leave_now(status)

    def _leave_now(self, status: int) -> NoReturn:
        """End at once. Threads may still be waiting for lost processes."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def let_go(self) -> None:
        """Stop watching: all work is done. A thread that still asked the store while Python ends would abort it."""
        self.released.set()
        for thread in self.threads:
            thread.join()


_own: Lifeline | None = None


def end_run(status: int, report: Callable[[], None], lost: bool = False) -> NoReturn:
    """End the run with this exit status. `report` says why; if there are several processes, only the first one says it.

    lost: the reason is that another process ended, or that all of them are being ended. Then our own launcher, if there
    is one, reports it.
    """
    if _own is not None:
        _own.end(status, report, lost)
    report()
    sys.exit(status)

"""Try many faults, each in a child process, and count how they were taken.

A child works through the tries of one kind. When one hangs or ends the child, it is counted as bad and a new child goes
on after it. Every try has its own generator, seeded by (seed, kind, number), so each can be repeated alone:
`python tools/faults.py --kind images --seed 1 --start 812 --count 1`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from faults import KINDS
from vqprompt.core.errors import UserError

HANG, SETUP = 60.0, 600.0  # seconds for a try, and for the first of a child, which also makes what all of them use
MEMORY = 1000  # MB that one try may take above what the child began with


class Chance(random.Random):
    """A seeded generator that knows the number of its try, for kinds that go through something in turn."""

    def __new__(cls, seed: str, number: int) -> Chance:
        return super().__new__(cls, seed)

    def __init__(self, seed: str, number: int) -> None:
        super().__init__(seed)
        self.number = number


@dataclass
class Count:
    """How the tries of one kind went."""

    kind: str
    tried: int = 0
    bad: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def handled(self) -> int:
        return self.tried - len(self.bad)


def run(kind: str, count: int, seed: int, start: int = 0, workers: int = 1) -> Count:
    """Try `count` faults of one kind, from number `start` on. Ctrl-C ends it with what was tried up to then."""
    bounds = [start + count * part // workers for part in range(workers + 1)]
    stopped = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        working = [pool.submit(_run_part, kind, b - a, seed, a, stopped) for a, b in itertools.pairwise(bounds)]
        try:
            wait(working)
        except KeyboardInterrupt:
            stopped.set()
        parts = [part.result() for part in working]
    bad = [bad for part in parts for bad in part.bad]
    return Count(kind, sum(part.tried for part in parts), bad, stopped.is_set())


def _run_part(kind: str, count: int, seed: int, start: int, stopped: threading.Event) -> Count:
    result, number = Count(kind), start
    context = multiprocessing.get_context("fork")
    while number < start + count and not stopped.is_set():
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(theirs, kind, number, start + count, seed), daemon=True)
        child.start()
        theirs.close()
        patience = SETUP
        while number < start + count and not stopped.is_set():
            try:
                outcome = ours.recv() if ours.poll(patience) else f"bad: no answer after {patience:g} seconds"
            except EOFError:
                child.join()
                outcome = f"bad: the process died with status {child.exitcode}"
            if outcome == "stopped":
                break
            result.tried += 1
            if outcome != "handled":
                result.bad.append(f"--kind {kind} --seed {seed} --start {number} --count 1: {outcome}")
            number, patience = number + 1, HANG
            if "no answer" in outcome or "process died" in outcome:
                break
        child.kill()
        child.join()
        ours.close()
    return result


def _work(answers: Connection, kind: str, first: int, end: int, seed: int) -> None:
    _silence()
    peak = _peak()
    limit = peak + MEMORY
    for number in range(first, end):
        folder = Path(tempfile.mkdtemp(prefix="vqprompt-fault-"))
        try:
            outcome = _try(kind, number, seed, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        now = _peak()
        if outcome == "handled" and now > limit and now > peak:
            outcome = f"bad: took {now - limit + MEMORY} MB"
        peak = max(peak, now)
        answers.send(outcome)


def _silence() -> None:
    """libtiff writes to the terminal itself."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _try(kind: str, number: int, seed: int, folder: Path) -> str:
    try:
        return KINDS[kind](Chance(f"{seed}:{kind}:{number}", number), folder)
    except UserError as error:
        return "handled" if str(error) else "bad: an error without words"
    except KeyboardInterrupt:  # of the whole campaign: a signal goes to all its processes
        return "stopped"
    except BaseException:
        return f"bad: {traceback.format_exc(limit=-3)}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def table(counts: list[Count]) -> str:
    """One row per kind."""
    rows = [("kind", "tried", "handled", "bad")]
    rows += [(c.kind, f"{c.tried:,}", f"{c.handled:,}", f"{len(c.bad):,}") for c in counts]
    return "\n".join(f"{a:<16}{b:>9}{c:>9}{d:>7}" for a, b, c, d in rows)

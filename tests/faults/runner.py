"""Try many faults, each in a child process, and count how they were taken.

Each kind is divided into as many parts as there are workers, and workers take one part after another, so that none is
idle before the end. A child works through the tries of one part. When one hangs or ends the child, it is counted as bad
and a new child goes on after it. Every try has its own generator, seeded by (seed, kind, number), so each can be
repeated alone: `python tools/faults.py --kind images --seed 1 --start 812 --count 1`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from faults import KINDS
from vqprompt.core.errors import UserError

HANG, SETUP = 60.0, 600.0  # seconds for a try, and for the first of a child, which also makes what all of them use
SECONDS_BETWEEN_REPORTS = 5.0
STARTING = threading.Lock()  # one child at a time: none may inherit the pipe of another, whose end would go unnoticed
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

    @property
    def handled(self) -> int:
        return self.tried - len(self.bad)


def run(
    counts: dict[str, int], seed: int, start: int = 0, workers: int = 1,
    report: Callable[[list[Count]], None] = lambda counts: None,
) -> list[Count]:  # fmt: skip
    """Try so many faults of each kind, from number `start` on. report: called now and then with what was tried up to
    then. Ctrl-C ends it with what was tried up to then."""
    parts = [
        (Count(kind), range(start + count * part // workers, start + count * (part + 1) // workers))
        for kind, count in counts.items()
        for part in range(workers)
    ]

    def so_far() -> list[Count]:
        mine = {kind: [count for count, _ in parts if count.kind == kind] for kind in counts}
        return [
            Count(kind, sum(part.tried for part in found), [bad for part in found for bad in part.bad])
            for kind, found in mine.items()
        ]

    stopped = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        working = {pool.submit(_run_part, count, numbers, seed, stopped) for count, numbers in parts}
        try:
            while working:
                ended, working = wait(working, SECONDS_BETWEEN_REPORTS)
                for part in ended:
                    part.result()
                report(so_far())
        except KeyboardInterrupt:
            stopped.set()
    return so_far()


def _run_part(result: Count, numbers: range, seed: int, stopped: threading.Event) -> None:
    context, number = multiprocessing.get_context("fork"), numbers.start
    while number in numbers and not stopped.is_set():
        with STARTING:
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_work, args=(theirs, result.kind, number, numbers.stop, seed), daemon=True)
            child.start()
            theirs.close()
        patience = SETUP
        while number in numbers and not stopped.is_set():
            try:
                outcome = ours.recv() if ours.poll(patience) else f"bad: no answer after {patience:g} seconds"
            except EOFError:
                child.join()
                outcome = f"bad: the process died with status {child.exitcode}"
            if outcome == "stopped":
                break
            if outcome != "handled":
                result.bad.append(f"--kind '{result.kind}' --seed {seed} --start {number} --count 1: {outcome}")
            result.tried += 1
            number, patience = number + 1, HANG
            if "no answer" in outcome or "process died" in outcome:
                break
        child.kill()
        child.join()
        ours.close()


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

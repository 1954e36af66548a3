"""A run killed with SIGKILL, at a random moment or at one step on disk, then resumed: the same bits, and nothing left.

Half of the tries die at a random moment. The others go through the steps of a run on disk in turn: every open, write,
fsync, rename and unlink. A quarter of all are killed a second time, while they are resumed.
"""

from __future__ import annotations

import random
from pathlib import Path

from faults.tiny import DIED, METHODS, Steps, die, difference, forked, reference, run


def try_kill(rng: random.Random, folder: Path) -> str:
    """One run, killed once or twice."""
    number = getattr(rng, "number", rng.randrange(10_000))
    method, placed, turn = METHODS[number % 4], number // 4 % 2 == 0, number // 8
    expected = reference(method)
    out, home, errors = folder / "out", folder / "home", folder / "errors"

    def killed_run(placed: bool, resume: bool) -> int:
        fatal = turn % len(expected.steps) + 1 if placed else 0
        where.append(f"at step {fatal} ({expected.steps[fatal - 1]})" if placed else "at a random moment")

        def work() -> None:
            Steps(fatal, die).install()
            run(method, out, home, resume)

        return forked(work, None if placed else rng.uniform(0, 1.1) * expected.seconds, errors)

    where: list[str] = []
    statuses = [killed_run(placed, False)]
    if rng.random() < 0.25:
        statuses.append(killed_run(False, True))
    if any(status not in (DIED, 0) for status in statuses) or (placed and statuses[0] != DIED):
        return f"bad: {method}, {where}: ended with {statuses}: {errors.read_text()[-2000:]}"
    if forked(lambda: run(method, out, home, resume=True), errors=errors) != 0:
        return f"bad: {method}, killed {where}: the resumed run failed: {errors.read_text()[-2000:]}"
    wrong = difference(out, home, expected.outcome)
    return "handled" if wrong is None else f"bad: {method}, killed {where}: {wrong}"

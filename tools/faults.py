"""The fault campaign: kills, damaged files and hostile settings of every kind, seeded and counted.

Prints one table; exit status 1 if anything was taken badly.

python tools/faults.py                                       # two minutes of every kind
python tools/faults.py --long                                # all of it, an hour on two cores
python tools/faults.py --kind images --count 10000 --seed 7  # a long one of one kind
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from faults import KINDS, LONG, SHORT  # noqa: E402 (the path above is needed)
from faults.runner import run, table  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--long", action="store_true", help="as many faults of each kind as docs/reliability.md shows")
    parser.add_argument("--count", type=int, help="so many faults per kind instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first fault, to repeat one")
    parser.add_argument("--workers", type=int, default=2, help="processes at the same time (default: %(default)s)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the table of what was tried up to then
    counts = []
    for kind in KINDS if given.kind == "all" else [given.kind]:
        began, count = time.monotonic(), given.count or (LONG if given.long else SHORT)[kind]
        counts.append(run(kind, count, given.seed, given.start, given.workers))
        done = counts[-1]
        print(f"{kind}: {done.tried} tried, {len(done.bad)} bad, {time.monotonic() - began:.0f} s", file=sys.stderr)
        if counts[-1].stopped:
            break
    print(table(counts))
    for count in counts:
        for bad in count.bad[:20]:
            print(f"\n{bad}", file=sys.stderr)
    return 1 if any(count.bad for count in counts) else 0


if __name__ == "__main__":
    sys.exit(main())

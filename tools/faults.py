"""The fault campaign: kills, damaged files and hostile settings of every kind, seeded and counted.

Prints one table; exit status 1 if anything was taken badly.

python tools/faults.py                                       # a minute, some of every kind
python tools/faults.py --long --workers 8 --report faults.txt  # all of it, with a table that is kept up to date
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
from faults.runner import Count, run, table  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--long", action="store_true", help="as many faults of each kind as docs/reliability.md shows")
    parser.add_argument("--count", type=int, help="so many faults per kind instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first fault, to repeat one")
    parser.add_argument("--workers", type=int, default=2, help="processes at the same time (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="a file for the table and all that is bad, kept up to date")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the table of what was tried up to then
    kinds = list(KINDS) if given.kind == "all" else [given.kind]
    began, planned = time.monotonic(), {kind: given.count or (LONG if given.long else SHORT)[kind] for kind in kinds}

    def report(counts: list[Count]) -> str:
        told = "\n\n".join([table(counts), *(bad for count in counts for bad in count.bad)])
        told += f"\n\n{sum(count.tried for count in counts):,} tried in {time.monotonic() - began:.0f} s"
        if given.report is not None:
            given.report.write_text(f"{told}\n", errors="backslashreplace")
        return told

    counts = run(planned, given.seed, given.start, given.workers, report)
    print(report(counts))
    return 1 if any(count.bad for count in counts) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The fault campaign: damaged files of every kind, seeded and counted. Exit status 1 if anything was taken badly.

python tools/faults.py                                       # a short one of every kind
python tools/faults.py --kind images --count 10000 --seed 7  # a long one of one kind
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from faults import KINDS  # noqa: E402 (the path above is needed)
from faults.runner import run, table  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--count", type=int, default=200, help="faults per kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first fault, to repeat one")
    given = parser.parse_args()
    counts = []
    for kind in KINDS if given.kind == "all" else [given.kind]:
        began = time.monotonic()
        counts.append(run(kind, given.count, given.seed, given.start))
        print(f"{kind}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(table(counts))
    for count in counts:
        for bad in count.bad[:20]:
            print(f"\n{bad}", file=sys.stderr)
    return 1 if any(count.bad for count in counts) else 0


if __name__ == "__main__":
    sys.exit(main())

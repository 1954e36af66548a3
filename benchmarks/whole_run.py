"""How long a whole run takes: every task, every epoch, statistics and every evaluation, and what compilation adds.

    python benchmarks/whole_run.py --data cub200.zip --tasks 10 --set tau=5 --json results/whole-run-h200.json
    python benchmarks/whole_run.py --data cub200.zip --quick-first --method vq-prompt moving-prompts moving-weights

Each run is done twice in one process. The first run decodes images (unless they are in the cache) and compiles
kernels; the second finds both done. Both are complete runs and write checkpoints. With --quick-first the first run has
one epoch per task. Several methods are compared with the first one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import make_parser, write_json

from vqprompt.research.results.config import parse_assignment, resolve
from vqprompt.research.runs import runner


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", default="quickdraw50")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--method", nargs="+", default=["vq-prompt"])
    parser.add_argument("--quick-first", action="store_true", help="the first run has one epoch per task")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="key=value, as in vqprompt run")
    args = parser.parse_args()
    given: dict[str, Any] = dict(parse_assignment(text) for text in args.settings)
    given |= {"data": args.data, "tasks": args.tasks, "device": args.device}
    runs = [measure({**given, "method": method}, args.quick_first) for method in args.method]
    for other in runs[1:]:
        ratio = other["runs"]["second"]["seconds"] / runs[0]["runs"]["second"]["seconds"]
        print(f"{other['config']['method']}: {ratio:.2f} times as long as {runs[0]['config']['method']}")
    write_json(args.json, runs[0] if len(runs) == 1 else {"methods": runs})


def measure(given: dict[str, Any], quick_first: bool) -> dict[str, Any]:
    """The same run twice."""
    config = resolve(given)
    report: dict[str, Any] = {"config": config.model_dump(mode="json"), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            quick = quick_first and name == "first"
            result = runner.run(resolve({**given, "epochs": 1}) if quick else config, Path(folder) / name, report=False)
            kept = {"seconds", "task_seconds", "images_per_second", "faa", "caa", "hardware"}
            report["runs"][name] = result.model_dump(include=kept)
            tasks = " ".join(f"{s:.2f}" for s in result.task_seconds)
            print(f"{name:>6} run: {result.seconds:7.2f} s  (tasks: {tasks})  FAA {result.faa:.2f}", flush=True)
    first, second = (report["runs"][name]["seconds"] for name in ("first", "second"))
    report["compilation_and_decoding_s"] = None if quick_first else first - second
    print(f"{config.method} on {result.hardware}: {second:.2f} s; the first run took {first:.2f} s")
    return report


if __name__ == "__main__":
    main()

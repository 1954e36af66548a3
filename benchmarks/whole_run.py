"""How long a whole run takes: every task, every epoch, statistics and every evaluation, and what compilation adds.

    python benchmarks/whole_run.py --data cub200.zip --tasks 10 --set tau=5 --json results/whole-run-h200.json

The same run is done twice in one process. The first time images are decoded (unless they were before) and kernels are
compiled; the second time neither is left to do. Both are complete runs, checkpoints on disk included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vqprompt.runs import runner as runs
from vqprompt.runs.config import parse_assignment, resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="quickdraw50")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--method", default="vq-prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="key=value, as in vqprompt run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given: dict[str, Any] = dict(parse_assignment(text) for text in args.settings)
    config = resolve({**given, "data": args.data, "tasks": args.tasks, "method": args.method, "device": args.device})
    found: dict[str, Any] = {"config": config.model_dump(mode="json"), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            metrics = runs.run(config, Path(folder) / name, report=False)
            kept = {"seconds", "task_seconds", "images_per_second", "faa", "caa", "hardware"}
            found["runs"][name] = metrics.model_dump(include=kept)
            tasks = " ".join(f"{s:.2f}" for s in metrics.task_seconds)
            print(f"{name:>6} run: {metrics.seconds:7.2f} s  (tasks: {tasks})  FAA {metrics.faa:.2f}", flush=True)
    first, second = (found["runs"][name]["seconds"] for name in ("first", "second"))
    found["compilation_and_decoding_s"] = first - second
    print(f"{metrics.hardware}: {second:.2f} s, after {first - second:.2f} s of decoding and compilation")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

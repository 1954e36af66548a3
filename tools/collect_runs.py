"""Add runs that were recorded one per line (JSON lines) to a file of results, such as results/tasks.json.

    python tools/collect_runs.py runs.jsonl --into results/tasks.json

Only the fields that the file's other runs have are kept. A run with the same settings replaces the one that is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def collect(lines: list[str], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    fields = results[0].keys() if results else None
    runs = [json.loads(line) for line in lines if line.strip()]
    kept = [run if fields is None else {name: run[name] for name in fields if name in run} for run in runs]
    settings = [run["config"] for run in kept]
    return [run for run in results if run["config"] not in settings] + kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    target: Path = options.into
    before = json.loads(target.read_text(encoding="utf-8")) if target.exists() else []
    now = collect(options.runs.read_text(encoding="utf-8").splitlines(), before)
    target.write_text("[\n" + ",\n".join(map(json.dumps, now)) + "\n]\n", encoding="utf-8")
    print(f"{target}: {len(before)} runs, now {len(now)}")

"""Make the tables of docs/beyond.md and the figures of accuracy against the number of tasks, from results/tasks.json.

    python tools/tasks_figure.py

A table stands between `<!-- tasks DATA -->` and `<!-- end -->`; its figure is docs/figures/tasks-DATA.svg.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.research.methods import find_method
from vqprompt.research.report import figures

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "beyond.md"
BLOCK = re.compile(r"(<!-- tasks (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TASKS = {"cub200": (10, 20, 40, 100), "flowers102": (10, 20, 40)}
ANY_NUMBER = ("linear", "joint")  # whose result does not depend on the number of tasks
# of our methods: batches per epoch (0: large batches) and the fewest classes for plasticity
CHOSEN = (8, 1)
CHOSEN_IN_100_TASKS = {"moving-weights": (0, 20), "moving-prompts": (2, 1)}
LARGE_BATCHES = (0, 1)

Accuracies = dict[str, dict[int, dict[int, float]]]  # method, tasks, seed


def accuracies(data: str) -> Accuracies:
    """Final average accuracy of all runs, the best method first."""
    runs: Accuracies = defaultdict(lambda: defaultdict(dict))
    for run in json.loads((ROOT / "results" / "tasks.json").read_text(encoding="utf-8")):
        if run["config"]["data"] == data and not only_tried(run["config"]):
            tasks = TASKS[data] if run["config"]["method"] in ANY_NUMBER else (run["config"]["tasks"],)
            for number in tasks:
                runs[name_of(run["config"])][number][run["config"]["seed"]] = run["faa"]
    return dict(sorted(runs.items(), key=lambda item: -np.mean(list(item[1][min(item[1])].values()))))


def settings(config: dict[str, Any]) -> tuple[int, int]:
    return config.get("batches_per_epoch", 0), config["options"].get("fewest_classes", 1)


def only_tried(config: dict[str, Any]) -> bool:
    """Whether a run of our methods has settings that held-out images did not choose."""
    chosen = CHOSEN_IN_100_TASKS.get(config["method"], CHOSEN) if config["tasks"] == 100 else CHOSEN
    return config["method"].startswith("moving") and settings(config) not in (LARGE_BATCHES, chosen)


def name_of(config: dict[str, Any]) -> str:
    title: str = find_method(config["method"]).title
    title += ", rank 16" if config["method"] == "moving-weights" else ""
    if config["method"].startswith("moving") and settings(config) == LARGE_BATCHES:
        title += ", large batches"
    return title if config["options"].get("mirror") else f"{title}, one class token"


def cell(by_seed: dict[int, float]) -> str:
    """Mean ± standard deviation over the seeds, divided by n."""
    values = list(by_seed.values())
    if not values:
        return "–"
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values):.2f}" if len(values) > 1 else "")


def table(data: str) -> str:
    head = ["method", *(f"{n} tasks" for n in TASKS[data]), "seeds"]
    rows = [head, ["---"] * len(head)]
    for name, by_tasks in accuracies(data).items():
        seeds = sorted({seed for by_seed in by_tasks.values() for seed in by_seed})
        rows.append([name, *(cell(by_tasks.get(n, {})) for n in TASKS[data]), ", ".join(map(str, seeds))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def fill(page: str) -> str:
    """The page, with every table made from the results again."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{table(block[2])}\n\n{block[3]}", page)


def draw(data: str) -> str:
    """Methods that were measured for one number of tasks only are points."""
    lines = []
    for number, (name, by_tasks) in enumerate(accuracies(data).items()):
        means = [float(np.mean(list(by_tasks[n].values()))) if n in by_tasks else None for n in TASKS[data]]
        spread = [float(np.std(list(by_tasks[n].values()))) if n in by_tasks else None for n in TASKS[data]]
        line = figures.distinct_line(number, name, means)
        same = len({value for value in means if value is not None}) == 1 and None not in means
        lines.append(replace(line, style="--" if same else "-", spread=spread))
    title = f"Final average accuracy against the number of tasks, {data}"
    ticks = list(map(str, TASKS[data]))
    return figures.standalone(figures.sweep_chart(lines, ticks, "chart0", title, "tasks", "FAA (%)"), lines)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for data in TASKS:
        place = ROOT / "docs" / "figures" / f"tasks-{data}.svg"
        place.write_text(draw(data), encoding="utf-8")
        print(place.relative_to(ROOT))

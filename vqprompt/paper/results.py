"""Finished runs, gathered into the rows of a table beside the paper's numbers.

What is notable about this implementation:
- a run finds its row by its settings, not by its folder, so results kept in a file make the same tables
- whatever differs from the declared grid (backbone, data, any setting) is marked, and never averaged with what does not
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from vqprompt.errors import UserError
from vqprompt.files import write_atomically
from vqprompt.methods import METHODS
from vqprompt.paper.grids import Grid, backbone_name, combine, data_name, described
from vqprompt.paper.numbers import NUMBERS, Quoted
from vqprompt.recipes import in_use
from vqprompt.runs.config import MACHINE, completed, flatten, resolve

NONE = "–"
OTHER_IMAGES = {"data", "tasks", "validation", "train_per_class", "test_per_class"}


@dataclass(frozen=True)
class Found:
    """A run on disk: its metrics and config, and the folder with its report (None: only a file of results is left)."""

    metrics: dict[str, Any]
    config: dict[str, Any]
    folder: Path | None = None


@dataclass
class Row:
    """A method with one set of settings, and the runs that had them: one a seed. Without any, the paper's row alone."""

    method: str
    variant: dict[str, Any]
    changed: dict[str, tuple[str, str]]  # settings that are not the grid's: what they are, what the grid has
    quoted: Quoted | None
    backbone: str
    paper_backbones: tuple[str, ...]
    runs: dict[int, Found] = field(default_factory=dict)  # by seed

    @property
    def title(self) -> str:
        return METHODS[self.method].title

    @property
    def label(self) -> str:
        return ", ".join([self.title, *described(self.variant)])

    @property
    def seeds(self) -> list[int]:
        return sorted(self.runs)

    @property
    def other_backbone(self) -> bool:
        return bool(self.runs) and self.backbone not in self.paper_backbones

    @property
    def hardware(self) -> list[str]:
        return list(dict.fromkeys(run.metrics["hardware"] for run in self.runs.values()))

    def values(self, key: str) -> list[Any]:
        found = [self.runs[seed].metrics for seed in self.seeds]
        return [metrics.get(key, metrics.get("parameters", {}).get(key)) for metrics in found]

    def mean(self, key: str) -> float | None:
        """Of a metric over the seeds; none if a run lacks it."""
        values = self.values(key)
        return mean(values) if values and None not in values else None

    def ours(self, key: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation over the seeds: over n, as the paper's code computes it (numpy.std)."""
        known = self.mean(key)
        return known, pstdev(self.values(key)) if known is not None and len(self.runs) > 1 else None

    def paper(self, key: str) -> tuple[float | None, float | None]:
        return (getattr(self.quoted, key), getattr(self.quoted, f"{key}_std")) if self.quoted else (None, None)

    def difference(self, key: str) -> float | None:
        """Ours less the paper's; none where the images or the tasks are others, for then it would say nothing."""
        ours, theirs = self.ours(key)[0], self.paper(key)[0]
        return None if ours is None or theirs is None or OTHER_IMAGES & self.changed.keys() else ours - theirs

    def curve(self) -> list[float]:
        """Average accuracy after each task, mean over the seeds."""
        return [mean(values) for values in zip(*self.values("average_accuracy"), strict=True)]


def read_runs(source: Path) -> list[Found]:
    """All runs below a folder; or those that `save_runs` put into a file."""
    if source.is_file():
        content = _read(source)
        if not isinstance(content, list) or not all(
            isinstance(c, dict) and {"config", "faa"} <= c.keys() for c in content
        ):
            raise UserError(
                f"{source}: holds no results; give a file that `vqprompt bench table NAME --save FILE` wrote"
            )
        return [Found(metrics, metrics["config"]) for metrics in content]
    return [
        Found(_read(path), _read(path.parent / "config.json"), path.parent)
        for path in sorted(source.rglob("metrics.json"))
        if (path.parent / "config.json").exists()
        # but for MLflow's copies of runs that are there already, and what was interrupted while it was linked
        and not any(part == "mlruns" or part.startswith(".") for part in path.relative_to(source).parts)
    ]


KEPT = (
    "done", "faa", "caa", "forgetting", "average_accuracy", "accuracy", "seconds", "images_per_second", "parameters",
    "bytes_per_class", "exemplars", "hardware",
)  # fmt: skip


def save_runs(rows: Iterable[Row], path: Path) -> None:
    """A table's runs as one small file to keep and to make the table of again, a run a line: no losses, no paths."""
    lines = []
    for run in (row.runs[seed] for row in rows for seed in row.seeds):
        kept = {key: run.metrics[key] for key in KEPT if key in run.metrics}
        if "accuracy" in kept:
            kept["accuracy"] = [[None if v is None else round(v, 3) for v in line] for line in kept["accuracy"]]
        lines.append(json.dumps({**kept, "config": _named(run.config)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "[\n" + ",\n".join(lines) + "\n]\n")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it or do the run again") from None


def differences(config: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Settings that two configs do not share, but for seed and machine. An older one may lack some, and how to
    rebalance is nobody's business where nothing is rebalanced."""
    ours, theirs = (in_use(flatten(_named(c))) for c in (config, other))
    return {
        key.removeprefix("options."): (ours.get(key, NONE), theirs.get(key, NONE))
        for key in sorted(ours.keys() & theirs.keys())
        if key not in (*MACHINE, "seed") and ours.get(key) != theirs.get(key)
    }


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """Where somebody keeps the data and the weights makes no difference."""
    return {**config, "data": data_name(config["data"]), "backbone": backbone_name(config["backbone"])}


def _setting(config: dict[str, Any], key: str) -> Any:
    return config[key] if key in config else config["options"].get(key)


def make_rows(grid: Grid, found: Iterable[Found], out: Path | None = None) -> list[Row]:
    """The table: the grid's rows in their order, then what else was run.

    out: the folder of all tables' runs; of other tables' runs, those with exactly this grid's settings count. None: all
    that was found is meant for this table.
    """
    rows: dict[Any, Row] = {}

    def row_of(method: str, variant: dict[str, Any], changed: dict[str, tuple[str, str]], backbone: str) -> Row:
        key = (method, repr(variant), repr(changed))
        place = "/".join([grid.name, *described(variant)])
        new = Row(method, variant, changed, NUMBERS.get((place, method)), backbone, grid.backbones)
        return rows.setdefault(key, new)

    declared = [(m, variant) for sweep in grid.sweeps for m in sweep.methods for variant in combine(grid.axes(sweep))]
    comparison = not any(variant for _, variant in declared)
    for method, variant in declared:
        row_of(method, variant, {}, backbone_name(grid.declared(method, variant)["backbone"]))
    for run in found:
        method = run.config["method"]
        if not run.metrics["done"]:
            continue
        variant = {key: _setting(run.config, key) for key in grid.axes(grid.sweep_of(method))}
        if None in variant.values():
            continue
        data = data_name(run.config["data"])
        # the recipe for the run's own data
        expected = resolve({**grid.declared(method, variant), "data": data}, recipe=True).model_dump(mode="json")
        changed = differences(completed(run.config), {**expected, "data": grid.settings["data"]})
        if out is None:
            fits = comparison or any(method in sweep.methods for sweep in grid.sweeps)
        else:
            own = run.folder is not None and run.folder.is_relative_to(out / grid.name)
            fits = own or (not changed and (method, variant) in declared)
        if fits:
            row = row_of(method, variant, changed, backbone_name(run.config["backbone"]))
            row.runs.setdefault(run.config["seed"], run)
    order = {key: n for n, key in enumerate(dict.fromkeys((r.method, repr(r.variant)) for r in rows.values()))}
    kept = [row for row in rows.values() if row.runs or (row.quoted and not _others(row, rows.values()))]
    return sorted(kept, key=lambda row: (order[row.method, repr(row.variant)], len(row.changed)))


def _others(row: Row, rows: Iterable[Row]) -> bool:
    """Whether the paper's numbers stand in another row already, beside runs with other settings."""
    return any(r.runs and (r.method, r.variant) == (row.method, row.variant) for r in rows)

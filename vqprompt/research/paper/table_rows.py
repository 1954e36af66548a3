"""Finished runs, gathered into the rows of a table beside the paper's numbers.

What is notable about this implementation:
- a run finds its row by its settings, not by its folder, so results that were saved in a file make the same tables
- a run that differs from the declared grid (backbone, data, any setting) is marked, and never averaged with others
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import read_json, write_atomically
from vqprompt.research.methods import METHODS, find_method
from vqprompt.research.methods.recipes import in_use
from vqprompt.research.paper.grids import NUMBERS, Grid, Quoted, backbone_name, combine, data_name, described
from vqprompt.research.results import config as run_config
from vqprompt.research.results import result as run_result
from vqprompt.research.results.config import MACHINE_SETTINGS, completed, flatten, read_saved_config, resolve
from vqprompt.research.results.result import RunResult

ACCURACIES = ("faa", "caa")  # what the paper reports
OTHER_IMAGES = {"data", "tasks", "first_tasks", "validation", "train_per_class", "test_per_class", "train_choice"}


@dataclass(frozen=True)
class SavedRun:
    result: RunResult
    config: dict[str, Any]
    folder: Path | None = None  # None if it comes from a file of results


@dataclass
class Row:
    """A method with one set of settings, and its runs: one per seed. Without runs, the row shows only the paper's."""

    method: str
    variant: dict[str, Any]
    changed: dict[str, tuple[str, str]]  # settings that differ from the grid's: (the run's, the grid's)
    quoted: Quoted | None
    backbone: str
    paper_backbones: tuple[str, ...]
    runs: dict[int, SavedRun] = field(default_factory=dict)  # by seed

    @property
    def title(self) -> str:
        return METHODS[self.method].title

    @property
    def seeds(self) -> list[int]:
        return sorted(self.runs)

    @property
    def other_backbone(self) -> bool:
        return bool(self.runs) and self.backbone not in self.paper_backbones

    @property
    def hardware(self) -> list[str]:
        return list(dict.fromkeys(run.result.hardware for run in self.runs.values()))

    @property
    def results(self) -> list[RunResult]:
        return [self.runs[seed].result for seed in self.seeds]

    def ours(self, measure: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation over the seeds: over n, as the paper's code has it (numpy.std). None if a run
        lacks the number. measure: as for `RunResult.number`."""
        values = [value for result in self.results if (value := result.number(measure)) is not None]
        if not values or len(values) < len(self.runs):
            return None, None
        return mean(values), pstdev(values) if len(values) > 1 else None

    def paper(self, key: str) -> tuple[float | None, float | None]:
        return (getattr(self.quoted, key), getattr(self.quoted, f"{key}_std")) if self.quoted else (None, None)

    def difference(self, key: str) -> float | None:
        """Ours minus the paper's; None if images or tasks differ, because then the difference means nothing."""
        ours, theirs = self.ours(key)[0], self.paper(key)[0]
        return None if ours is None or theirs is None or OTHER_IMAGES & self.changed.keys() else ours - theirs

    def curve(self) -> list[float]:
        """Average accuracy after each task, mean over the seeds."""
        return [mean(values) for values in zip(*(result.average_accuracy for result in self.results), strict=True)]


def read_runs(source: Path) -> list[SavedRun]:
    """All runs below a folder, or all runs in a file that `save_runs` wrote."""
    if source.is_file():
        return _read_saved(source)
    return [
        SavedRun(RunResult.read(path.parent), read_saved_config(path.parent), path.parent)
        for path in sorted(source.rglob(run_result.FILE))
        if (path.parent / run_config.FILE).exists()
        # MLflow keeps copies of runs in mlruns; folders with a dot are copies that were interrupted
        and not any(part == "mlruns" or part.startswith(".") for part in path.relative_to(source).parts)
    ]


def _read_saved(file: Path) -> list[SavedRun]:
    content = read_json(file)
    entries = content if isinstance(content, list) else [None]
    configs = [entry.get("config") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(c, dict) and {"method", "data", "backbone", "seed", "options"} <= c.keys() for c in configs):
        raise UserError(f"{file}: holds no results; give a file that `vqprompt bench table NAME --save FILE` wrote")
    return [SavedRun(RunResult.parse(entry, f"{file}, run {n}"), entry["config"]) for n, entry in enumerate(content, 1)]


SAVED_FIELDS = {
    "done", "faa", "caa", "forgetting", "average_accuracy", "accuracy", "seconds", "images_per_second", "parameters",
    "exemplars", "prompt_use", "hardware", "within_task", "curve", "peak_memory", "kept_bytes",
    "training_flops", "test_flops",
}  # fmt: skip


def save_runs(rows: Iterable[Row], path: Path) -> None:
    """Save a table's runs in one small file, one line per run, to make the table from it again.

    Losses and the paths of data and weights are left out.
    """
    lines = []
    for run in (row.runs[seed] for row in rows for seed in row.seeds):
        accuracy = [[None if value is None else round(value, 3) for value in line] for line in run.result.accuracy]
        rounded = run.result.model_copy(update={"accuracy": accuracy})
        kept = rounded.model_dump(mode="json", include=SAVED_FIELDS & run.result.model_fields_set)
        lines.append(json.dumps({**kept, "config": _named(run.config)}, separators=(",", ":")))
    write_atomically(path, "[\n" + ",\n".join(lines) + "\n]\n")


def differences(config: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Settings in which two runs differ, except the seed and the machine.

    Settings that do nothing in one of the two (numbers of a schedule that it does not have, rebalancing where nothing
    is rebalanced) are not compared.
    """
    ours, theirs = (in_use(flatten(_named(settings))) for settings in (config, other))
    return {
        key.removeprefix("options."): (_short(ours[key]), _short(theirs[key]))
        for key in sorted(ours.keys() & theirs.keys())
        if key not in (*MACHINE_SETTINGS, "seed") and ours[key] != theirs[key]
    }


def _short(value: str) -> str:
    """A number with at most six digits."""
    try:
        return f"{float(value):.6g}" if len(value) > 8 else value
    except ValueError:
        return value


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """The settings with names instead of paths: where the data and the weights are kept makes no difference."""
    return {**config, "data": data_name(config["data"]), "backbone": backbone_name(config["backbone"])}


def setting_of(config: dict[str, Any], key: str) -> Any:
    """The value of a run's setting, or of its method's option, by the dotted name; None if it has none."""
    group, _, inner = key.partition(".")
    if group not in config:
        return setting_of(config["options"], key) if "options" in config else None
    return setting_of(config[group], inner) if inner else config[group]


def find_rows(grid: Grid, source: Path, from_bench: bool = True, methods: Collection[str] = ()) -> list[Row]:
    """The rows from a folder that `bench run` wrote; or, with from_bench=False, from any folder or file of runs.
    methods: only those of these, if some are given."""
    for name in methods:
        find_method(name)  # raises UserError if there is no such method
    rows = make_rows(grid, read_runs(source), source if from_bench else None)
    rows = [row for row in rows if not methods or row.method in methods]
    if not any(row.runs for row in rows):
        small = "; it holds runs of --small" if (source / f"{grid.name}-small").is_dir() else ""
        raise UserError(f"{source}: holds no finished run of {grid.name}; do some with `vqprompt bench run`{small}")
    return rows if from_bench else [row for row in rows if row.runs]


def make_rows(grid: Grid, runs: Iterable[SavedRun], out: Path | None = None) -> list[Row]:
    """The rows of the table: the grid's in their order, then runs with other settings.

    out: the folder of all tables' runs. A run of another table counts only if it has exactly this grid's settings.
    None: all runs are meant for this table.
    """
    rows: dict[tuple[str, str, str], Row] = {}

    def row_of(method: str, variant: dict[str, Any], changed: dict[str, tuple[str, str]], backbone: str) -> Row:
        quoted = NUMBERS.get(("/".join([grid.name, *described(variant)]), method))
        new = Row(method, variant, changed, quoted, backbone_name(backbone), grid.backbones)
        return rows.setdefault((method, repr(variant), repr(changed)), new)

    planned = [(m, variant) for sweep in grid.sweeps for m in sweep.methods for variant in combine(grid.axes(sweep))]
    for method, variant in planned:
        row_of(method, variant, {}, grid.declared(method, variant)["backbone"])
    for run in (run for run in runs if run.result.done):
        method, backbone = run.config["method"], run.config["backbone"]
        sweep = next((sweep for sweep in grid.sweeps if method in sweep.methods), grid.sweeps[-1])
        variant = {key: setting_of(run.config, key) for key in grid.axes(sweep)}
        if None in variant.values():
            continue
        declared = grid.declared(method, variant)
        # the recipe for the run's own data set and backbone: what suits these is no further change of settings
        with_own = {**declared, "data": data_name(run.config["data"]), "backbone": backbone_name(backbone)}
        expected = resolve(with_own, recipe=True).model_dump(mode="json")
        expected |= {key: declared[key] for key in ("data", "backbone")}
        changed = differences(completed(run.config), expected)
        own = out is None or (run.folder is not None and run.folder.is_relative_to(out / grid.name))
        if own or (not changed and (method, variant) in planned):
            row_of(method, variant, changed, backbone).runs.setdefault(run.config["seed"], run)
    order = {key: n for n, key in enumerate(dict.fromkeys(key[:2] for key in rows))}
    with_runs = {key[:2] for key, row in rows.items() if row.runs}  # elsewhere, a row shows only the paper's numbers
    kept = {key: row for key, row in rows.items() if row.runs or (row.quoted and key[:2] not in with_runs)}
    return [kept[key] for key in sorted(kept, key=lambda key: (order[key[:2]], len(kept[key].changed)))]


def distinct_name(row: Row, rows: Sequence[Row]) -> str:
    """The method, its values on the axes, and the settings in which it differs from other rows of its method."""
    alike = [r.changed for r in rows if r.method == row.method and r.runs]
    particular = [key for key, change in row.changed.items() if any(other.get(key) != change for other in alike)]
    changed = (f"{key}={row.changed[key][0]}" for key in particular)
    return ", ".join([row.title, *described(row.variant), *changed])

"""The paper's experiments, from paper.toml: which methods, with which settings, on which backbone, with which seeds.

A run's name says what is particular to it (`cub200/vq-prompt/seed1`), so the same run always has the same name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from vqprompt.core.backbones.registry import WEIGHTS_SUFFIXES
from vqprompt.core.data.archives import ARCHIVE_SUFFIXES as ARCHIVES
from vqprompt.core.data.stream import StreamKind
from vqprompt.core.errors import UserError
from vqprompt.research.datasets import DATASETS, parse_data
from vqprompt.research.methods import find_method
from vqprompt.research.results.config import MACHINE_SETTINGS, RunConfig, resolve


@dataclass(frozen=True)
class Sweep:
    """Some methods, each run with every combination of the axes' values."""

    methods: tuple[str, ...]
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """One table or figure of the paper. The fields are explained in paper.toml."""

    name: str
    title: str
    table: str
    settings: dict[str, Any]
    sweeps: tuple[Sweep, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    backbones: tuple[str, ...] = ("vit-b16-in1k",)
    measures: dict[str, tuple[str, float]] = field(default_factory=dict)

    def axes(self, sweep: Sweep) -> dict[str, tuple[Any, ...]]:
        several = len(self.backbones) > 1 and "backbone" not in self.settings
        return ({"backbone": self.backbones} if several else {}) | sweep.axes

    def declared(self, method: str, variant: dict[str, Any], seed: int = 1) -> dict[str, Any]:
        """The settings of a run as the grid declares them, without a user's changes."""
        settings = {"backbone": self.backbones[0], **self.settings, **variant, "method": method, "seed": seed}
        online = StreamKind.parse(settings.get("stream", "disjoint")).piece  # one pass, whatever the others have
        return {key: value for key, value in settings.items() if not (online and key == "epochs")}

    @property
    def ablation(self) -> bool:
        """Whether an axis is a setting of the method. Then the figure is drawn over that axis, else over the tasks."""
        return any(key not in ("tasks", "backbone", "stream") for sweep in self.sweeps for key in sweep.axes)


class Quoted(NamedTuple):
    """Final and cumulative average accuracy in percent, with standard deviations; None where the paper has none. mark:
    what to know before comparing with them."""

    faa: float
    faa_std: float | None = None
    caa: float | None = None
    caa_std: float | None = None
    mark: str = ""


def _quote(printed: list[Any]) -> Quoted:
    *numbers, last = printed
    return Quoted(*numbers)._replace(mark=last) if isinstance(last, str) else Quoted(*printed)


def _load() -> tuple[dict[str, Grid], dict[tuple[str, str], Quoted]]:
    """The paper's experiments by name; and its numbers, by the grid (with the values of its axes) and the method."""
    grids, numbers = dict[str, Grid](), dict[tuple[str, str], Quoted]()
    for entry in tomllib.loads((files(__package__) / "paper.toml").read_text(encoding="utf-8"))["grid"]:
        name = entry["name"]
        for key, value in entry.pop("numbers", {}).items():
            if isinstance(value, dict):
                numbers |= {(f"{name}/{key}", method): _quote(printed) for method, printed in value.items()}
            else:
                numbers[name, key] = _quote(value)
        grids[name] = TypeAdapter(Grid).validate_python(entry)
    return grids, numbers


GRIDS, NUMBERS = _load()
SMALL: dict[str, Any] = {
    "data": "quickdraw50", "backbone": "vit-s14", "size": 28, "epochs": 2, "batch_size": 12,
    "train_per_class": 12, "test_per_class": 6,
}  # fmt: skip


def find_grid(name: str, small: bool = False) -> Grid:
    if name not in GRIDS:
        raise UserError(f"no table is called {name!r}; there are {', '.join(GRIDS)}")
    return smaller(GRIDS[name]) if small else GRIDS[name]


def smaller(grid: Grid) -> Grid:
    """The same grid on the embedded drawings and backbone, with the last two methods and both ends of every axis."""

    def few(tasks: int) -> list[int]:
        return [2] * (2 + tasks // 5)

    def ends(key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        both = values if len(values) == 1 else (values[0], values[-1])
        return tuple(few(value) if key == "tasks" else value for value in both)

    tasks = grid.settings.get("tasks", DATASETS[grid.settings["data"]].defaults.get("tasks", 10))
    settings = {**SMALL, "tasks": few(tasks)} | {k: v for k, v in grid.settings.items() if k == "validation"}
    sweeps = (Sweep(s.methods[-2:], {key: ends(key, values) for key, values in s.axes.items()}) for s in grid.sweeps)
    title = f"Stand-in for: {grid.title}; the embedded drawings, 28 px"
    return replace(grid, name=f"{grid.name}-small", title=title, settings=settings, sweeps=tuple(sweeps), seeds=(1, 2))


@dataclass(frozen=True)
class Run:
    name: str
    config: RunConfig


def plan(
    grid: Grid,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    changes: dict[str, Any] | None = None,
    by_method: dict[str, dict[str, Any]] | None = None,
) -> list[Run]:
    """The runs of a grid.

    changes: settings of every run, instead of the grid's; a change of an axis replaces the axis by that one value.
    by_method: settings of one method's runs. They win over the grid's and over `changes`.
    """
    common = changes or {}
    for name in methods:
        find_method(name)  # raises UserError if there is no such method
    joining = [name for name in methods if not any(name in sweep.methods for sweep in grid.sweeps)]
    runs = []
    for sweep in grid.sweeps:
        named = [*sweep.methods, *(joining if sweep is grid.sweeps[-1] else [])]
        for method in [name for name in named if not methods or name in methods]:
            changes = {**common, **(by_method or {}).get(method, {})}
            axes = {k: (changes[k],) if k in changes else values for k, values in grid.axes(sweep).items()}
            for variant in combine(axes):
                for seed in seeds or grid.seeds:
                    config = resolve({**grid.declared(method, variant, seed), **changes}, recipe=True)
                    runs.append(Run(_name(grid, config, variant, changes), config))
    return runs


def combine(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _name(grid: Grid, config: RunConfig, variant: dict[str, Any], changes: dict[str, Any]) -> str:
    parts = [grid.name]
    if data_name(config.data) != data_name(grid.settings["data"]):
        parts.append(data_name(config.data))
    if "backbone" not in variant and config.backbone != grid.declared(config.method, {})["backbone"]:
        parts.append(backbone_name(config.backbone))
    unnamed = {*MACHINE_SETTINGS, "data", "backbone", "method", "seed", *variant}
    settings = {key: value for key, value in changes.items() if key not in unnamed}
    parts += [config.method, *described(variant), *described(settings), f"seed{config.seed}"]
    return "/".join(re.sub(r"[^\w.,=+-]", "_", part) for part in parts)


def described(settings: dict[str, Any]) -> list[str]:
    """`key=value` for each setting, short enough for a folder's name or a table."""

    def shown(key: str, value: Any) -> str:
        if key == "backbone":
            return backbone_name(value)
        return "+".join(map(str, value)) if isinstance(value, list) else str(value)

    return [f"{key}={shown(key, value)}" for key, value in settings.items()]


def data_name(data: str) -> str:
    name, path = parse_data(data)
    own = Path(str(path)).name
    return name or own.removesuffix(next((suffix for suffix in ARCHIVES if own.endswith(suffix)), ""))


def backbone_name(backbone: str) -> str:
    """A short name. For a weights file it includes the folder, because many weights files are called `model`."""
    path = Path(backbone)
    return "/".join([*path.parent.parts[-1:], path.stem]) if path.suffix in WEIGHTS_SUFFIXES else path.name

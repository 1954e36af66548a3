"""The paper's experiments as data: which methods, with which settings, on which backbone, with which seeds.

A run's name says what is particular to it (`cub200/vq-prompt/seed1`), so the same run always has the same name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from vqprompt.core.backbones.registry import WEIGHTS_SUFFIXES
from vqprompt.core.data.archives import ARCHIVE_SUFFIXES as ARCHIVES
from vqprompt.core.errors import UserError
from vqprompt.research.datasets import DATASETS, parse_data
from vqprompt.research.methods import METHODS, find_method

from vqprompt.research.results.config import MACHINE_SETTINGS, RunConfig, resolve


@dataclass(frozen=True)
class Sweep:
    """Some methods, each run with every combination of the axes' values."""

    methods: tuple[str, ...]
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """One table or figure of the paper.

    table: where it is in the paper; empty if the table is ours. settings: common to all runs. backbones: the paper's;
    if there are several, they are one more axis.
    """

    name: str
    title: str
    table: str
    settings: dict[str, Any]
    sweeps: tuple[Sweep, ...]
    seeds: tuple[int, ...] = (0, 1, 2)  # ours: the paper does not say how often it ran its ablations
    backbones: tuple[str, ...] = ("vit-b16-in1k",)

    def axes(self, sweep: Sweep) -> dict[str, tuple[Any, ...]]:
        several = len(self.backbones) > 1 and "backbone" not in self.settings
        return ({"backbone": self.backbones} if several else {}) | sweep.axes

    def sweep_of(self, method: str) -> Sweep:
        """The sweep of a method. A method that the paper's table does not have joins the last sweep."""
        return next((sweep for sweep in self.sweeps if method in sweep.methods), self.sweeps[-1])

    def declared(self, method: str, variant: dict[str, Any], seed: int = 1) -> dict[str, Any]:
        """The settings of a run as the grid declares them, without a user's changes."""
        return {"backbone": self.backbones[0], **self.settings, **variant, "method": method, "seed": seed}

    @property
    def ablation(self) -> bool:
        """Whether an axis is a setting of the method. Then the figure is drawn over that axis, else over the tasks."""
        return any(key not in ("tasks", "backbone") for sweep in self.sweeps for key in sweep.axes)


RIVALS = ("joint", "ft", "ft++", "l2p++", "deep-l2p++", "dualprompt", "coda-p", "hide-prompt", "evoprompt", "vq-prompt")
SEEDS, CUB_SEEDS = (0, 1, 2, 3, 4), (0, 12, 24, 36, 48)
CIFAR = ("joint", "ft", "ft++", "lwf", "l2p++", "deep-l2p++", "dualprompt", "coda-p", "evoprompt", "vq-prompt")
CUB = ("joint", "ft", "ft++", "lwf", "bic", "dualprompt", "coda-p", "slca", "hide-prompt", "vq-prompt")
SELF_SUPERVISED = ("dualprompt", "coda-p", "hide-prompt", "vq-prompt")
MITIGATION = ("l2p++", "l2p++-v2", "evoprompt", "vq-prompt-s", "vq-prompt")
MORE = ("hide-prompt", "vq-prompt")
TAUS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0)  # ours: the paper names 1.0 and "lower values"
POOLS, LENGTHS = (10, 30, 50, 100), (4, 8, 12, 16, 20, 24)
WEIGHTS = (0.0, 0.1, 0.4, 1.0)  # ours: the paper names 0.4 and 0.1
TUNED = ("joint", "ft++", "lwf", "bic")
PROMPTED = (
    "l2p++", "deep-l2p++", "l2p++-v2", "dualprompt", "coda-p", "hide-prompt", "evoprompt", "vq-prompt-s", "vq-prompt",
    "linear",
)  # fmt: skip


R = {"data": "imagenet-r"}


# fmt: off
_LISTED = [
    Grid("imagenet-r-5", "ImageNet-R, 5 tasks", "Table 1", {**R, "tasks": 5}, (Sweep(RIVALS),), SEEDS),
    Grid("imagenet-r-10", "ImageNet-R, 10 tasks", "Table 1", {**R, "tasks": 10}, (Sweep(RIVALS),), SEEDS),
    Grid("imagenet-r-20", "ImageNet-R, 20 tasks", "Table 1", {**R, "tasks": 20}, (Sweep(RIVALS),), SEEDS),
    Grid("cifar100", "Split CIFAR-100, 10 tasks", "Table 2", {"data": "cifar100"}, (Sweep(CIFAR),), SEEDS),
    Grid("cub200", "Split CUB-200, 10 tasks", "Table 3", {"data": "cub200"}, (Sweep(CUB),), CUB_SEEDS,
         backbones=("vit-b16-in21k",)),
    Grid("self-supervised", "ImageNet-R, 10 tasks, self-supervised backbones", "Table 4", R,
         (Sweep(SELF_SUPERVISED),), SEEDS, backbones=("ibot-b16", "dino-b16")),
    Grid("mitigation", "With and without classifier bias mitigation (paper: ImageNet-R)", "Table 5", R,
         (Sweep(MITIGATION, {"tasks": (5, 10, 20)}),), SEEDS),
    Grid("imagenet-a", "ImageNet-A, 20 tasks", "Table 7", {"data": "imagenet-a"}, (Sweep(MORE),), SEEDS),
    Grid("vtab", "VTAB, 5 domains", "Table 7", {"data": "vtab"}, (Sweep(MORE),), SEEDS),
    Grid("ablation-tau", "Soft-Prompt and VQ-Prompt-S over τ (paper: ImageNet-R)", "Figure 3 (a)", R,
         (Sweep(("soft-prompt", "vq-prompt-s"), {"tau": TAUS}),)),
    Grid("ablation-pool", "Pool size N × prompt length L_p (paper: ImageNet-R)", "Figure 3 (b)", R,
         (Sweep(("vq-prompt",), {"pool": POOLS, "length": LENGTHS}),)),
    Grid("ablation-loss", "Loss weights λ_q × λ_c (paper: ImageNet-R)", "Figure 3 (c)", R,
         (Sweep(("vq-prompt",), {"vq_weight": WEIGHTS, "commitment_weight": WEIGHTS}),)),
    Grid("cub200-rates", "Learning rates, by held-out training images of Split CUB-200", "",
         {"data": "cub200", "validation": 0.2, "size": 112, "epochs": 20},
         (Sweep(TUNED, {"lr": (5e-3,), "layer_decay": (0.75,), "backbone_lr_scale": (0.002, 0.006, 0.02)}),
          Sweep(("slca",), {"lr": (0.03, 0.1), "layer_decay": (0.75,), "backbone_lr_scale": (3e-4, 1e-3)}),
          Sweep(PROMPTED, {"lr": (1e-3, 2.5e-3, 5e-3, 1e-2, 2e-2)})), (1,), ("vit-s14",)),
]


# fmt: on
GRIDS = {grid.name: grid for grid in _LISTED}
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

    tasks = grid.settings.get("tasks", DATASETS[grid.settings["data"]].defaults["tasks"])
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


assert all(method in METHODS for grid in _LISTED for sweep in grid.sweeps for method in sweep.methods)

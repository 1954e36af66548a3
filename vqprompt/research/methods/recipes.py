"""Recipes: for every method and data set of the paper, the published settings, and where they were published.

The recipes themselves are in recipes.toml. `bench run` uses them by default, its tables mark with § what differs from
them, and `vqprompt methods NAME --data DATA` prints them. Facts about each method are in methods.toml.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

PAPER_DATA = ("imagenet-r", "cifar100", "cub200", "imagenet-a", "vtab")
PAPER_BACKBONES = ("vit-b16-in1k", "vit-b16-in21k", "ibot-b16", "dino-b16")
_TABLE = tomllib.loads((files(__package__) / "recipes.toml").read_text(encoding="utf-8"))
FACTS: dict[str, dict[str, Any]] = tomllib.loads((files(__package__) / "methods.toml").read_text(encoding="utf-8"))
for _title, _facts in FACTS.items():
    _facts |= {"presets": _TABLE["preset"][_title]} if _title in _TABLE["preset"] else {}


@dataclass(frozen=True)
class Part:
    """Some settings of a recipe, and where they come from. A source that begins with "ours" is no publication."""

    settings: dict[str, Any]
    source: str


def find_recipe(
    method: str, data: str | None, backbone: str = "vit-b16-in1k", tasks: int = 10, released: bool = False
) -> list[Part]:
    """The parts of a recipe; none for methods and data sets that the paper does not have.

    data: a data set's name. backbone: a registered name; another one has no published normalization or τ.
    released: VQ-Prompt as its code is, where the paper says something else.
    """
    if data not in PAPER_DATA:
        return []
    groups = {method, *(group for group, members in _TABLE["methods"].items() if method in members)}
    known = backbone if backbone in PAPER_BACKBONES else "other"
    conditions = {"data": data, "backbones": known, "tasks": tasks}
    parts: list[Part] = []
    decided: set[str] = set()  # groups of alternatives of which one was taken
    for part in _TABLE["part"]:
        if groups.isdisjoint(part["methods"]) or part.get("released", released) != released:
            continue
        if part.get("first_of") in decided or any(value not in part.get(k, [value]) for k, value in conditions.items()):
            continue
        decided |= {part["first_of"]} if "first_of" in part else set()
        parts.append(Part({**part["settings"], **part.get("on", {}).get(data, {})}, part["source"]))
    return parts


def recipe_settings(parts: Iterable[Part]) -> dict[str, Any]:
    """All settings of a recipe; a later part wins."""
    return {key: value for part in parts for key, value in part.settings.items()}


def describe_recipe(method: str, data: str, backbone: str | None = None, tasks: int | None = None) -> list[str]:
    """A recipe as lines of `setting = value, …   source`."""
    backbone = backbone or ("vit-b16-in21k" if data == "cub200" else "vit-b16-in1k")
    tasks = tasks or {"vtab": 5, "imagenet-a": 20}.get(data, 10)
    parts = find_recipe(method, data, backbone, tasks)
    if not parts:
        why = "the paper does not have this data set" if data not in PAPER_DATA else "it is in no table of the paper"
        return [f"{method} on {data}: no recipe, because {why}; the settings are ours"]
    lines = [f"{method} on {data}, {tasks} tasks, {backbone}:"]
    for part in parts:
        shown = ", ".join(f"{key} = {_short(value)}" for key, value in part.settings.items())
        lines.append(f"  {shown}  ({part.source})" if shown else f"  {part.source}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


MOVING = "options.moving.how"


def in_use(flat: dict[str, str]) -> dict[str, str]:
    """The settings of a run, by dotted name, that have an effect: without those of a schedule that it does not use, and
    without those of statistics if it keeps none (then nothing moves, whatever `moving.how` says)."""
    by_schedule = _TABLE["schedule_settings"]
    used = by_schedule.get(flat.get("schedule", "cosine"), ())
    idle = {key for keys in by_schedule.values() for key in keys if key not in used}
    if not flat.get("augment", "crop").startswith("crop"):
        idle.add("crop_area")
    keeps = flat.get("options.statistics", "true") == "true" and any(k.startswith("options.rebal") for k in flat)
    if not keeps:
        idle.add("statistics_views")
    unused = () if keeps else ("options.rebalancing.", "options.moving.")
    used_here = {key: value for key, value in flat.items() if key not in idle and not key.startswith(unused)}
    return used_here if keeps or MOVING not in flat else {**used_here, MOVING: "none"}

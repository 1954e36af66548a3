"""Table 6 of the paper: how each method prompts, and how many prompting parameters that takes.

No number here is typed in. Each method is built without memory, and its parameters are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vqprompt.core.backbones.registry import BACKBONES
from vqprompt.core.errors import UserError
from vqprompt.research.methods import METHODS, after_all_tasks, find_method
from vqprompt.research.methods.base import Method
from vqprompt.research.paper.table_formats import TextTable
from vqprompt.research.report.render import render

NAME, PAPER_TABLE = "parameters", "Table 6"
BACKBONE, TASKS = "vit-b16-in1k", 10
HEADINGS = ("method", "settings", "strategy", "locations", "N", "L_p", "prompting parameters")
SHAPE = ("pool", "length", "blocks", "general_length", "general_blocks")  # options that change the prompts' shape


class PromptConfiguration(NamedTuple):
    """How one method prompts with one set of settings."""

    method: str
    settings: str  # "default" or the name of a preset
    strategy: str  # Pre-T: prefixes for keys and values. Pro-T: tokens that join the sequence
    locations: str
    pool: str
    length: str
    parameters: int


def prompt_configurations(methods: Sequence[str] = (), backbone: str = BACKBONE, tasks: int = TASKS) -> TextTable:
    """The table for these methods; without any, for all methods that prompt."""
    if backbone not in BACKBONES:
        raise UserError(f"{backbone}: not the name of a backbone; there are {', '.join(BACKBONES)}")
    classes = [find_method(name) for name in methods] or list(METHODS.values())
    rows = [row for method in classes for row in _rows(method, backbone, tasks) if row.strategy != "–" or methods]
    notes = [
        f"Counted for {backbone} and {tasks} tasks. The paper's table ({PAPER_TABLE}) has no counts.",
        "Pre-T (prefix tuning): prefixes for keys and values. Pro-T (prompt tuning): tokens in the sequence.",
        "N: prompts or components in a pool. L_p: length of one. Locations: attention blocks, counted from 0.",
    ]
    cells = [[*map(str, row[:-1]), f"{row.parameters:,}"] for row in rows]
    return TextTable(NAME, "Prompt configurations", HEADINGS, cells, notes, "llllrrr", [HEADINGS, *rows])


def write_configurations(table: TextTable, folder: Path) -> list[Path]:
    """Write parameters.md, .csv, .tex and .html into the folder."""
    return table.write(folder, render("parameters.html", table=table, paper_table=PAPER_TABLE))


def _rows(method: type[Method], backbone: str, tasks: int) -> list[PromptConfiguration]:
    """One row with the default settings, and one per preset that changes the prompts' shape."""
    rows = [_describe(method, "default", {}, backbone, tasks)]
    for name, preset in method.presets.items():
        changed = {key: value for key, value in preset.items() if key in SHAPE}
        if changed:
            rows.append(_describe(method, f"preset {name}", changed, backbone, tasks))
    return rows


def _describe(
    method: type[Method], settings: str, changed: dict[str, Any], backbone: str, tasks: int
) -> PromptConfiguration:
    made = after_all_tasks(method, BACKBONES[backbone].config, tasks, **changed)
    options, parameters = made.options, made.parameter_counts()["prompting"]
    prompts = hasattr(options, "length")  # other methods have adapters, or nothing of their own
    blocks = getattr(options, "blocks", list(range(made.vit.config.depth)) if prompts else [])
    pool = getattr(options, "pool", None) or made.choosable or ("from the image" if prompts else "–")
    locations, count, length = _listed(blocks), str(pool), str(getattr(options, "length", "–"))
    if hasattr(options, "general_blocks"):  # DualPrompt: general prompts and experts
        locations = f"G: {_listed(options.general_blocks)}, E: {locations}"
        count, length = f"G: 1, E: {count}", f"G: {options.general_length}, E: {length}"
    strategy = "–" if not prompts else "Pro-T" if method.prompts_stay else "Pre-T"
    return PromptConfiguration(method.title, settings, strategy, locations, count, length, parameters)


def _listed(blocks: Sequence[int]) -> str:
    return f"[{' '.join(map(str, blocks))}]" if blocks else "–"

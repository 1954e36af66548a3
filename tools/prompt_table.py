"""Print Table 6 of the paper: how each method prompts, and how many prompting parameters that takes.

    python tools/prompt_table.py [METHOD …]

No number here is typed in. Each method is built without memory, and its parameters are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vqprompt.core.backbones.registry import BACKBONES
from vqprompt.research.methods import METHODS, after_all_tasks, find_method
from vqprompt.research.methods.base import Method
from vqprompt.research.paper.tables import UNKNOWN, TextTable

BACKBONE, TASKS = "vit-b16-in1k", 10
COUNT = "prompting parameters"
SHAPE = ("pool", "length", "blocks", "general_length", "general_blocks")  # options that change the prompts' shape


def prompt_configurations(methods: Sequence[str] = (), backbone: str = BACKBONE, tasks: int = TASKS) -> TextTable:
    """The table for these methods; without any, for all methods that prompt. One row per method with its default
    settings, and one per preset that changes the prompts' shape."""
    rows = []
    for method in [find_method(name) for name in methods] or list(METHODS.values()):
        rows.append({"method": method.title, "settings": "default", **_describe(method, {}, backbone, tasks)})
        for name, preset in method.presets.items():
            if changed := {key: value for key, value in preset.items() if key in SHAPE}:
                described = _describe(method, changed, backbone, tasks)
                rows.append({"method": method.title, "settings": f"preset {name}", **described})
    rows = [row for row in rows if methods or row["strategy"] != UNKNOWN]
    notes = [
        f"Counted for {backbone} and {tasks} tasks. The paper's table has no counts.",
        "Pre-T (prefix tuning): prefixes for keys and values. Pro-T (prompt tuning): tokens in the sequence.",
        "N: prompts or components in a pool. L_p: length of one. Locations: attention blocks, counted from 0.",
    ]
    columns = {key: [f"{row[key]:,}" if key == COUNT else str(row[key]) for row in rows] for key in rows[0]}
    text = ("method", "settings", "strategy", "locations")
    return TextTable("parameters", "Prompt configurations", columns, notes, text, rows)


def _describe(method: type[Method], changed: dict[str, Any], backbone: str, tasks: int) -> dict[str, Any]:
    made = after_all_tasks(method, BACKBONES[backbone].config, tasks, **changed)
    options = made.options
    prompts = hasattr(options, "length")  # other methods have adapters, or nothing of their own
    blocks = getattr(options, "blocks", list(range(made.vit.config.depth)) if prompts else [])
    pool = getattr(options, "pool", None) or made.choosable or ("from the image" if prompts else UNKNOWN)
    locations, count, length = _listed(blocks), str(pool), str(getattr(options, "length", UNKNOWN))
    if hasattr(options, "general_blocks"):  # DualPrompt: general prompts and experts
        locations = f"G: {_listed(options.general_blocks)}, E: {locations}"
        count, length = f"G: 1, E: {count}", f"G: {options.general_length}, E: {length}"
    strategy = UNKNOWN if not prompts else "Pro-T" if method.prompts_stay else "Pre-T"
    parameters = made.parameter_counts()["prompting"]
    return {"strategy": strategy, "locations": locations, "N": count, "L_p": length, COUNT: parameters}


def _listed(blocks: Sequence[int]) -> str:
    return f"[{' '.join(map(str, blocks))}]" if blocks else UNKNOWN


if __name__ == "__main__":
    print(prompt_configurations(sys.argv[1:]).markdown())

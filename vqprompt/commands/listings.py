"""`vqprompt methods`, `vqprompt backbones` and `vqprompt datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vqprompt.commands.console import console, print_plain, text_table
from vqprompt.commands.options import option
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.research.methods.base import Method


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the settings of this method.")] = None,
    backbone: str | None = option("Count parameters for this backbone (vit-s14); see `vqprompt backbones`."),
    tasks: int | None = option("Count parameters for this number of tasks (10).", min=1),
    data: str | None = option("With a name: show its published settings for this data set, with sources."),
) -> None:
    """List the methods. With a name, show its settings."""
    from vqprompt.core.backbones.load import load_backbone
    from vqprompt.core.backbones.registry import BACKBONES
    from vqprompt.research.methods import METHODS, after_all_tasks, find_method

    if name is not None:
        method = find_method(name)
        return show_method(method) if data is None else show_recipe(name, data, backbone, tasks)
    backbone, tasks = backbone or "vit-s14", tasks or 10
    config = BACKBONES[backbone].config if backbone in BACKBONES else load_backbone(backbone).config
    counts = {key: after_all_tasks(m, config, tasks).parameter_counts()["prompting"] for key, m in METHODS.items()}
    rows = [(key, str(METHODS[key].year), f"{count:,}", METHODS[key].summary) for key, count in counts.items()]
    console.print(text_table(("name", "year", "params", "what it does"), rows, right=("params",)))
    print_plain(f"\nparams: parameters of prompts or adapters, for {backbone} and {counted(tasks, 'task')}.")
    print_plain("To see the settings of one method: vqprompt methods NAME")


def show_method(method: type[Method]) -> None:
    console.print(f"[bold]{method.title}[/bold] ({method.year}): {method.summary}\n")
    console.print(text_table(("setting", "default", "meaning"), settings_of(method.Options())))
    for preset, values in method.presets.items():
        console.print(f"\npreset {preset}: {json.dumps(values)}")
    for key, (low, high) in method.search_space.items():
        print_plain(f"\nsearched by `vqprompt search`: {key} from {low:g} to {high:g}")


def show_recipe(name: str, data: str, backbone: str | None, tasks: int | None) -> None:
    """Without a backbone or a number of tasks: those of the paper."""
    from vqprompt.research.datasets import DATASETS, parse_data
    from vqprompt.research.methods.recipes import describe_recipe

    known = parse_data(data)[0]
    if known is None:
        raise UserError(f"--data {data}: no such data set; there are {', '.join(DATASETS)}")
    for line in describe_recipe(name, known, backbone, tasks):
        print_plain(line)


def settings_of(options: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each setting; those of groups by their dotted names."""
    for key, field in type(options).model_fields.items():
        value = getattr(options, key)
        if hasattr(type(value), "model_fields"):
            yield from settings_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value), field.description or ""


def backbones(
    world: Path | None = option("Show a backbone ordinary images, in one folder per kind.", metavar="FOLDER"),
    backbone: str = option("With --world: a name, or a weights file.", "vit-s14"),
    size: int | None = option("With --world: the image size of the models, in px."),
) -> None:
    """List the backbones, and say which one to take.

    With --world, new models with this backbone call unknown what is nearer to these images than to any class.
    """
    from vqprompt.core.backbones.registry import BACKBONES, BEST, BEST_SIZE

    if world is not None:
        from vqprompt.product.model.ingest import learn_world
        from vqprompt.product.model.model import Model

        made, target = learn_world(Model(backbone, size=size), world)
        print_plain(f"{counted(len(made), 'mean')} in {target}; new models with {backbone} compare with them")
        return
    rows = [(b.name, f"{b.summary}. For {b.good_for} ({b.megabytes} MB, {b.licence})") for b in BACKBONES.values()]
    console.print(text_table(("name", "what it is, what it is good for (MB as float32, licence)"), rows))
    print_plain(
        f"\nOnline, --backbone best takes {BEST} at {BEST_SIZE} px; dinov2-s14 does a quarter of its arithmetic.\n"
        "Without a network, take vit-s14. A weights file works too: --backbone FILE (safetensors, .pth, .npz)"
    )


def datasets() -> None:
    """List the data sets, and where they are looked for."""
    from vqprompt.research.datasets import DATASETS
    from vqprompt.research.datasets.common import data_folder

    rows = [(name, str(entry.defaults.get("tasks", 10)), entry.summary) for name, entry in DATASETS.items()]
    console.print(text_table(("name", "tasks", "what it is"), rows))
    print_plain(
        f"\n--data NAME looks in {data_folder()}/NAME (set by VQPROMPT_DATA), and downloads what is missing.\n"
        "--data NAME=PATH reads it where you have it: the original archive, its folder, or the hub's parquet files.\n"
        "Your own images work too: --data FOLDER, a folder or zip with one folder per class inside."
    )

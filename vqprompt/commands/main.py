"""The command line: thin. Each command's help is meant to teach."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vqprompt import __version__
from vqprompt.backbones.load import load_backbone
from vqprompt.backbones.registry import BACKBONES
from vqprompt.backbones.vit import ViT
from vqprompt.commands import check, export, teach, test
from vqprompt.commands.bench import Track
from vqprompt.commands.bench import app as bench_app
from vqprompt.data.decode import SUFFIXES, open_image
from vqprompt.data.source import hidden
from vqprompt.datasets import DATASETS
from vqprompt.datasets.common import data_folder
from vqprompt.errors import UserError
from vqprompt.learner.learner import Learner
from vqprompt.methods import METHODS, find_method
from vqprompt.progress import Progress as Event
from vqprompt.progress import Report
from vqprompt.report.pages import write_comparison
from vqprompt.runs import runner as runs
from vqprompt.runs.config import parse_assignment, read_config_file, resolve

app = typer.Typer(
    help="Continual learning with a frozen Vision Transformer: teach it classes as they come, keep none of the images."
    "\n\n"
    "Start with [bold]vqprompt demo[/bold], then [bold]vqprompt run --data YOUR_FOLDER --out RESULTS[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


for command in (
    teach.learn, check.check, test.test, teach.show, teach.rename, teach.forget, teach.undo, export.export, teach.cache,
):  # fmt: skip
    app.command(rich_help_panel="A model of your own")(command)
app.add_typer(bench_app, name="bench", rich_help_panel="Commands")


console = Console()


def say_version(asked: bool) -> None:
    if asked:
        print(f"vqprompt {__version__}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=say_version, help="Say which version this is.")
    ] = False,
) -> None: ...


PREDICTED_AT_ONCE = 256  # images opened at a time
DEMO = {"train_per_class": 30, "test_per_class": 10, "seed": 1, "tasks": 10, "data": "quickdraw50"}
DEMO_METHODS: dict[str, dict[str, Any]] = {"vq-prompt": {"epochs": 2}, "ft": {"epochs": 1, "lr": 1e-5}}


@contextmanager
def progress_bar(title: str = "") -> Iterator[Report]:
    """One live line: what, how far, how long, how long still."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("remaining"),
    )  # fmt: skip
    shown_task: int | None = None
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("starting", total=None)

        def report(event: Event) -> None:
            nonlocal shown_task
            known = event.total if event.task is not None else 0  # before the first task, the whole work is not known
            bar.update(line, completed=event.done if known else 0, total=known or None, description=f"{title}{event}")
            if (
                event.task is not None and event.task != shown_task and not console.is_terminal
            ):  # into a file: one line per task
                shown_task = event.task
                place = f"task {event.task + 1}/{event.tasks}"
                console.print(f"{title}{place}, {event.done / event.total:.0%} done", highlight=False)

        yield report


def summary(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=None, show_edge=False, header_style="bold")
    for heading in ("method", "FAA %", "CAA %", "forgetting", "seconds", "images/s", "prompting params"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for found in results.values():
        rate = found["images_per_second"]
        table.add_row(
            found["title"], f"{found['faa']:.2f}", f"{found['caa']:.2f}", f"{found['forgetting']:.2f}",
            f"{found['seconds']:.1f}", "–" if rate is None else f"{rate:.0f}", f"{found['parameters']['prompting']:,}",
        )  # fmt: skip
    return table


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to put the results; one folder for each method inside.")] = Path(
        "demo"
    ),
    seed: Annotated[int, typer.Option(help="Class order and everything random.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a demo that was interrupted.")] = False,
) -> None:
    """See forgetting, and its cure, in under three minutes on a laptop.

    Learns 50 classes of Quick Draw drawings in 10 tasks of 5, with the embedded ViT-S/14: once with VQ-Prompt, once
    with plain fine-tuning (FT), which forgets. Ends with a table and OUT/report.html.
    """
    results = {}
    for method, settings in DEMO_METHODS.items():
        config = resolve({**DEMO, **settings, "method": method, "seed": seed, "device": device})
        with progress_bar(f"{METHODS[method].title}: ") as progress:
            results[method] = runs.run(config, out / method, resume, progress)
        last = results[method]
        console.print(f"{last['title']}: {last['faa']:.1f} % right after 10 tasks ({last['seconds']:.0f} s)")
    page = write_comparison([out / method for method in results], out / "report.html")
    console.print()
    console.print(summary(results))
    console.print(
        "\nFAA: accuracy over all 50 classes at the end; forgetting: points lost since each task was at its best."
    )
    console.print(f"Look at [bold]{escape(str(page))}[/bold]")


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="The run's folder: config, metrics, checkpoint, report.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set of `vqprompt datasets`: NAME, or NAME=PATH where you have it; "
            "or a folder or zip of train/<class>/… + test/<class>/…, or of <class>/…."
        ),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="How many tasks, or class counts: 10, or 20,10,10.")] = None,
    method: Annotated[str | None, typer.Option(help="See `vqprompt methods`.")] = None,
    backbone: Annotated[str | None, typer.Option(help="See `vqprompt backbones`; or a weights file.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Class order and everything random; 0 keeps the natural order.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Image size in px, a multiple of the backbone's patch.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs a task.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Hold out this part of the training images and test on it: to tune.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Named settings of a method, such as `released`.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON or TOML file of settings; another run's config.json will do.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting of the run or of the method: --set tau=5 --set rebalancing.lr=1e-4."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in OUT, wherever it was interrupted.")
    ] = False,
    track: Track = None,
) -> None:
    """Learn a data set task by task, test after each, write a report.

    Command-line settings win over --set, --set over --preset, that over --config, all of them over the method's and
    data set's habits.

    [bold]vqprompt run --data birds/ --tasks 10 --out runs/birds[/bold]
    """
    file = config or (out / "config.json" if resume and (out / "config.json").exists() else None)
    given = dict(parse_assignment(text) for text in assignments or [])
    direct = {
        "data": data,
        "tasks": parse_tasks(tasks),
        "method": method,
        "backbone": backbone,
        "seed": seed,
        "size": size,
        "epochs": epochs,
        "batch_size": batch_size,
        "device": device,
        "validation": validation,
    }
    given |= {key: value for key, value in direct.items() if value is not None}
    resolved = resolve(given, preset, read_config_file(file) if file else None)
    with progress_bar() as progress:
        found = runs.run(resolved, out, resume, progress, track=track or ())
    for note in found["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)
    console.print(summary({resolved.method: found}))
    if resolved.validation:
        console.print(f"Tested on {resolved.validation:.0%} of the training images, held out; not on the test images.")
    console.print(f"\nLook at [bold]{escape(str(out / 'report.html'))}[/bold]")


def parse_tasks(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--tasks {text!r}: expected a number, or class counts such as 20,10,10") from None
    return numbers[0] if len(numbers) == 1 else numbers


@app.command()
def predict(
    learned: Annotated[
        Path, typer.Argument(help="A model of `vqprompt learn`, or a folder of `vqprompt run` or Learner.save.")
    ],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name for each image.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    backbone: Annotated[
        str | None, typer.Option(help="The weights file it was learned with, if that is not where it was.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    unknown: Annotated[
        bool, typer.Option("--unknown/--no-unknown", help="Say unknown for what is like no class (models only).")
    ] = True,
    strictness: Annotated[
        float, typer.Option(help="Above 0, more images are called unknown; below 0, fewer (models only).")
    ] = 0.0,
) -> None:
    """Name what is in images, among all classes learned so far.

    [bold]vqprompt predict garden.vqp photo.jpg holiday/ --top 3[/bold]
    """
    if not learned.is_dir():
        teach.predict_with_model(learned, images, top, as_json, backbone, device, unknown, strictness)
        return
    files = [file for path in images for file in image_files(path)]
    learner = Learner.load(learned, device, backbone=backbone)
    bad: list[str] = []
    for chunk in (files[i : i + PREDICTED_AT_ONCE] for i in range(0, len(files), PREDICTED_AT_ONCE)):
        good, opened = [], []
        for file in chunk:
            try:
                opened.append(open_image(file))
                good.append(file)
            except UserError as error:
                bad.append(str(error))
        shares, places = learner.scores(opened).topk(min(top, len(learner.classes)))
        for file, share, place in zip(good, shares.tolist(), places.tolist(), strict=True):
            named = [(learner.classes[p], s) for p, s in zip(place, share, strict=True)]
            if as_json:
                print(json.dumps({"image": str(file), "classes": dict(named)}, ensure_ascii=False))
            else:
                console.print(
                    f"{file}: " + ", ".join(f"{n} {s:.0%}" for n, s in named),
                    markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip

    if bad:
        raise UserError("\n  ".join([f"{len(bad)} of {len(files)} images cannot be used:", *bad]))


def image_files(path: Path) -> list[Path]:
    """The path itself, or what a folder holds."""
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in SUFFIXES and not hidden(file.relative_to(path).as_posix())
    )
    if not found:
        raise UserError(
            f"{path}: no image in this folder; give image files, or folders of {' '.join(sorted(SUFFIXES))}"
        )
    return found


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method's settings.")] = None,
    backbone: Annotated[str, typer.Option(help="Count parameters for it; see `vqprompt backbones`.")] = "vit-s14",
    tasks: Annotated[int, typer.Option(min=1, help="Count parameters for so many.")] = 10,
) -> None:
    """List the methods; with a name, its settings."""
    if name is None:
        table = Table(show_edge=False, header_style="bold")
        for heading in ("name", "year", "params"):
            table.add_column(heading, justify="right" if heading == "params" else "left", no_wrap=True)
        table.add_column("what it does")
        config = BACKBONES[backbone].config if backbone in BACKBONES else load_backbone(backbone).config
        with torch.device("meta"):  # shapes are enough to count
            vit = ViT(config)
            for key, method in METHODS.items():
                count = method(vit, method.Options(), tasks).parameter_counts()["prompting"]
                table.add_row(key, str(method.year), f"{count:,}", method.summary)
        console.print(table)
        console.print(f"\nparams: prompting parameters for {escape(backbone)} and {tasks} tasks.", highlight=False)
        console.print("Settings of one: vqprompt methods NAME", highlight=False)
        return
    method = find_method(name)
    console.print(f"[bold]{method.title}[/bold] ({method.year}): {method.summary}\n")
    table = Table(show_edge=False, header_style="bold")
    for heading in ("setting", "default", "meaning"):
        table.add_column(heading)
    add_settings(table, method.Options())
    console.print(table)
    for preset, values in method.presets.items():
        console.print(f"\npreset {preset}: {json.dumps(values)}")


def add_settings(table: Table, options: Any, prefix: str = "") -> None:
    for key, field in type(options).model_fields.items():
        value = getattr(options, key)
        if hasattr(type(value), "model_fields"):
            add_settings(table, value, f"{prefix}{key}.")
        else:
            table.add_row(prefix + key, json.dumps(value), field.description or "")


@app.command()
def backbones() -> None:
    """List the backbones."""
    listing(("name", "what it is", "licence"), [(b.name, b.summary, b.licence) for b in BACKBONES.values()])
    console.print("\nAny weights file works too: --backbone FILE (safetensors, .pth, .npz)")


@app.command()
def datasets() -> None:
    """List the data sets, and where they are looked for."""
    listing(
        ("name", "tasks", "what it is"),
        [(name, str(entry.defaults.get("tasks", 10)), entry.summary) for name, entry in DATASETS.items()],
    )
    console.print(
        f"\n--data NAME looks in {escape(str(data_folder()))}/NAME (set by VQPROMPT_DATA) and downloads if need be;\n"
        "--data NAME=PATH reads it where you have it: the original archive, its folder, or the hub's parquet files.\n"
        "Any folder or zip of images works too: --data FOLDER, with one folder per class inside",
        highlight=False,
        soft_wrap=True,
    )


def listing(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(show_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading == "name")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> None:
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("\ninterrupted; go on with --resume")
        sys.exit(130)

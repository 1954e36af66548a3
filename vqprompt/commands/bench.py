"""`vqprompt bench`: list, run, table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from vqprompt.datasets import check_data
from vqprompt.errors import UserError
from vqprompt.methods import METHODS, find_method
from vqprompt.paper.grids import GRIDS, Grid, Run, find_grid, plan
from vqprompt.paper.pool import Event, adopt, default_workers, run_all, split_done
from vqprompt.paper.results import NONE, make_rows, read_runs, save_runs
from vqprompt.paper.tables import Table
from vqprompt.runs.config import parse_assignment, read_config_file
from vqprompt.runs.runner import check_out
from vqprompt.runs.tracking import Tracking

app = typer.Typer(help="The paper's tables and figures, one command each.", no_args_is_help=True)
console = Console()
SPARED = ("images/s", "trainable", "Δ CAA", "paper CAA", "backbone", "forgetting")  # first, where there is no room
Name = Annotated[str, typer.Argument(help="One of `vqprompt bench list`.")]
Small = Annotated[bool, typer.Option("--small", help="On the embedded drawings and backbone, at reduced size.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Log settings, the losses of every step and accuracies, as they come, to mlflow (./mlflow.db, or where "
        "MLFLOW_TRACKING_URI says) or tensorboard (a run's folder, tensorboard/ in it). May be given twice."
    ),
]


Draw = Annotated[bool, typer.Option("--figure", help="Draw curves or the ablation plot, into the page and as .svg.")]


@app.command("list")
def list_grids() -> None:
    """List the tables."""
    table = RichTable(show_edge=False, header_style="bold")
    for heading in ("name", "paper", "runs", "backbone", "what it is"):
        table.add_column(heading, no_wrap=heading == "name", justify="right" if heading == "runs" else "left")
    for grid in GRIDS.values():
        table.add_row(grid.name, grid.table or NONE, str(len(plan(grid))), ", ".join(grid.backbones), grid.title)
    console.print(table)


@app.command()
def run(
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder of all tables and runs; a run is in OUT/NAME/METHOD/seedN.")],
    data: Annotated[
        str | None, typer.Option(help="NAME=PATH where you have the data; another data set's name works too.")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="Another backbone than the paper's; it will be marked.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 1,2,3.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Only these, such as vq-prompt,coda-p; others can join; or all.")
    ] = None,
    small: Small = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; one a GPU by default, or one for every 8 cores.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of every run; on an axis of the table, its one value.")
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON with a section a method: settings of its runs alone, such as tuned rates."),
    ] = None,
    figure: Draw = False,
    track: Track = None,
) -> None:
    """Do a table's runs, and print it. What is done is skipped, what was interrupted goes on: just type it again.

    [bold]vqprompt bench run cub200 --data cub200=CUB_200_2011.tgz --out bench[/bold]
    """
    grid = find_grid(name, small)
    changes: dict[str, Any] = dict(parse_assignment(text) for text in assignments or [])
    changes |= {key: value for key, value in {"data": data, "backbone": backbone}.items() if value is not None}
    by_method = read_settings(settings) if settings else {}
    refused = {"method", "seed"} & {*changes, *(key for own in by_method.values() for key in own)}
    if refused:
        raise UserError(f"{refused.pop()} cannot be set: a table has several; choose with --methods and --seeds")
    check_out(out)
    chosen = list(METHODS) if methods == "all" else list(dict.fromkeys(methods.split(","))) if methods else ()
    runs = plan(grid, chosen, parse_seeds(seeds), changes, by_method)
    Tracking(track or (), out)  # refuses here what every run would refuse
    for place in dict.fromkeys(run.config.data for run in runs):
        check_data(place)
    try:
        todo, elsewhere = split_done(runs, out)
        for name_here, folder in elsewhere.items():
            adopt(folder, out / name_here)
        if len(todo) < len(runs):
            console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are done already", highlight=False)
        failed = run_shown(todo, out, workers or default_workers(), track or ())
    except KeyboardInterrupt:
        Console(stderr=True).print("\ninterrupted; the same command goes on with it")
        raise typer.Exit(130) from None
    rows = make_rows(grid, read_runs(out), out)
    table = Table(grid, [row for row in rows if row.runs or not chosen or row.method in chosen])
    written = table.write(out, figure)
    console.print()
    drawn, left_out = shown(table, console.width)
    console.print(drawn)
    if left_out:
        console.print(f"Left out, for the terminal is narrow: {', '.join(left_out)}.", highlight=False)
    for note in table.notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"\nLook at [bold]{escape(str(written[3]))}[/bold]")
    if failed:
        stderr = Console(stderr=True)
        stderr.print(f"\n[red]{len(failed)} of {len(runs)} runs failed[/red]; the same command tries them again:")
        for run_name, why in failed.items():
            stderr.print(f"  {run_name}: {why}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def run_shown(todo: list[Run], out: Path, workers: int, track: Sequence[str]) -> dict[str, str]:
    """A live line for every run that is going on, and one that stays when it is over."""
    # the name last: it may be long, and only the end of a line is cut off
    columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    lines: dict[str, TaskID] = {}
    parts: dict[str, float] = {}  # how far each run is, of 1
    with Progress(*columns, console=console, transient=True) as bar:
        whole = bar.add_task(f"{len(todo)} runs", total=len(todo), visible=len(todo) > 1)

        def tell(run: Run, event: Event) -> None:
            kind, *more = event
            if kind == "begun":
                lines[run.name] = bar.add_task(f"{run.name} · starting", total=None)
            elif kind == "at":
                (at,) = more
                known = at.total if at.task is not None else 0  # before the first task, the whole work is not known
                text = f"{run.name} · {at}"
                bar.update(lines[run.name], completed=at.done if known else 0, total=known or None, description=text)
                parts[run.name] = at.done / known if known else 0.0
            else:
                bar.remove_task(lines.pop(run.name))
                parts[run.name] = 1.0
                console.print(_result(run, kind, more[0]), highlight=False, soft_wrap=True)
            bar.update(whole, completed=sum(parts.values()))

        return run_all(todo, out, workers, tell, track)


def _result(run: Run, kind: str, what: Any) -> str:
    if kind == "failed":
        return f"[red]✗[/red] {escape(run.name)}: {escape(what.splitlines()[0])}"
    return f"[green]✓[/green] {escape(run.name)}: FAA {what['faa']:.2f}, CAA {what['caa']:.2f}, {what['seconds']:.0f} s"


def shown(table: Table, width: int) -> tuple[RichTable, list[str]]:
    """For a terminal; and the columns that it has no room for."""
    left_out = [heading for heading in SPARED if heading in table.headings]
    for count in range(len(left_out) + 1):
        drawn = RichTable(title=escape(table.grid.title), show_edge=False, header_style="bold")
        kept = [heading for heading in table.headings if heading not in left_out[:count]]
        for n, heading in enumerate(kept):
            drawn.add_column(heading, justify="right" if n else "left", overflow="fold", no_wrap=not n)
        for cells in zip(*(table.columns[heading] for heading in kept), strict=True):
            drawn.add_row(*map(escape, cells))
        if Measurement.get(console, console.options.update(width=10_000), drawn).maximum <= width:
            break
    return drawn, left_out[:count]


@app.command("table")
def print_table(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="The folder that `bench run` wrote to.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="A file that --save wrote, or any folder of runs, to make the table of instead.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep the table's runs in this one small .json file, for --results.")
    ] = None,
    small: Small = False,
    figure: Draw = False,
) -> None:
    """Print a table as Markdown, and write it as Markdown, CSV, LaTeX and HTML into OUT.

    [bold]vqprompt bench table cub200 --results results/cub200.json --out tables --figure[/bold]
    """
    grid = find_grid(name, small)
    source = results or out
    if results is not None and not results.exists():
        raise UserError(
            f"--results {results}: no such file or folder; give a folder of runs, or a file that --save wrote"
        )
    if source is None:
        raise UserError("give --out, the folder that `bench run` wrote to, or --results, a file or folder of results")
    if results is None and not source.is_dir():
        raise UserError(f"{source}: no such folder; `vqprompt bench run {name} --out {source}` makes it")
    table = make_table(grid, source, from_bench=results is None)
    print(table.markdown())
    if save is not None:
        save_runs(table.rows, save)
        console.print(f"wrote {escape(str(save))}", highlight=False, soft_wrap=True)
    if out is not None:
        for path in table.write(out, figure):
            console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)


def make_table(grid: Grid, source: Path, from_bench: bool = True) -> Table:
    rows = make_rows(grid, read_runs(source), source if from_bench else None)
    if not any(row.runs for row in rows):
        small = "; there are some of --small" if (source / f"{grid.name}-small").is_dir() else ""
        raise UserError(f"{source}: holds no finished run of {grid.name}; do some with `vqprompt bench run`{small}")
    return Table(grid, rows if from_bench else [row for row in rows if row.runs])


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Settings by method: a section for each."""
    found = read_config_file(path, "--settings")
    for name, own in found.items():
        find_method(name)  # refuses what there is not
        if not isinstance(own, dict):
            raise UserError(f'--settings {path}: {name} = {own!r}; expected a section, as in ["{name}"] and lr = 1e-3')
    return found


def parse_seeds(text: str | None) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(","))) if text else []
    except ValueError:
        raise UserError(f"--seeds {text!r}: expected numbers, as in 1,2,3") from None

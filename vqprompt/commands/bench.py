"""`vqprompt bench`: the paper's tables. `list` names them, `run` does the runs of one, `table` prints it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vqprompt.commands.console import console, print_error, print_plain, text_table
from vqprompt.commands.interrupted import as_command
from vqprompt.commands.options import Command, Group, Track, flag, numbers, option
from vqprompt.commands.progress_bar import Bars
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.research.paper.execution import Executor
    from vqprompt.research.paper.grids import Run

app = typer.Typer(cls=Group, help="Make the tables and figures of the paper, one command each.", no_args_is_help=True)

LISTED = "`vqprompt bench list` lists them."
SMALL = flag("--small", "Try it at reduced size, on the embedded drawings and backbone.")
FIGURE = flag("--figure", "Also draw the figure, into the page and as .svg.")
WORKERS = option("Runs at the same time. Default: one per GPU or per 8 cores; elsewhere, as many as fit.", min=1)
ON = option(
    "Where: local, ray (the cluster that this machine is part of), ray=HOST:PORT, slurm, slurm=PARTITION. Results come "
    "back to OUT. A run that loses its machine continues on another one from its last checkpoint.",
    "local",
)
CPUS = option("CPU cores per run on other machines. Default: 8, or as many as there are.", min=1)
GPUS = option(
    "GPUs per run on other machines; 0.25: four runs share one. Default: 1 with Ray if there are any, else 0."
)


@app.command("list", cls=Command)
@as_command
def list_grids() -> None:
    """List the tables."""
    from vqprompt.research.paper.grids import GRIDS, plan

    rows = [(g.name, g.table or "–", str(len(plan(g))), ", ".join(g.backbones), g.title) for g in GRIDS.values()]
    console.print(text_table(("name", "paper", "runs", "backbone", "what it is"), rows, right=("runs",)))


@app.command(cls=Command)
@as_command
def run(
    name: Annotated[str, typer.Argument(help=f"The table's name; {LISTED}")],
    out: Path = option("Folder for all tables and runs. A run is written to OUT/NAME/METHOD/seedN.", ...),
    data: str | None = option("NAME=PATH if you have the data elsewhere, or the name of another data set."),
    backbone: str | None = option("Another backbone than the paper's. The table marks such numbers."),
    seeds: str | None = option("The seeds, such as 1,2,3."),
    methods: str | None = option(
        "Only these, such as vq-prompt,coda-p; also ones outside the paper's table; or `all`."
    ),
    small: bool = SMALL,
    workers: int | None = WORKERS,
    on: str = ON,
    cpus: int | None = CPUS,
    gpus: float | None = GPUS,
    assignments: list[str] | None = option(
        "A setting for every run. If it is an axis of the table, its only value.", None, "--set"
    ),
    settings: Path | None = option(
        "TOML or JSON file with one section per method: settings for that method's runs only. `vqprompt search` "
        "writes such a file."
    ),
    figure: bool = FIGURE,
    track: Track = None,
) -> None:
    """Do the runs of a table and print it. Finished runs are skipped and interrupted ones resumed: to continue, give
    the same command again.

    [bold]vqprompt bench run cub200 --data cub200=CUB_200_2011.tgz --out bench[/bold]
    """
    from vqprompt.research.paper.execution import find_executor
    from vqprompt.research.paper.grids import find_grid, plan
    from vqprompt.research.paper.pool import left_to_do
    from vqprompt.research.paper.table_rows import make_rows, read_runs
    from vqprompt.research.paper.tables import make_table

    chosen = chosen_methods(methods) if methods else []
    executor = find_executor(on, workers, cpus, gpus)
    grid = find_grid(name, small)
    changes, by_method = read_changes(assignments or [], data, backbone, settings)
    wanted = dict.fromkeys(numbers(seeds, "--seeds", "numbers, as in 1,2,3")) if seeds else ()
    runs = plan(grid, chosen, list(wanted), changes, by_method)
    refuse_early(runs, out, track or ())
    todo = left_to_do(runs, out)
    if len(todo) < len(runs):
        print_plain(f"{len(runs) - len(todo)} of {len(runs)} runs are done already")
    failed = run_with_bars(todo, out, executor, track or ())
    rows = make_rows(grid, read_runs(out), out)
    table = make_table(grid, [row for row in rows if row.runs or not chosen or row.method in chosen], figure)
    page = table.write(out)[3]
    if console.is_terminal:
        from rich.markdown import Markdown  # slow to import

        console.print(Markdown(table.markdown()))  # folded to its width
    else:
        print(table.markdown())
    print_plain(f"\nLook at {page}", style="bold")
    report_failures(failed, len(runs))


def chosen_methods(text: str) -> list[str]:
    """Names with commas between them, each once; `all` for every method."""
    from vqprompt.research.methods import METHODS

    return list(METHODS) if text == "all" else list(dict.fromkeys(text.split(",")))


def report_failures(failed: dict[str, str], runs: int, next_time: str = "the same command tries them again") -> None:
    """End with status 1 if runs failed, and say which."""
    if failed:
        reasons = (f"  {name}: {reason}" for name, reason in failed.items())
        print_error("\n".join([f"{len(failed)} of {runs} runs failed; {next_time}:", *reasons]))
        raise typer.Exit(1)


def read_changes(
    assignments: Sequence[str], data: str | None, backbone: str | None, file: Path | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings that a user changed: for every run, and by method."""
    from vqprompt.research.results.config import parse_assignment

    changes: dict[str, Any] = dict(parse_assignment(text) for text in assignments)
    changes |= {key: value for key, value in {"data": data, "backbone": backbone}.items() if value is not None}
    by_method = read_settings(file) if file else {}
    refused = {"method", "seed"} & {*changes, *(key for own in by_method.values() for key in own)}
    if refused:
        raise UserError(f"{refused.pop()} cannot be set for single runs; the command has its own option for it")
    return changes, by_method


def refuse_early(runs: Sequence[Run], out: Path, track: Sequence[str]) -> None:
    """Raise UserError now for what would otherwise fail in a run."""
    from vqprompt.core.files import check_writable
    from vqprompt.research.datasets import check_data
    from vqprompt.research.runs.refusals import refuse_what_cannot_fit
    from vqprompt.research.runs.tracking import Tracking

    check_writable(out)
    Tracking(track, out)
    for data in dict.fromkeys(run.config.data for run in runs):
        check_data(data)
    by_row = {(run.config.method, run.name.rpartition("/")[0]): run.config for run in runs}  # once for all seeds
    for config in by_row.values():
        refuse_what_cannot_fit(config)


def run_with_bars(
    todo: Sequence[Run], out: Path, executor: Executor, track: Sequence[str],
    next_round: Callable[[dict[str, str]], Sequence[Run]] = lambda failed: (), total: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Do the runs, with one bar per run in progress. When a run ends, its bar becomes a line of text. Returns the
    reasons of failures by run name. next_round: the runs to go on with, given these; otherwise as for `Executor.run`.
    """
    from vqprompt.research.paper.execution import Advanced, Failed, Finished, Lost, Started

    total = total or len(todo)
    together = counted(total, "run")
    shares: dict[str, float] = {}  # how much of each run is done, from 0 to 1
    failed: dict[str, str] = {}
    bars = Bars(console)
    with bars.live, closing(executor.run(todo, out, track, lambda: next_round(failed), total)) as events:
        if total > 1:
            bars.start(together, total=total)
        for run, event in events:
            line = ""
            match event:
                case Started(where):
                    bars.start(run.name, where=where)
                case Advanced(progress):
                    bars.show(run.name, progress)
                    known = progress.task is not None and progress.total > 0
                    shares[run.name] = progress.done / progress.total if known else 0.0
                case Lost(reason):
                    line = f"{run.name} lost its machine and continues on another one: {reason}"
                    line = f"[yellow]↻[/yellow] {escape(line)}"
                case Finished(result):
                    numbers = f"FAA {result.faa:.2f}, CAA {result.caa:.2f}, {result.seconds:.0f} s"
                    line, shares[run.name] = f"[green]✓[/green] {escape(run.name)}: {numbers}", 1.0
                case Failed(reason):
                    failed[run.name] = reason
                    first = reason.partition("\n")[0]
                    line, shares[run.name] = f"[red]✗[/red] {escape(run.name)}: {escape(first)}", 1.0
            if line:
                bars.remove(run.name)  # it has no bar if it failed before it started
                console.print(line, highlight=False, soft_wrap=True)
            if total > 1:
                bars.set(together, sum(shares.values()))
    return failed


@app.command("table", cls=Command)
@as_command
def print_table(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help=f"The table's name; {LISTED} Several: a summary.")],
    out: Path | None = option("The folder that `bench run` wrote to. The table is written there as files."),
    results: list[Path] | None = option(
        "Read the runs from here instead: a file that --save wrote, or any folder of runs. Give it once per table."
    ),
    save: Path | None = option("Save the table's runs in one small .json file, for a later --results."),
    methods: str | None = option("Only these methods, such as vq-prompt,coda-p. Default: all that have runs."),
    small: bool = SMALL,
    figure: bool = FIGURE,
) -> None:
    """Print a table as Markdown, and write it as Markdown, CSV, LaTeX and HTML into OUT.

    [bold]vqprompt bench table cub200 --results results/cub200.json --out tables --figure[/bold]

    With several names, print one summary of them: the accuracy of every method in each table, its mean and mean rank.

    [bold]vqprompt bench table imagenet-r-10 cifar100 cub200 --out bench --figure[/bold]
    """
    from vqprompt.research.paper.grids import find_grid
    from vqprompt.research.paper.table_rows import find_rows, save_runs
    from vqprompt.research.paper.tables import make_table, summarize, table_labels

    grids, chosen = [find_grid(name, small) for name in names], chosen_methods(methods) if methods else []
    sources = results or ([] if out is None else [out] * len(grids))
    if len(sources) != len(grids):
        raise UserError("give --out, the folder that `bench run` wrote to; or --results for each table, in their order")
    if save is not None and len(grids) > 1:
        raise UserError("--save keeps the runs of one table; give it with one name")
    for source in sources:
        if not source.exists():
            which = "--results" if results else "--out"
            raise UserError(f"{which} {source}: no such file or folder; give what `bench run` or --save wrote")
    rows = [find_rows(grid, source, not results, chosen) for grid, source in zip(grids, sources, strict=True)]
    if len(grids) == 1:
        table = make_table(grids[0], rows[0], figure)
    else:
        table = summarize(dict(zip(table_labels(names, sources), rows, strict=True)), figure)
    print(table.markdown())
    if save is not None:
        save_runs(rows[0], save)
        print_plain(f"wrote {save}")
    for path in table.write(out) if out is not None else ():
        print_plain(f"wrote {path}")


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Settings by method, from a file with one section per method."""
    from vqprompt.research.methods import find_method
    from vqprompt.research.results.config import read_config_file

    by_method = read_config_file(path, "--settings")
    for name, own in by_method.items():
        find_method(name)  # raises UserError if there is no such method
        if not isinstance(own, dict):
            raise UserError(f'--settings {path}: {name} = {own!r}; expected a section, as in ["{name}"] and lr = 1e-3')
    return by_method

"""`vqprompt search`: finds settings on held-out training images, with the same number of trials for every method."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from vqprompt.commands import bench
from vqprompt.commands.console import console, print_plain, print_warning, text_table
from vqprompt.commands.options import Track, argument, option
from vqprompt.commands.run import parse_tasks
from vqprompt.core.errors import UserError
from vqprompt.core.files import lock_folder


def search(
    methods: str = argument("One method, several (vq-prompt,coda-p), or `all` that declare ranges.", metavar="METHOD"),
    out: Path = option("Folder for the trials. Each is a run in OUT/METHOD/seedN/trialN.", ...),
    data: str = option("A data set of `vqprompt datasets`, NAME or NAME=PATH, or your own images.", ...),
    trials: int = option("Trials per method. To search on, give the same command with more.", 20, min=1),
    validation: float | None = option("The share of the training images to hold out and test on. Default: 0.2."),
    tasks: str | None = option("Number of tasks, or number of classes per task: 10, or 20,10,10."),
    backbone: str | None = option("A name from `vqprompt backbones`, or a file with weights."),
    seed: int = option("Fixes the trials, the order of the classes and everything random.", 1, min=0),
    assignments: list[str] | None = option("A setting of every run, such as --set size=224.", None, "--set"),
    settings: Path | None = option(
        "Where to start: a TOML or JSON file with one section per method, as for `bench run`. The first trial has "
        "these settings, and ranges are searched near them."
    ),
    ranges: list[str] | None = option(
        "Where to look, instead of the method's own range: --range lr=1e-4:0.1, --range rebalancing.lr=1e-5:1e-2.",
        None,
        "--range",
    ),
    round: int = option("Trials of a method that are chosen together, and can run at the same time.", 4, min=1),
    workers: int | None = bench.WORKERS,
    on: str = bench.ON,
    cpus: int | None = bench.CPUS,
    gpus: float | None = bench.GPUS,
    track: Track = None,
) -> None:
    """Find good settings, on training images that are held out. The test images are not used.

    [bold]vqprompt search vq-prompt,coda-p --data cub200 --backbone vit-s14 --trials 20 --out search[/bold]

    Every method declares ranges, such as that of its learning rate; Optuna chooses values from them. The best ones are
    written to OUT/settings.toml, all trials to OUT/search.html. Use them with
    [bold]vqprompt bench run cub200 --settings search/settings.toml --out bench[/bold]

    To continue an interrupted search, give the same command again. The same seed gives the same trials.
    """
    from vqprompt.research.methods import METHODS
    from vqprompt.research.paper.execution import find_executor
    from vqprompt.research.paper.grids import Run
    from vqprompt.research.paper.search import PAGE, SETTINGS, Search, write_findings

    executor = find_executor(on, workers, cpus, gpus)
    direct = {"tasks": parse_tasks(tasks), "validation": validation, "seed": seed}
    changes, start = bench.read_changes(assignments or [], data, backbone, settings)
    given: dict[str, Any] = {"validation": 0.2, **changes}
    given |= {key: value for key, value in direct.items() if value is not None}
    limits = dict(map(parse_range, ranges or []))
    names = [m for m in bench.chosen_methods(methods) if methods != "all" or limits or METHODS[m].search_space]
    searches = [Search(out, name, given, start.get(name, {}), limits, trials, round) for name in names]
    bench.refuse_early([Run(search.method, search.config) for search in searches], out, track or ())

    def next_round(failed: Collection[str] = ()) -> list[Run]:
        return [run for search in searches for run in search.next_round(failed)]

    with lock_folder(out):
        todo, total = next_round(), sum(search.left for search in searches)
        failed = bench.run_with_bars(todo, out, executor, track or (), next_round, total)
        successful = write_findings(searches, out)
    console.print(text_table(("method", "best"), [(each.title, str(each)) for each in successful]))
    for each in successful:
        for warning in each.warnings:
            print_warning(warning)
    print_plain(f"\nwrote {out / SETTINGS}, for `vqprompt bench run --settings`")
    print_plain(f"Look at {out / PAGE}", style="bold")
    bench.report_failures(
        failed, total, "a trial that fails counts, and if all of a round fail, the same command tries them again"
    )


def parse_range(text: str) -> tuple[str, tuple[float, float]]:
    key, _, limits = text.partition("=")
    try:
        low, high = map(float, limits.split(":"))
    except ValueError:
        low, high = 0.0, 0.0
    if not key or not low < high:
        raise UserError(f"--range {text}: expected a setting, and its lowest and highest value, as in lr=1e-4:0.1")
    return key, (low, high)

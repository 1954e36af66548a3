"""`vqprompt run` and `vqprompt demo`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from vqprompt.commands.console import console, print_plain, print_warning, running, text_table
from vqprompt.commands.interrupted import report_interruption
from vqprompt.commands.options import DEVICE, Device, Track, flag, numbers, option
from vqprompt.commands.progress_bar import progress_bar
from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress
from vqprompt.core.runtime.lifelines import LAUNCHED, LOST_STATUS, started_together

if TYPE_CHECKING:
    from vqprompt.research.results.result import RunResult

DEMO: dict[str, Any] = {
    "data": "quickdraw50", "tasks": 10, "train_per_class": 24, "test_per_class": 8, "size": 56,
}  # fmt: skip
DEMO_METHODS: dict[str, dict[str, Any]] = {"vq-prompt": {"epochs": 2}, "ft": {"epochs": 1, "lr": 1e-5}}


def demo(
    out: Path = option("Folder for the results. Each method gets a folder inside it.", Path("demo")),
    seed: int = option("Fixes the order of the classes and everything random.", 1),
    device: Device = "auto",
    resume: bool = flag("--resume", "Continue a demo that was interrupted."),
) -> None:
    """See how a model forgets, and how VQ-Prompt prevents it, in less than two minutes on a laptop.

    Learns 50 classes of Quick Draw drawings in 10 tasks of 5, with the embedded ViT-S/14: once with VQ-Prompt, once
    with plain fine-tuning (FT), which forgets. Prints a table and writes OUT/report.html.
    """
    print_plain("50 classes of drawings in 10 tasks of 5: first with VQ-Prompt, then with plain fine-tuning (FT)")
    from vqprompt.research.methods import METHODS  # slow to import
    from vqprompt.research.report.pages import write_comparison
    from vqprompt.research.results.config import resolve
    from vqprompt.research.runs import runner

    results = {}
    for method, settings in DEMO_METHODS.items():
        config = resolve({**DEMO, **settings, "method": method, "seed": seed, "device": device})
        with progress_bar(console, METHODS[method].title) as progress:
            result = results[method] = runner.run(config, out / method, resume, progress)
        print_plain(f"{result.title}: {result.faa:.1f} % right after 10 tasks ({result.seconds:.0f} s)")
    page = write_comparison([out / method for method in results], out / "report.html")
    console.print()
    console.print(summary(list(results.values())))
    print_plain(
        "\nFAA: accuracy over all 50 classes at the end; forgetting: points lost since each task was at its best."
    )
    print_plain(f"Look at {page}", style="bold")


def run(
    context: typer.Context,
    out: Path = option("The run's folder. Config, metrics, checkpoint and report are written there.", ...),
    data: str | None = option(
        "What to learn (quickdraw50). A data set of `vqprompt datasets`: NAME, or NAME=PATH where you have it. "
        "Or your own images: a folder or zip with train/<class>/… and test/<class>/…, or just <class>/…."
    ),
    tasks: str | None = option("Number of tasks, or number of classes per task: 10, or 20,10,10."),
    stream: str | None = option(
        "disjoint: classes of their own per task. domains: the same in other styles. blurry:50,10: half of the classes "
        "are in one task, 10 % of the others' images are elsewhere. repeated:30: 30 % come later. few-shot:30,5,5: 30 "
        "classes, then 5 with 5 images. FILE.json: images per task. +online:100 shows all once, tests every 100."
    ),
    method: str | None = option("How to learn (vq-prompt); `vqprompt methods` lists the names."),
    backbone: str | None = option("A name from `vqprompt backbones`, or a file with weights."),
    seed: int | None = option("Fixes the order of the classes and everything random. 0 keeps the natural class order."),
    size: int | None = option("Image size in pixels, a multiple of the backbone's patch size."),
    epochs: int | None = option("Epochs per task."),
    batch_size: int | None = option("Images per training step."),
    device: str | None = option(DEVICE),
    validation: float | None = option("Hold out this share of the training images and test on it, to tune settings."),
    preset: str | None = option("Named settings of a method, such as `released`; see `vqprompt methods NAME`."),
    config: Path | None = option("JSON or TOML file with settings; the config.json of another run works."),
    assignments: list[str] | None = option(
        "Any setting of the run or of the method: --set tau=5 --set rebalancing.lr=1e-4.", None, "--set"
    ),
    resume: bool = flag("--resume", "Continue the run in OUT from its last checkpoint."),
    track: Track = None,
    processes: int | None = option(
        "Processes that share the work: one per GPU, or parts of the CPU. With several machines, start the command "
        "with torchrun instead.",
        min=1,
    ),
) -> None:
    """Learn a data set task by task, test after each task, write a report.

    If a setting is given twice, this order decides: options such as --epochs, then --set, --preset, --config, and last
    the defaults of the method and of the data set.

    [bold]vqprompt run --data birds/ --tasks 10 --out runs/birds[/bold]
    """
    from vqprompt.core.runtime.device import Runtime
    from vqprompt.core.runtime.distributed import join
    from vqprompt.research.results.config import FILE, RunConfig, parse_assignment, read_config_file, resolve
    from vqprompt.research.runs import runner

    file = config or (out / FILE if resume and (out / FILE).exists() else None)
    given = dict(parse_assignment(text) for text in assignments or [])
    direct = {**context.params, "tasks": parse_tasks(tasks)}  # options that have the name of a setting set it
    given |= {key: value for key, value in direct.items() if key in RunConfig.model_fields and value is not None}

    def settle() -> RunConfig:
        return resolve(given, preset, read_config_file(file) if file else None)

    if (processes or 1) > 1 and started_together() == 1:
        settle()  # refuse what cannot work before anything is started
        launch(processes or 1)
        return
    if processes not in (None, started_together()):
        raise UserError(f"--processes {processes}, but {started_together()} were started; leave this option out")
    ranks = join(report_interruption)
    resolved = ranks.from_first(settle)
    running.quiet |= not ranks.first
    if tasks and ranks.first and not resolved.kind.divides:
        print_warning(f"--tasks {tasks} changes nothing: --stream {resolved.stream} says which tasks there are")
    names = ["data", "method", "backbone", "size", "epochs", "stream", *["tasks"] * resolved.kind.divides]
    says = [", ".join(f"{name} {getattr(resolved, name)}" for name in names)]
    runtime = Runtime.pick(resolved.device, resolved.precision, resolved.compile, resolved.deterministic)

    def report(event: Progress) -> None:
        if says and not running.quiet:  # with the first event, because the data set is there then
            print(f"{says.pop()}, device {runtime.device}", file=sys.stderr, flush=True)
        progress(event)

    with progress_bar(console) as progress:
        result = runner.run(resolved, out, resume, report, track=track or ())
    ranks.leave()
    if not ranks.first:
        return
    for note in result.notes:
        print_plain(f"note: {note}", style="yellow")
    console.print(summary([result]))
    print_plain(", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in result.measures.items()))
    if resolved.validation:
        print_plain(f"Tested on {resolved.validation:.0%} of the training images, held out; not on the test images.")
    print_plain(f"\nLook at {out / 'report.html'}", style="bold")


def parse_tasks(text: str | None) -> int | list[int] | None:
    sizes = numbers(text, "--tasks", "a number, or numbers of classes such as 20,10,10") if text is not None else []
    return sizes if len(sizes) > 1 else sizes[0] if sizes else None


def summary(results: Sequence[RunResult]) -> Table:
    """One row per run."""
    measures = ("FAA %", "CAA %", "forgetting", "seconds", "images/s", "prompting params")
    rows = [
        (
            r.title, f"{r.faa:.2f}", f"{r.caa:.2f}", f"{r.forgetting:.2f}", f"{r.seconds:.1f}",
            "–" if r.images_per_second is None else f"{r.images_per_second:.0f}", f"{r.parameters.prompting:,}",
        )
        for r in results
    ]  # fmt: skip
    return text_table(("method", *measures), rows, measures)


def launch(count: int) -> None:
    """Start this command `count` times on this machine and wait for the end. Ends with their exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # we print our own messages
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch prints C++ stacks about lost connections
    os.environ[LAUNCHED] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "vqprompt", *sys.argv[1:])
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        report_interruption(f"ended by {error.sigval.name}")
        raise typer.Exit(128 + error.sigval) from None
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise typer.Exit(explain_statuses(statuses, count)) from None


def explain_statuses(statuses: dict[int, int], count: int) -> int:
    """Say which process was killed, if one was, and return the exit status of the run. A process that ended by itself
    has printed its own message. statuses: exit status by rank; negative: the signal that killed the process."""
    because_of_others = (LOST_STATUS, 128 + signal.SIGTERM)  # it ended only because another process had ended
    explained = [status for status in statuses.values() if status > 0 and status not in because_of_others]
    if explained:
        return max(explained)
    killed = {rank: signal.Signals(-status).name for rank, status in statuses.items() if status < 0}
    reason = "a process ended"
    if killed:
        rank, name = next(iter(killed.items()))
        reason = f"process {rank + 1} of {count} was killed ({name})"
    report_interruption(f"{reason}, so the others have stopped")
    return 1

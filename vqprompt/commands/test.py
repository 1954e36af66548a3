"""`vqprompt test`: how good a model is, on images whose classes are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vqprompt.commands.console import print_error, print_json, print_note, print_plain
from vqprompt.commands.options import Device, Json, ModelPath
from vqprompt.commands.teaching_words import percent, progress_shown
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.evaluation.measure import Evaluation


def test(
    model: ModelPath,
    folder: Annotated[Path, typer.Argument(help="Images it has not learned: one folder per class, a zip, or a table.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write test.html, test.json, images.csv and classes.csv."),
    ] = None,
    before: Annotated[bool, typer.Option("--before", help="Compare with the model before its last teaching.")] = False,
    known_only: Annotated[
        bool, typer.Option("--known-only", help="Refuse images of classes that the model does not know.")
    ] = False,
    unknown: Annotated[bool, typer.Option("--unknown/--no-unknown", help="Whether it may answer unknown.")] = True,
    strictness: Annotated[float, typer.Option(help="Above 0, more images are called unknown; below 0, fewer.")] = 0.0,
    at_least: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="End with status 1 if fewer answers are right (every class counts the same).",
        ),
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="Where the model's weights file is now.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Test a model with images it has not learned, class by class, and write a page that is easy to understand.

    [bold]vqprompt test garden.vqp new-photos/[/bold]
    """
    from vqprompt.core.files import write_atomically
    from vqprompt.product.evaluation.measure import evaluate
    from vqprompt.product.evaluation.page import classes_csv, images_csv, write_page
    from vqprompt.product.model.model import Model

    asked = Model.load(model, device=device, backbone=backbone)
    earlier = None
    if before:
        earlier = Model.load(model, device=device, backbone=backbone)
        earlier.undo()
        if not earlier.classes:
            raise UserError(f"{model}: before its last teaching this model knew nothing; leave out --before")
    with progress_shown() as progress:
        report = evaluate(
            asked, folder, before=earlier, refuse_unknown_classes=known_only, unknown=unknown, strictness=strictness,
            progress=progress,
        )  # fmt: skip
    place = out or Path()
    page = write_page(report, place / "test.html", model.name, str(folder), asked.accuracy)
    summary = {"model": str(model), "folder": str(folder), "expected": asked.accuracy, **report.to_json()}
    write_atomically(place / "test.json", json.dumps(summary, ensure_ascii=False, indent=2) + "\n")
    write_atomically(place / "images.csv", images_csv(report))
    write_atomically(place / "classes.csv", classes_csv(report))
    if as_json:
        print_json(summary)
    else:
        _tell(report, page)
    if at_least is not None and (report.balanced_accuracy or 0) < at_least:
        print_error(f"{percent(report.balanced_accuracy)} are right, which is less than --at-least {at_least:.1%}")
        raise typer.Exit(1)


def _tell(report: Evaluation, page: Path) -> None:
    for note in report.notes:
        print_note(note)
    for message in report.unreadable[:10]:
        print_plain(f"left out: {message}")
    low, high = report.balanced_accuracy_interval
    before_that = report.balanced_accuracy_before
    was = "" if before_that is None else f"; before the last teaching {percent(before_that)}"
    if report.images:
        print_plain(
            f"right, every class weighted equally: {percent(report.balanced_accuracy)} "
            f"({percent(low)} to {percent(high)}){was}"
        )
        right = report.accuracy
        print_plain(f"right, every image weighted equally: {percent(right.value)} ({right.hits} of {right.total})")
        print_plain(f"called unknown: {report.called_unknown.hits} of {report.called_unknown.total}")
    if report.others:
        s = report.others_refused
        print_plain(f"images of classes that it does not know: {s.hits} of {s.total} called unknown")
    for c in sorted((c for c in report.per_class if c.recall.total), key=lambda c: c.recall.value or 0)[:5]:
        if c.recall.hits < c.recall.total:
            print_plain(f"  {c.name}: {c.recall.hits} of {c.recall.total} recognized")
    for label, answer, times in report.confused_pairs()[:3]:
        print_plain(f"  {label} was taken for {answer} {counted(times, 'time')}")
    print_plain(f"look at {page}")

"""`vqprompt test`: how good a model is, on images whose classes are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vqprompt.commands.console import print_error, print_json, print_note, print_plain
from vqprompt.commands.options import ClassFolders, Device, Json, ModelPath, argument, flag, option
from vqprompt.commands.progress_bar import progress_bar
from vqprompt.commands.teaching_words import percent
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.evaluation.measure import Evaluation


def test(
    model: ModelPath,
    folder: Path = argument("Images it has not learned: one folder per class, a zip, or a table."),
    out: Path = option("Where to write test.html, test.json, images.csv and classes.csv.", Path(), metavar="FOLDER"),
    classes: ClassFolders = None,
    before: bool = flag("--before", "Compare with the model before its last teaching."),
    known_only: bool = flag("--known-only", "Refuse images of classes that the model does not know."),
    unknown: bool = option("Whether it may answer unknown.", True),
    strictness: float = option("Above 0, more images are called unknown; below 0, fewer.", 0.0),
    at_least: float | None = option(
        "End with status 1 if fewer answers are right (every class counts the same).", metavar="SHARE", min=0, max=1
    ),
    backbone: str | None = option("Where the model's weights file is now."),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Test a model with images it has not learned, class by class, and write a page that is easy to understand.

    [bold]vqprompt test garden.vqp new-photos/[/bold]
    """
    from vqprompt.core.files import check_writable, write_atomically
    from vqprompt.product.evaluation.measure import evaluate
    from vqprompt.product.evaluation.page import classes_csv, images_csv, write_page
    from vqprompt.product.model.model import Model

    check_writable(out)
    asked = Model.load(model, device=device, backbone=backbone)
    earlier = None
    if before:
        earlier = Model.load(model, device=device, backbone=backbone)
        earlier.undo()
        if not earlier.classes:
            raise UserError(f"{model}: before its last teaching this model knew nothing; leave out --before")
    with progress_bar() as progress:
        report = evaluate(
            asked, folder, classes=classes or "", before=earlier, refuse_unknown_classes=known_only, unknown=unknown,
            strictness=strictness, progress=progress,
        )  # fmt: skip
    page = write_page(report, out / "test.html", model.name, str(folder), asked.accuracy)
    summary = {"model": str(model), "folder": str(folder), "expected": asked.accuracy, **report.to_json()}
    write_atomically(out / "test.json", json.dumps(summary, ensure_ascii=False, indent=2) + "\n")
    write_atomically(out / "images.csv", images_csv(report))
    write_atomically(out / "classes.csv", classes_csv(report))
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
    before_that, sure = report.balanced_accuracy_before, report.balanced_accuracy_interval
    was = "" if before_that is None else f"; before the last teaching {percent(before_that)}"
    if report.images:
        print_plain(f"right, every class weighted equally: {percent(report.balanced_accuracy, sure)}{was}")
        right = report.accuracy
        print_plain(f"right, every image weighted equally: {percent(right.value)} ({right.hits} of {right.total})")
        strange, named = report.called_unknown, percent(report.without_unknown.value)
        instead = f" (without this answer, {named} would be right)" if strange.hits else ""
        print_plain(f"called unknown: {strange.hits} of {strange.total}{instead}")
    if report.others:
        s = report.others_refused
        print_plain(f"images of classes that it does not know: {s.hits} of {s.total} called unknown")
    for c in sorted((c for c in report.per_class if c.recall.total), key=lambda c: c.recall.value or 0)[:5]:
        if c.recall.hits < c.recall.total:
            print_plain(f"  {c.name}: {c.recall.hits} of {c.recall.total} recognized")
    for label, answer, times in report.confused_pairs()[:3]:
        print_plain(f"  {label} was taken for {answer} {counted(times, 'time')}")
    print_plain(f"look at {page}")

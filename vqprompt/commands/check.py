"""`vqprompt check`: what is doubtful in a folder of images, before it is taught."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vqprompt.commands.console import print_json, print_note, print_plain
from vqprompt.commands.options import ClassFolders, Device, Json, argument, flag, option
from vqprompt.commands.progress_bar import progress_bar
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.check.findings import CheckResult


def check(
    folder: Path = argument("Images as for `vqprompt learn`: a folder or zip with one folder per class, or a table."),
    classes: ClassFolders = None,
    model: Path | None = option("A model that these images are for; what it knows helps to judge.", metavar="FILE"),
    test: Path | None = option("Test images, which must not be among these; FOLDER/test by default.", metavar="FOLDER"),
    out: Path = option("Where to write check.html and exclude.txt.", Path(), metavar="FOLDER"),
    size: int | None = option("Image size in px, without a model."),
    backbone: str | None = option("See `vqprompt backbones`, or a weights file."),
    device: Device = "auto",
    strict: bool = flag("--strict", "End with status 1 if an image is doubtful, such as in CI."),
    as_json: Json = False,
) -> None:
    """Look for doubtful images before teaching: copies, wrong labels, outliers, unreadable ones. Nothing is deleted.

    [bold]vqprompt check birds/[/bold], look at check.html, then [bold]vqprompt learn garden.vqp birds/ --exclude
    exclude.txt[/bold]
    """
    from vqprompt.core.files import check_writable
    from vqprompt.product.check.check import check as look_through
    from vqprompt.product.check.findings import write_list, write_page
    from vqprompt.product.model.model import Model

    check_writable(out)
    known = None if model is None else Model.load(model, device=device, backbone=backbone)
    with progress_bar() as progress:
        report = look_through(
            folder, classes=classes or "", test=test, model=known, backbone=backbone or "vit-s14", size=size,
            device=device, progress=progress,
        )  # fmt: skip
    listed = write_list(report, out / "exclude.txt")
    page = write_page(report, out / "check.html", str(folder), listed)
    if as_json:
        print_json({**report.to_json(), "page": str(page), "list": str(listed)}, indent=2)
    else:
        _tell(report, page, listed)
    if strict and report.doubtful:
        raise typer.Exit(1)


def _tell(report: CheckResult, page: Path, listed: Path) -> None:
    for note in report.notes:
        print_note(note)
    for f in report.findings:
        print_plain(f"{f.where}: {f.kind}: {f.says}")
    for one, other, share in report.alike:
        print_plain(f"classes {one} and {other} look alike: {share:.0%} of their images are taken for the other")
    for name, count in report.few:
        print_plain(f"class {name} has only {counted(count, 'image')}")
    found = f"doubtful: {report.doubtful} of" if report.doubtful else "nothing doubtful in"
    print_plain(f"{found} {counted(report.images, 'image')}")
    print_plain(f"look at {page}; {listed} names {counted(len(report.left_out), 'image')} for vqprompt learn --exclude")

"""The commands of the living model: learn, show, rename, forget, undo, cache; and `predict` for a model file.

A model is one file. Every command reads it, changes it under a lock, and replaces it in one step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vqprompt.errors import UserError

if TYPE_CHECKING:
    from vqprompt.model.model import Model, Plan, Taught
    from vqprompt.progress import Progress, Report

SECONDS_BETWEEN_LINES = 5.0  # of progress, into a file or pipe

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's file, such as garden.vqp.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs to read.")]


def learn(
    model: ModelPath,
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Folders (or zips) with one folder per class, or CSV/JSONL tables of path and label; with --as, image "
            "files or folders of one class."
        ),
    ],
    label: Annotated[
        str | None, typer.Option("--as", metavar="CLASS", help="All these images are of this class.")
    ] = None,
    effort: Annotated[
        str, typer.Option(help="instant: seconds, exact. good: trains prompts. best: trains the network, slowly.")
    ] = "instant",
    hold_out: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="0 does not measure accuracy (and holds nothing back at other efforts)."),
    ] = 0.2,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Go on without images that cannot be read.")
    ] = False,
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A list of images not to learn, one path per line.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Image size in px, for a new model.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="See `vqprompt backbones`, or a weights file; for a new model.")
    ] = None,
    device: Device = "auto",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep nothing of the images on disk.")] = False,
    as_json: Json = False,
) -> None:
    """Teach a model: make it, or add to it. New classes join, known ones get better; no image is kept.

    [bold]vqprompt learn garden.vqp birds/[/bold]
    """
    from vqprompt.check.quick import noticed
    from vqprompt.model import file as files
    from vqprompt.model.efforts import check_effort
    from vqprompt.model.model import Model

    check_effort(effort)
    with files.locked(model):
        if model.exists():
            taught = Model.load(model, device=device, backbone=backbone)
            _check_size(model, taught, size)
        else:
            taught = Model(backbone or "vit-s14", size=size, device=device)
        with _progress() as progress:
            found = taught.learn(
                images if len(images) > 1 else images[0], label, effort=effort, hold_out=hold_out,
                skip_broken=skip_broken, exclude=_listed(exclude), announce=_announce, progress=progress,
            )  # fmt: skip
        if found.images:
            taught.save(model, locked=True)
    line = noticed(taught._content.classes, {*found.new_classes, *found.grown_classes})
    if as_json:
        print(json.dumps({**_as_dict(found), "noticed": line}, ensure_ascii=False))
    else:
        _tell(found, taught, model, line)


def show(model: ModelPath, as_json: Json = False) -> None:
    """What a model knows: classes, images, accuracy, history, size.

    [bold]vqprompt show garden.vqp[/bold]
    """
    from vqprompt.model.model import Model

    found = Model.load(model).show()
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    from rich.table import Table

    console = _console()
    table = Table(show_edge=False, header_style="bold")
    for heading in ("class", "images", "recognized", "kinds", "last taught"):
        table.add_column(heading, justify="left" if heading in ("class", "last taught") else "right")
    for c in found["classes"]:
        table.add_row(
            _plain(c["name"]), str(c["images"]), _percent(c["accuracy"]), str(c["kinds"]),
            c["taught"][-1][:10] if c["taught"] else "",
        )  # fmt: skip
    console.print(table)
    b = found["backbone"]
    lines = [
        "",
        f"{len(found['classes'])} classes, {found['images']} images",
        f"accuracy {_percent(found['accuracy'])} on images it had not learned (each left out in turn)",
        f"percentages are off by {_percent((found['calibration_error'] or [None])[-1])} on average",
        f"backbone {b['name']}, {b['size']} px; file {found['bytes'] / 1e6:.1f} MB; {found['can_undo']} steps to undo",
        "",
    ]
    for event in found["history"]:
        what = f"{event['what']} {event.get('detail', '')}".strip()
        if "images" in event:
            what = f"learned {event['images']} images of {len(event['classes'])} classes"
        lines.append(f"{event['date'].replace('T', ' ')[:16]}  {what}")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def rename(
    model: ModelPath,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A class of the model.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
) -> None:
    """Give a class another name.

    [bold]vqprompt rename garden.vqp kestrel falcon[/bold]
    """
    with _changing(model) as changed:
        changed.rename(old, new)
    _say(f"{old} is now called {new}")


def forget(
    model: ModelPath,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="A class of the model.")],
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Also from the versions that undo could bring back; they all go.")
    ] = False,
) -> None:
    """Take a class away, as if it had never been learned.

    [bold]vqprompt forget garden.vqp heron[/bold]
    """
    with _changing(model) as changed:
        changed.forget(name, for_good=for_good)
        left, accuracy = len(changed.classes), changed.accuracy
    _say(f"{name} is forgotten; {left} classes are left, accuracy {_percent(accuracy)}")


def undo(model: ModelPath) -> None:
    """Go back to the model before the last change.

    [bold]vqprompt undo garden.vqp[/bold]
    """
    with _changing(model) as changed:
        what = changed.undo()
        left = len(changed.classes)
    _say(f"undone: {what}; the model has {left} classes now")


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete it.")] = False,
) -> None:
    """What is kept of images on disk (by `run` and by efforts good and best; instant teaching keeps nothing).

    [bold]vqprompt cache --clear[/bold]
    """
    import shutil

    from vqprompt.files import cache_folder

    folder = cache_folder()
    total = 0
    for name, what in (("images", "decoded images"), ("queries", "features"), ("unpacked", "unpacked archives")):
        place = folder / name
        sizes = [f.stat().st_size for f in place.rglob("*") if f.is_file()] if place.is_dir() else []
        total += sum(sizes)
        _say(f"{what:18} {len(sizes):6} files {sum(sizes) / 1e6:10.1f} MB  {place}")
        if clear and place.is_dir():
            shutil.rmtree(place)
    if clear:
        _say(f"deleted {total / 1e6:.1f} MB")
    elif total:
        _say("vqprompt cache --clear deletes it; it is made again when it is needed")


def predict_with_model(
    model: Path, images: list[Path], top: int, as_json: bool, backbone: str | None, device: str,
    unknown: bool = True, strictness: float = 0.0,
) -> None:  # fmt: skip
    """`vqprompt predict` for a model file."""
    from vqprompt.model.model import Model

    asked = Model.load(model, device=device, backbone=backbone)
    files = [file for path in images for file in _image_files(path)]
    bad = []
    for start in range(0, len(files), 64):
        part = files[start : start + 64]
        for file, found in zip(
            part, asked.try_answers(part, top=top, unknown=unknown, strictness=strictness), strict=True
        ):
            if isinstance(found, Exception):
                bad.append(str(found))
            elif as_json:
                print(
                    json.dumps(
                        {"image": str(file), "class": found.name, "classes": dict(found.classes)}, ensure_ascii=False
                    ),
                    flush=True,
                )
            else:
                named = ", ".join(f"{name} {share:.0%}" for name, share in found.classes)
                _say(f"{file}: unknown (nearest: {named})" if found.name == "unknown" else f"{file}: {named}")
    if bad:
        raise UserError("\n  ".join([f"{len(bad)} of {len(files)} images cannot be used:", *bad]))


# ---------------------------------------------------------------------------------------------- helpers


@contextmanager
def _changing(path: Path) -> Iterator[Model]:
    from vqprompt.model import file as files
    from vqprompt.model.model import Model

    with files.locked(path):
        model = Model.load(path)
        yield model
        model.save(path, locked=True)


def _image_files(path: Path) -> list[Path]:
    from vqprompt.data.decode import IMAGE_SUFFIXES
    from vqprompt.data.source import hidden

    if not path.is_dir():
        return [path]
    found = sorted(
        f for f in path.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES and not hidden(f.relative_to(path).as_posix())
    )
    if not found:
        raise UserError(
            f"{path}: no image in this folder; give image files, or folders of {' '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return found


def _check_size(path: Path, model: Model, size: int | None) -> None:
    known = model.show()["backbone"]["size"]
    if size is not None and size != known:
        raise UserError(
            f"{path}: this model looks at images of {known} px, and --size {size} is for new models; leave it out, "
            "or make another model"
        )


def _listed(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--exclude {path}: cannot be read ({error})") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _announce(plan: Plan) -> None:
    new = f", {len(plan.new_classes)} of them new" if plan.new_classes else ""
    text = f"{plan.images} images of {plan.classes} classes{new}: about {_duration(plan.seconds)}"
    print(text, file=sys.stderr, flush=True)


def _tell(found: Taught, model: Model, path: Path, noticed: str | None) -> None:
    for note in found.notes:
        _say(f"note: {note}")
    if found.known_images:
        _say(f"note: {found.known_images} images were known already and are not counted twice")
    if found.copies:
        _say(f"note: {found.copies} images were there more than once and are counted once")
    for message in found.broken[:10]:
        _say(f"left out: {message}")
    if len(found.broken) > 10:
        _say(f"left out: … and {len(found.broken) - 10} more")
    if not found.images:
        _say("nothing was learned; the model is as it was")
        return
    grown = f", {len(found.grown_classes)} known ones got more" if found.grown_classes else ""
    _say(
        f"learned {found.images} images in {_duration(found.seconds)}: {len(found.new_classes)} new classes{grown}; "
        f"{path} knows {len(model.classes)} classes"
    )
    if found.accuracy is not None:
        before = f" (before: {_percent(found.accuracy_before)})" if found.accuracy_before is not None else ""
        _say(f"accuracy now: {_percent(found.accuracy)} on images it has not learned{before}")
    for name, was, now in found.suffering[:5]:
        _say(f"  {name} suffers: {_percent(was)} → {_percent(now)}")
    if noticed is not None:
        _say(f"note: {noticed}")


def _as_dict(found: Taught) -> dict[str, Any]:
    return {
        "images": found.images, "new_classes": found.new_classes, "grown_classes": found.grown_classes,
        "known_images": found.known_images, "copies": found.copies, "broken": found.broken, "accuracy": found.accuracy,
        "accuracy_before": found.accuracy_before,
        "suffering": [{"class": n, "before": b, "now": a} for n, b, a in found.suffering], "notes": found.notes,
        "seconds": round(found.seconds, 2),
    }  # fmt: skip


@contextmanager
def _progress() -> Iterator[Report]:
    """A live bar in a terminal; lines with the remaining time in a file or pipe. All of it on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as LiveBar

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with LiveBar(*columns, console=console, transient=True) as bar:
            line = bar.add_task("starting", total=None)

            def live(event: Progress) -> None:
                bar.update(
                    line, completed=event.done, total=event.total or None, description=event.detail or str(event.stage)
                )

            yield live
        return
    started: dict[str, float] = {}
    last = 0.0

    def lines(event: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        begun = started.setdefault(event.stage, now)
        first = begun == now
        if event.done < event.total and (now - last < SECONDS_BETWEEN_LINES or first):
            if first:
                last = now
            return
        if event.done >= event.total and now - begun < SECONDS_BETWEEN_LINES:
            return
        last = now
        remaining = (now - begun) / max(event.done, 1) * (event.total - event.done)
        what = event.detail or str(event.stage)
        print(
            f"{what}: {event.done:.0f} of {event.total:.0f}, {_duration(now - begun)} so far, "
            f"{_duration(remaining)} remaining", file=sys.stderr, flush=True,
        )  # fmt: skip

    yield lines


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _console() -> Any:
    from rich.console import Console

    return Console()


def _say(text: str) -> None:
    _console().print(text, markup=False, highlight=False, soft_wrap=True)

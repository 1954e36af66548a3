"""The commands of the living model: learn, show, rename, forget, undo, cache; and `predict` for a model file.

A model is one file. Every command reads it, changes it under a lock, and replaces it in one step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vqprompt.commands.teaching_words import (
    announce,
    as_dict,
    percent,
    plain,
    progress_shown,
    say,
    tell,
    wide_console,
)
from vqprompt.errors import UserError

if TYPE_CHECKING:
    from vqprompt.model.model import Model

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
        str,
        typer.Option(
            help="instant: seconds, and exact. good: also trains prompts, minutes to hours on a CPU. best: tunes the "
            "network instead. How long it will take is said first; later teachings may be at this effort or at instant."
        ),
    ] = "instant",
    hold_out: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.9,
            help="0 does not measure accuracy. At good and best, this share of the images is not "
            "trained on, to measure with.",
        ),
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
    on: Annotated[
        str,
        typer.Option(
            help="Where to look at the images: local, ray (the cluster that this machine is part of) or ray=HOST:PORT. "
            "The model is the same, to the bit, if the processors are alike."
        ),
    ] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="With --on ray: at most so many at a time.")] = None,
    gpus: Annotated[float | None, typer.Option(help="With --on ray: GPUs per worker, such as 1 or 0.25.")] = None,
    seed: Annotated[int, typer.Option(help="Of the training at good and best; the same seed gives the same bits.")] = 0,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            help="Put nothing of the images on disk. Without this, more than 128 MB of decoded images lie "
            "in a temporary file in the cache folder while learning; nothing is kept afterwards either way.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Teach a model: make it, or add to it. New classes join, known ones get better; no image is kept.

    [bold]vqprompt learn garden.vqp birds/[/bold]
    """
    from vqprompt.check.quick import noticed
    from vqprompt.model import file as files
    from vqprompt.model.efforts import check_effort
    from vqprompt.model.model import Model
    from vqprompt.model.on_ray import classroom, parse_place

    check_effort(effort)
    place, source = parse_place(on, gpus, workers), images if len(images) > 1 else images[0]
    if place is not None and label is not None:
        raise UserError("--on ray takes the classes from folders or shards; leave out --as, or --on")
    with files.locked(model):
        if model.exists():
            taught = Model.load(model, device=device, backbone=backbone)
            _check_size(model, taught, size)
        else:
            taught = Model(backbone or "vit-s14", size=size, device=device)
        elsewhere = nullcontext() if place is None else classroom(place, source, taught.backbone)
        with elsewhere as where, progress_shown() as progress:
            found = taught.learn(
                source, label, effort=effort, hold_out=hold_out, skip_broken=skip_broken, exclude=_listed(exclude),
                seed=seed, on_disk=not no_cache, announce=announce, progress=progress, where=where,
            )  # fmt: skip
        if found.images:
            taught.save(model, locked=True)
    line = noticed(taught._content.classes, {*found.new_classes, *found.grown_classes})
    if as_json:
        print(json.dumps({**as_dict(found), "noticed": line}, ensure_ascii=False))
    else:
        tell(found, taught, model, line)


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

    console = wide_console()
    table = Table(show_edge=False, header_style="bold")
    for heading in ("class", "images", "recognized", "kinds", "last taught"):
        table.add_column(heading, justify="left" if heading in ("class", "last taught") else "right")
    for c in found["classes"]:
        table.add_row(
            plain(c["name"]), str(c["images"]), percent(c["accuracy"]), str(c["kinds"]),
            c["taught"][-1][:10] if c["taught"] else "",
        )  # fmt: skip
    console.print(table)
    b = found["backbone"]
    trained = {
        "instant": "instant (nothing is trained)",
        "good": "good (prompts are trained)",
        "best": "best (the network is tuned)",
    }
    moved = (
        f"; of {len(found['moved'])} classes the memory moved along, so theirs is an estimate" if found["moved"] else ""
    )
    lines = [
        "",
        f"{len(found['classes'])} classes, {found['images']} images; effort {trained[found['effort']]}",
        f"accuracy {percent(found['accuracy'])} on images it had not learned{moved}",
        f"percentages are off by {percent((found['calibration_error'] or [None])[-1])} on average",
        f"backbone {b['name']}, {b['size']} px; file {found['bytes'] / 1e6:.1f} MB; {found['can_undo']} steps to undo",
        "",
    ]
    for event in found["history"]:
        what = f"{event['what']} {event.get('detail', '')}".strip()
        if "images" in event:
            effort = f" at effort {event['effort']}" if "effort" in event else ""
            what = f"learned {event['images']} images of {len(event['classes'])} classes{effort}"
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
    say(f"{old} is now called {new}")


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
        left, accuracy, effort = len(changed.classes), changed.accuracy, changed.effort
    say(f"{name} is forgotten; {left} classes are left, accuracy {percent(accuracy)}")
    if effort != "instant":
        say(
            "note: what is remembered of it is gone; the network that was trained while it was there stays as it is. "
            "To leave no trace, make a model anew without this class"
        )


def undo(model: ModelPath) -> None:
    """Go back to the model before the last change.

    [bold]vqprompt undo garden.vqp[/bold]
    """
    with _changing(model) as changed:
        what = changed.undo()
        left = len(changed.classes)
    say(f"undone: {what}; the model has {left} classes now")


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete it.")] = False,
) -> None:
    """What is kept of images on disk, by the commands for research; teaching a model keeps nothing.

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
        say(f"{what:18} {len(sizes):6} files {sum(sizes) / 1e6:10.1f} MB  {place}")
        if clear and place.is_dir():
            shutil.rmtree(place)
    if clear:
        say(f"deleted {total / 1e6:.1f} MB")
    elif total:
        say("vqprompt cache --clear deletes it; it is made again when it is needed")


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
                say(f"{file}: unknown (nearest: {named})" if found.name == "unknown" else f"{file}: {named}")
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

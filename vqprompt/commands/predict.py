"""`vqprompt predict`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vqprompt.commands.console import print_json, print_plain
from vqprompt.commands.options import Device
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.model.predicting import Answer


def predict(
    learned: Annotated[
        Path,
        typer.Argument(
            help="A model that `vqprompt learn` made, or a folder that `vqprompt run` or Learner.save wrote."
        ),
    ],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders with images.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print per image.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line, for other programs to read.")
    ] = False,
    backbone: Annotated[str | None, typer.Option(help="Where the weights file is now, if it was moved.")] = None,
    device: Device = "auto",
    unknown: Annotated[
        bool, typer.Option("--unknown/--no-unknown", help="Say unknown for what is like no class (models only).")
    ] = True,
    strictness: Annotated[
        float, typer.Option(help="Above 0, more images are called unknown; below 0, fewer (models only).")
    ] = 0.0,
) -> None:
    """Say what is in images, among all classes learned so far.

    [bold]vqprompt predict garden.vqp photo.jpg holiday/ --top 3[/bold]
    """
    if not learned.is_dir():
        _predict_with_model(learned, images, top, as_json, backbone, device, unknown, strictness)
        return
    from vqprompt.research.learner.predictor import Predictor

    files = [file for path in images for file in image_files(path)]
    predictor = Predictor.load(learned, device, backbone=backbone)
    bad: list[str] = []
    for file, logits in zip(files, predictor.predict_each(files), strict=True):
        if isinstance(logits, UserError):
            bad.append(str(logits))
            continue
        shares, places = logits.topk(min(top, len(predictor.classes)))
        classes = {predictor.classes[p]: s for p, s in zip(places.tolist(), shares.tolist(), strict=True)}
        if as_json:
            print_json({"image": str(file), "classes": classes})
        else:
            print_plain(f"{file}: " + ", ".join(f"{name} {s:.0%}" for name, s in classes.items()))
    _refuse(bad, len(files))


def _predict_with_model(
    model: Path, images: list[Path], top: int, as_json: bool, backbone: str | None, device: str,
    unknown: bool = True, strictness: float = 0.0,
) -> None:  # fmt: skip
    """Predict with a model file, which can also answer "unknown"."""
    from vqprompt.product.model.model import Model

    asked = Model.load(model, device=device, backbone=backbone)
    files = [file for path in images for file in image_files(path)]
    bad = []
    for start in range(0, len(files), 64):
        part = files[start : start + 64]
        answers = asked.try_answers(part, top=top, unknown=unknown, strictness=strictness)
        for file, answer in zip(part, answers, strict=True):
            if isinstance(answer, Exception):
                bad.append(str(answer))
            else:
                print_answer(file, answer, as_json)
    _refuse(bad, len(files))


def print_answer(file: Path, answer: Answer, as_json: bool) -> None:
    names = ", ".join(name for name, _ in answer.classes)
    if as_json:
        familiarity = answer.familiarity if math.isfinite(answer.familiarity) else None
        told = {"class": answer.name, "classes": dict(answer.classes), "familiarity": familiarity}
        print_json({"image": str(file), **told, "note": answer.note})
    elif answer.name == "unknown":  # percentages are shares among known classes: they would contradict it
        print_plain(f"{file}: unknown (most like {names})")
    elif answer.note:
        print_plain(f"{file}: {names} ({answer.note})")
    else:
        print_plain(f"{file}: " + ", ".join(f"{name} {share:.0%}" for name, share in answer.classes))


def _refuse(bad: list[str], count: int) -> None:
    """Name the images that could not be read, after the others were answered. bad: one message per image."""
    if bad:
        raise UserError("\n  ".join([f"{len(bad)} of {counted(count, 'image')} cannot be used:", *bad]))


def image_files(path: Path) -> list[Path]:
    """The path itself if it is a file, else the images in the folder."""
    from vqprompt.core.data.source import images_in

    return images_in(path) if path.is_dir() else [path]

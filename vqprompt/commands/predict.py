"""`vqprompt predict`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt.commands.console import print_json, print_plain
from vqprompt.commands.options import Device, argument, flag, option
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from torch import Tensor

    from vqprompt.product.model.predicting import Answer


def predict(
    learned: Path = argument("What `vqprompt learn` made, or the folder of `run` or Learner.save.", metavar="MODEL"),
    images: list[Path] = argument("Image files, or folders with images."),
    top: int = option("How many classes to print per image.", 1, min=1),
    as_json: bool = flag("--json", "Print one JSON object per line, for other programs to read."),
    backbone: str | None = option("Where the weights file is now, if it was moved."),
    device: Device = "auto",
    unknown: bool = option("Say unknown for what is like no class (models only).", True),
    strictness: float = option("Above 0, more images are called unknown; below 0, fewer (models only).", 0.0),
) -> None:
    """Say what is in images, among all classes learned so far.

    [bold]vqprompt predict garden.vqp photo.jpg holiday/ --top 3[/bold]
    """
    from vqprompt.core.data.source import images_in

    files = [file for path in images for file in (images_in(path) if path.is_dir() else [path])]
    if learned.is_dir():
        from vqprompt.research.learner.predictor import Predictor

        predictor = Predictor.load(learned, device, backbone=backbone)
        answers: Iterator[Any] = predictor.predict_each(files)
        tell = partial(_print_shares, classes=predictor.classes, top=top, as_json=as_json)
    else:
        from vqprompt.product.model.model import Model

        ask = partial(
            Model.load(learned, device=device, backbone=backbone).try_answers,
            top=top, unknown=unknown, strictness=strictness,
        )  # fmt: skip
        parts = (files[start : start + 64] for start in range(0, len(files), 64))
        answers, tell = chain.from_iterable(map(ask, parts)), partial(print_answer, as_json=as_json)
    bad = []
    for file, answer in zip(files, answers, strict=True):
        if isinstance(answer, Exception):
            bad.append(str(answer))
        else:
            tell(file, answer)
    if bad:  # after the others were answered
        raise UserError("\n  ".join([f"{len(bad)} of {counted(len(files), 'image')} cannot be used:", *bad]))


def _print_shares(file: Path, shares: Tensor, classes: Sequence[str], top: int, as_json: bool) -> None:
    """An answer of a run folder, which knows nothing of "unknown"."""
    values, places = (found.tolist() for found in shares.topk(min(top, len(classes))))
    best = {classes[place]: share for place, share in zip(places, values, strict=True)}
    if as_json:
        print_json({"image": str(file), "classes": best})
    else:
        print_plain(f"{file}: " + ", ".join(f"{name} {share:.0%}" for name, share in best.items()))


def print_answer(file: Path, answer: Answer, as_json: bool) -> None:
    names = ", ".join(answer.shares)
    if as_json:
        familiarity = answer.familiarity if math.isfinite(answer.familiarity) else None
        told = {"class": answer.name, "classes": answer.shares, "familiarity": familiarity}
        print_json({"image": str(file), **told, "note": answer.note})
    elif answer.name == "unknown":  # percentages are shares among known classes: they would contradict it
        print_plain(f"{file}: unknown (most like {names})")
    elif answer.note:
        print_plain(f"{file}: {names} ({answer.note})")
    else:
        print_plain(f"{file}: " + ", ".join(f"{name} {share:.0%}" for name, share in answer.classes))

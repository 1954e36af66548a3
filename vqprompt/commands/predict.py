"""`vqprompt predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vqprompt.commands.console import print_plain
from vqprompt.commands.options import Device
from vqprompt.errors import UserError

IMAGES_PER_CHUNK = 256  # images between two lines of output


def predict(
    learned: Annotated[Path, typer.Argument(help="A folder that `vqprompt run` or Learner.save wrote.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders with images.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print per image.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line, for other programs to read.")
    ] = False,
    backbone: Annotated[str | None, typer.Option(help="The weights file of the run, if it has moved since.")] = None,
    device: Device = "auto",
) -> None:
    """Say what is in images, among all classes learned so far.

    [bold]vqprompt predict runs/birds garden.jpg holiday/ --top 3[/bold]
    """
    from vqprompt.learner.predictor import Predictor

    files = [file for path in images for file in image_files(path)]
    predictor = Predictor.load(learned, device, backbone=backbone)
    bad: list[str] = []
    for chunk in (files[i : i + IMAGES_PER_CHUNK] for i in range(0, len(files), IMAGES_PER_CHUNK)):
        refused: dict[int, UserError] = {}
        shares, places = predictor.predict_proba(chunk, refused).topk(min(top, len(predictor.classes)))
        good = [file for position, file in enumerate(chunk) if position not in refused]
        bad += map(str, refused.values())
        for file, share, place in zip(good, shares.tolist(), places.tolist(), strict=True):
            classes = {predictor.classes[p]: s for p, s in zip(place, share, strict=True)}
            if as_json:
                print(json.dumps({"image": str(file), "classes": classes}, ensure_ascii=False))
            else:
                print_plain(f"{file}: " + ", ".join(f"{name} {s:.0%}" for name, s in classes.items()))
    if bad:
        raise UserError("\n  ".join([f"{len(bad)} of {len(files)} images cannot be used:", *bad]))


def image_files(path: Path) -> list[Path]:
    """The path itself if it is a file, else the images in the folder."""
    from vqprompt.data.decode import IMAGE_SUFFIXES
    from vqprompt.data.source import hidden

    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and not hidden(file.relative_to(path).as_posix())
    )
    if not found:
        raise UserError(
            f"{path}: no image in this folder; give image files, or folders of {' '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return found

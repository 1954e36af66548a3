"""Real drawings to try everything with, for people who have no images at hand: a folder for the commands, and a model
for the page that knows things which most people can draw. It is made in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vqprompt.core.data.drawings import embedded_drawings
from vqprompt.core.errors import UserError

TAUGHT_FIRST = ("butterfly", "cactus", "eyeglasses", "house", "star")
TAUGHT_LATER = "umbrella"
NEVER_TAUGHT = "bicycle"
PER_FOLDER = 20
TEST = 80  # drawings from here on are for asking
SIDE = 140  # px; drawings have 28
NAME = "drawings"
THINGS = (
    "airplane", "apple", "bicycle", "butterfly", "car", "clock", "cloud", "envelope", "eyeglasses", "flower", "house",
    "ladder", "pants", "pizza", "rainbow", "sailboat", "snowman", "star", "t-shirt", "umbrella",
)  # fmt: skip
PER_CLASS = 30  # of 80 for training: few, so that it is ready in seconds
SIZE = 56  # px: enough for drawings of 28 px


def write_example(folder: Path) -> None:
    """Write first/ (five classes), later/ (one more) and ask/ (three drawings, one of a class that is never taught)."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already and not empty; give the name of a new folder")
    for place, drawing in _pictures(*embedded_drawings()):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / place)


def _pictures(images: np.ndarray, classes: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    for name in (*TAUGHT_FIRST, TAUGHT_LATER):
        part = "later" if name == TAUGHT_LATER else "first"
        for number in range(PER_FOLDER):
            yield f"{part}/{name}/{number:02}.png", images[classes.index(name), number]
    for name in ("house", TAUGHT_LATER, NEVER_TAUGHT):
        yield f"ask/{name}.png", images[classes.index(name), TEST]


def example_drawings(per_class: int = PER_CLASS) -> tuple[list[np.ndarray], list[str]]:
    """What the model is taught: drawings, and the class of each."""
    images, names = embedded_drawings()
    chosen = images[[names.index(thing) for thing in THINGS], :per_class]
    return list(chosen.reshape(-1, 28, 28)), [thing for thing in THINGS for _ in range(per_class)]


def make_example(path: Path, device: str = "auto", per_class: int = PER_CLASS) -> None:
    from vqprompt.product.model.model import Model  # slow to import, and the folder does not need it

    model = Model(size=SIZE, device=device)
    model.learn(*example_drawings(per_class))
    model.save(path)

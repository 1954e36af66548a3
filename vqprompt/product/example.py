"""Real drawings to try everything with, for people who have no images at hand: a folder for the commands, and a model
for the page that knows things which most people can draw. It is made in seconds."""

from __future__ import annotations

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
    images, classes = embedded_drawings()
    taught = [(name, number) for name in (*TAUGHT_FIRST, TAUGHT_LATER) for number in range(PER_FOLDER)]
    places = {f"{'first' if n in TAUGHT_FIRST else 'later'}/{n}/{number:02}.png": (n, number) for n, number in taught}
    places |= {f"ask/{name}.png": (name, TEST) for name in ("house", TAUGHT_LATER, NEVER_TAUGHT)}
    for place, (name, number) in places.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        drawing = Image.fromarray(images[classes.index(name), number])
        drawing.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / place)


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

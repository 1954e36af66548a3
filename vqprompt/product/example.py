"""A folder of real drawings to try the commands with, for people who have no images at hand."""

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
PER_CLASS = 20
TEST = 80  # drawings from here on are for asking
SIDE = 140  # px; drawings have 28


def write_example(folder: Path) -> None:
    """Write first/ (five classes), later/ (one more) and ask/ (three drawings, one of a class that is never taught)."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already and not empty; give the name of a new folder")
    images, classes = embedded_drawings()
    for place, drawing in _pictures(images, classes):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / place)


def _pictures(images: np.ndarray, classes: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    for name in (*TAUGHT_FIRST, TAUGHT_LATER):
        part = "later" if name == TAUGHT_LATER else "first"
        for number in range(PER_CLASS):
            yield f"{part}/{name}/{number:02}.png", images[classes.index(name), number]
    for name in ("house", TAUGHT_LATER, NEVER_TAUGHT):
        yield f"ask/{name}.png", images[classes.index(name), TEST]

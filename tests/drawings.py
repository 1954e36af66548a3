"""The embedded drawings as image files, for tests of what people do with folders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image


def drawings() -> tuple[np.ndarray, list[str]]:
    """uint8 [classes, drawings, 28, 28] and the names of the classes."""
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file, allow_pickle=False)
        images = packed["images"]
        return images.reshape(*images.shape[:2], 28, 28), [str(name) for name in packed["classes"]]


def write_drawings(folder: Path, classes: Sequence[str], rows: Sequence[int]) -> Path:
    """One folder per class, with PNGs of some of its drawings."""
    images, names = drawings()
    for name in classes:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for row in rows:
            Image.fromarray(images[names.index(name), row]).save(place / f"{row}.png")
    return folder

"""The example: a model that knows drawings of things that most people can draw. It is made in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vqprompt.core.data.drawings import embedded_drawings
from vqprompt.core.progress import Report, ignore
from vqprompt.product.model.model import Model
from vqprompt.product.model.pictures import content_id
from vqprompt.product.serve.gallery import Gallery, small_jpeg

NAME = "drawings"
SIZE = 56  # px: enough for drawings of 28 px
THINGS = (
    "airplane", "apple", "bicycle", "butterfly", "car", "clock", "cloud", "envelope", "eyeglasses", "flower", "house",
    "ladder", "pants", "pizza", "rainbow", "sailboat", "snowman", "star", "t-shirt", "umbrella",
)  # fmt: skip
PER_CLASS = 30  # of 80 for training: few, so that it is ready in seconds


def drawings(per_class: int = PER_CLASS) -> tuple[list[np.ndarray], list[str]]:
    """Embedded drawings and the class of each."""
    images, names = embedded_drawings()
    chosen = images[[names.index(thing) for thing in THINGS], :per_class]
    return list(chosen.reshape(-1, 28, 28)), [thing for thing in THINGS for _ in range(per_class)]


def make_example(path: Path, device: str = "auto", per_class: int = PER_CLASS, progress: Report = ignore) -> None:
    model = Model(size=SIZE, device=device)
    model.learn(*drawings(per_class), progress=progress)
    model.save(path)


def fill(gallery: Gallery, model: str, per_class: int = PER_CLASS) -> None:
    """The drawings are part of the package, so they can be shown."""
    images, _ = drawings(per_class)
    gallery.add(model, ((content_id(drawing), small_jpeg(Image.fromarray(drawing))) for drawing in images))

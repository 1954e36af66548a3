"""The drawings inside the package: 50 classes of Quick, Draw!, 100 drawings of each (see assets/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import numpy as np


def embedded_drawings() -> tuple[np.ndarray, list[str]]:
    """Drawings, uint8 [classes, 100, 28, 28], black lines on white; and the names of the classes."""
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file, allow_pickle=False)
        return packed["images"], [str(name) for name in packed["classes"]]


# uint8 [N, 1, 28, 28] to [N, 1 or 3, 28, 28]; what leaves a drawing on one side comes in on the other
STYLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "pencil": lambda drawn: drawn,
    "brush": lambda drawn: np.min([np.roll(drawn, n, axis) for n in (-1, 0, 1) for axis in (2, 3)], axis=0),
    "chalk": lambda drawn: 255 - drawn,
    "rotated": lambda drawn: np.rot90(drawn, axes=(2, 3)),
    "blurred": lambda drawn: np.mean([np.roll(drawn, n, axis) for n in (-2, -1, 0, 1, 2) for axis in (2, 3)], axis=0),
    "coloured": lambda drawn: np.concatenate([64 + drawn * 0.7, 255 - drawn * 0.5, 32 + drawn * 0.4], axis=1),
}

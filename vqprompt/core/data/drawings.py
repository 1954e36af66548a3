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


def _neighbours(drawings: np.ndarray) -> np.ndarray:
    """Each pixel and its eight neighbours: [9, …, 28, 28]."""
    padded = np.pad(drawings, [(0, 0), (0, 0), (1, 1), (1, 1)], mode="edge")
    return np.stack([padded[..., y : y + 28, x : x + 28] for y in range(3) for x in range(3)])


# uint8 [N, 1, 28, 28] to [N, 1 or 3, 28, 28]
STYLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "pencil": lambda drawings: drawings,
    "brush": lambda drawings: _neighbours(drawings).min(0),
    "chalk": lambda drawings: 255 - drawings,
    "rotated": lambda drawings: np.rot90(drawings, axes=(2, 3)),
    "blurred": lambda drawings: _neighbours(_neighbours(drawings).mean(0)).mean(0),
    "coloured": lambda drawings: np.concatenate([64 + drawings * 0.7, 255 - drawings * 0.5, 32 + drawings * 0.4], 1),
}

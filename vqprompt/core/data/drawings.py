"""The drawings inside the package: 50 classes of Quick, Draw!, 100 drawings of each (see assets/README.md)."""

from __future__ import annotations

from importlib.resources import files

import numpy as np


def embedded_drawings() -> tuple[np.ndarray, list[str]]:
    """Drawings, uint8 [classes, 100, 28, 28], black lines on white; and the names of the classes."""
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file, allow_pickle=False)
        return packed["images"], [str(name) for name in packed["classes"]]

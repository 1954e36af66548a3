"""Quick Draw, 50 classes × 100 drawings of 28×28, inside the package (see assets/README.md for its origin)."""

from __future__ import annotations

import hashlib

import numpy as np

from vqprompt.core.data.drawings import embedded_drawings
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import UserError
from vqprompt.core.progress import Report, ignore

TRAIN_PER_CLASS = 80


def open_quickdraw(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    if source is not None:
        raise UserError(f"quickdraw50={source}: quickdraw50 is part of the package; give --data quickdraw50")
    drawings, classes = embedded_drawings()
    count = drawings.shape[1]
    pixels = drawings.reshape(-1, 1, *drawings.shape[2:])
    labels = np.repeat(np.arange(len(classes)), count)
    is_test = np.tile(np.arange(count) >= TRAIN_PER_CLASS, len(classes))
    store = Store(pixels, np.ones(len(pixels)), hashlib.sha256(pixels.tobytes()).hexdigest()[:24])
    return Dataset("quickdraw50", classes, store, labels, is_test)

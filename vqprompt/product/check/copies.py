"""Distinguishes copies of an image (re-compressed, resized, cropped, mirrored) from other images of the same thing.

Features find the candidates: the features of a copy are among the nearest to its original's. They cannot decide,
because two photographs of one bird on one branch are equally near. Pixels decide: the small grey version of one image
must match a part of the other's, or its mirror image, almost perfectly. Perceptual hashes (imagehash) find only
re-compressed images; crops and mirror images have other hashes (benchmarks/trust_cub.py prints how many are found).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image

SIDE = 48  # px of the small grey version that is kept of each image
GRID = 12  # points per side at which two images are compared
SIDES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # side of a crop, as a fraction of the image
UNEQUAL = 0.11  # how much width and height of a crop may differ, as fractions of the image
STEP = 0.05  # between neighbouring crops, as a fraction of the image
ALIKE = 0.935  # a correlation of at least this much means a copy
NEAR = 0.88  # images whose features are less similar are not compared
NEIGHBOURS = 3  # each image is compared with this many


def small_grey(image: Image.Image) -> np.ndarray:
    """uint8 [SIDE, SIDE], squashed."""
    return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX))


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """The best correlation of either image with a part of the other or of its mirror image; 1 is a perfect copy."""
    pieces = [_normal(_crops(image)) for image in (one, other)]
    wholes = [piece[0].reshape(GRID, GRID) for piece in pieces]
    both = [np.stack([whole, whole[:, ::-1]]).reshape(2, -1) for whole in wholes]
    return float(max((pieces[0] @ both[1].T).max(), (pieces[1] @ both[0].T).max()))


def _crops(image: np.ndarray) -> np.ndarray:
    """Averages over a GRID × GRID raster of each crop to try [M, GRID²]; the first is the whole image."""
    reading, down, across = _readings()
    rows = (reading.reshape(-1, SIDE) @ image.astype(np.float32)).reshape(-1, GRID, SIDE)  # [intervals, GRID, SIDE]
    both = rows.reshape(-1, SIDE) @ reading.reshape(-1, SIDE).T
    table = both.reshape(len(rows), GRID, len(reading), GRID)
    return table[down, :, across].reshape(len(down), -1)


@lru_cache
def _readings() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Averages over GRID parts of each interval of a side [intervals, GRID, SIDE], and which intervals make a crop."""
    intervals = [(low, low + side) for side in SIDES for low in np.arange(0, 1 - side + 1e-9, STEP)]
    edges = np.array([np.linspace(low, min(high, 1.0), GRID + 1) for low, high in intervals]) * SIDE
    pixels = np.arange(SIDE)
    upper = np.minimum(edges[:, 1:, None], pixels + 1)
    overlap = np.maximum(upper - np.maximum(edges[:, :-1, None], pixels), 0)
    sides = np.array([high - low for low, high in intervals])
    down, across = np.nonzero(np.abs(sides[:, None] - sides) < UNEQUAL)
    return (overlap / overlap.sum(2, keepdims=True)).astype(np.float32), down, across


def _normal(values: np.ndarray) -> np.ndarray:
    """Minus the average, then scaled to length 1. An image of one colour becomes zero, and matches nothing."""
    values = values - values.mean(1, keepdims=True)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return np.where(length > GRID, values / np.maximum(length, 1e-6), 0)

"""Finds images that are blank, too dark, over-exposed or blurred, and images that look unlike all others of a folder.

What is notable about this implementation:
- Seven numbers of each image are enough, computed from a small version of it while it is read.
- A limit does not apply where many images of the folder are beyond it: drawings on white paper are not over-exposed.
- Scans, screenshots and drawings among photographs differ from these in brightness, flat areas or colour, and their
  features differ, too. Either alone is also true of a few good images; both together are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vqprompt.core.statistics.discriminant import Array
from vqprompt.product.check.findings import Kind

SIDE = 128  # px of the small version
USUAL = 0.05  # beyond a limit that more than this share of the images exceed, nothing is doubtful
BLANK = 5.0  # standard deviation of grey values, of 255
DARK = 40.0  # brightest grey value, without the brightest twentieth
BRIGHT, WHITE, NOTHING_DARK = 218.0, 0.3, 145.0  # average; share that is white; darkest, without the darkest twentieth
SHARP = 0.08  # contrast between neighbouring pixels, divided by that of the whole image
# Usual spreads of brightness, contrast, log(sharpness), flat share and log(colour); a folder's own may be larger
SPREADS = np.array([60.0, 30.0, 0.6, 0.2, 0.8])
FOREIGN = 7.0  # spreads in pixels, times spreads in features


@dataclass(frozen=True)
class Look:
    """What an image looks like. brightness, contrast: average and standard deviation of its grey values. darkest,
    brightest: without the outer twentieths. white: share of white pixels. sharpness: see `SHARP`. flat: share of
    neighbouring pixels that are equal, before it is made smaller: few in photographs, most in screenshots and scans.
    colour: average difference between the colour channels."""

    brightness: float
    contrast: float
    darkest: float
    brightest: float
    white: float
    sharpness: float
    flat: float
    colour: float


def look_at(image: Image.Image) -> Look:
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
    grey = pixels.mean(2)
    contrast = float(grey.std())
    darkest, brightest = np.quantile(grey, [0.05, 0.95]).tolist()
    inner = grey[1:-1, 1:-1]
    edges = np.abs(4 * inner - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:])
    rows = np.asarray(image.convert("RGB").resize((image.width, SIDE), Image.Resampling.NEAREST), np.int16)
    flat = float((np.diff(rows, axis=1) == 0).all(2).mean()) if image.width > 1 else 1.0
    return Look(
        float(grey.mean()), contrast, darkest, brightest, float((grey >= 250).mean()),
        float(edges.mean()) / (contrast + 1), flat, float((pixels.max(2) - pixels.min(2)).mean()),
    )  # fmt: skip


def faults(looks: list[Look]) -> Iterator[tuple[int, Kind, str]]:
    """Images with a fault: its kind, and in words how it shows."""
    blank = np.array([v.contrast < BLANK for v in looks])
    dark = np.array([v.brightest < DARK for v in looks]) & ~blank
    white = np.array([v.white > WHITE for v in looks]) & ~blank
    bright = white & [v.brightness > BRIGHT and v.darkest > NOTHING_DARK for v in looks]
    blurred = np.array([v.sharpness < SHARP for v in looks]) & ~blank & ~dark
    for rows, usual, kind, says in (
        (blank, blank, Kind.BLANK, "all of it has about the same colour"),
        (dark, dark, Kind.DARK, "almost all of it is nearly black"),
        (bright, white, Kind.BRIGHT, "much of it is white, and nothing is dark"),
        (blurred, blurred, Kind.BLURRED, "it has no sharp edges"),
    ):
        if usual.sum() <= max(USUAL * len(looks), 1):
            yield from ((int(row), kind, says) for row in np.flatnonzero(rows))


def unusual(looks: list[Look]) -> Array:
    """How far each image is from what is usual in this folder [n]: 1 is as far as the outer fifth of the images."""
    table = np.array([
        (v.brightness, v.contrast, np.log(v.sharpness + 0.01), v.flat, np.log(v.colour + 1)) for v in looks
    ])  # fmt: skip
    low, middle, high = np.quantile(table, [0.1, 0.5, 0.9], axis=0)
    above = (table - middle) / np.maximum(high - middle, SPREADS)
    below = (middle - table) / np.maximum(middle - low, SPREADS)
    return np.maximum(above, below).max(1)

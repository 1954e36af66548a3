"""Finds images that are blank, dark, over-exposed, blurred or crooked, and images unlike all others of a folder.

What is notable about this implementation:
- A few numbers of each image are enough, computed from small versions of it while it is read.
- A limit does not apply where many images of the folder are beyond it: what is usual in a folder is no fault.
- A white sky is not over-exposed, nor is one in full blue. Where too much light fell on something coloured, two of the
  three channels are at full brightness; where it fell on something rough, many pixels jump to full brightness.
- Screenshots have few colours, and edges that run straight across them, both ways. A frame around a photograph has them
  too, so the border of an image does not count.
- A crooked scan is a parallelogram on a plain ground, whose four corners touch the borders of the image.
- Scans, screenshots and drawings among photographs differ from these in brightness, flat areas or colour, and their
  features differ, too. Either alone is also true of a few good images; both together are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from vqprompt.core.statistics.discriminant import Array
from vqprompt.product.check.findings import Kind

SIDE = 128  # px of the small version …
SAMPLED = 256  # … and of the one that keeps single pixels as they are
USUAL = 0.05  # beyond a limit that more than this share of the images exceed, nothing is doubtful
BLANK = 5.0  # standard deviation of grey values, of 255
DARK = 40.0  # brightest grey value, without the brightest twentieth
CLIPPED = 0.21  # share of pixels with two channels at full brightness, of those that are not white, and JUMPS times …
JUMPS, FROM, TO = 4, 100, 235  # … the share of neighbours of which one is at full brightness and the other in between
DRAWN, TIMES_USUAL = 9.0, 3.0  # share of the most frequent colours, times contrast across lines; and times the folder's
COLOURS, LINES, BORDER = 4, 4, 32  # how many colours, and how many lines each way; px that do not count
PLAIN, ASTRAY, WHOLE = 12, 0.01, 0.96  # a crooked scan: how plain its ground is, pixels beyond its outline, its size
SHARP = 0.08  # contrast between neighbouring pixels, divided by that of the whole image
# Usual spreads of brightness, contrast, log(sharpness), flat share and log(colour); a folder's own may be larger
SPREADS = np.array([60.0, 30.0, 0.6, 0.2, 0.8])
FOREIGN = 7.0  # spreads in pixels, times spreads in features


@dataclass(frozen=True)
class Look:
    """What an image looks like. brightness, contrast: average and standard deviation of its grey values. brightest:
    without the brightest twentieth. sharpness: see `SHARP`. flat: share of neighbouring pixels that are equal, before
    it is made smaller: few in photographs, most in screenshots and scans. colour: average difference between the colour
    channels. clipped, drawn: see `CLIPPED` and `DRAWN`. crooked: whether it is a page at an angle on a plain ground."""

    brightness: float
    contrast: float
    brightest: float
    sharpness: float
    flat: float
    colour: float
    clipped: float
    drawn: float
    crooked: bool


def look_at(image: Image.Image) -> Look:
    image = image.convert("RGB")
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
    grey = pixels.mean(2)
    contrast = float(grey.std())
    inner = grey[1:-1, 1:-1]
    edges = np.abs(4 * inner - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:])
    rows = np.asarray(image.resize((image.width, SIDE), Image.Resampling.NEAREST), np.int16)
    flat = float((np.diff(rows, axis=1) == 0).all(2).mean()) if image.width > 1 else 1.0
    sample = image.resize((SAMPLED, SAMPLED), Image.Resampling.NEAREST)
    return Look(
        float(grey.mean()), contrast, float(np.quantile(grey, 0.95)), float(edges.mean()) / (contrast + 1), flat,
        float((pixels.max(2) - pixels.min(2)).mean()), _clipped(sample),
        _drawn(sample.crop((BORDER, BORDER, SAMPLED - BORDER, SAMPLED - BORDER))),
        _crooked(np.asarray(sample, np.int16)),
    )  # fmt: skip


def _clipped(image: Image.Image) -> float:
    pixels = np.asarray(image)[::2, ::2]
    low, middle, _ = np.sort(pixels.reshape(-1, 3), axis=1).T
    shades = np.bincount(low[(low < 250) & (middle >= 253)], minlength=1)
    two = (shades.sum() - shades.max()) / max((low < 250).sum(), 1)  # ivory paper has a single shade
    pairs = (pixels[1:], pixels[:-1]), (pixels[:, 1:], pixels[:, :-1])
    ends = [(np.minimum(*pair), np.maximum(*pair)) for pair in pairs]  # from ink to white paper, the jump is larger
    return float(two + JUMPS * np.mean([((high >= 254) & (low >= FROM) & (low < TO)).mean() for low, high in ends]))


def _drawn(image: Image.Image) -> float:
    area = image.width * image.height
    colours = sorted(count for count, _ in image.getcolors(area) or ())[-COLOURS:]
    grey = np.asarray(image.convert("L"), np.float32)
    steps = (np.sort(np.abs(np.diff(grey, axis=axis).mean(1 - axis))) for axis in (0, 1))
    return sum(colours) / area * float(min(each[-LINES:].mean() for each in steps))


def _crooked(pixels: Array) -> bool:
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
    if (np.abs(corners - corners[0]) > PLAIN).any():
        return False
    page = (np.abs(pixels - pixels[0, 0]) > PLAIN).any(2)
    page = np.maximum.accumulate(page, 1) & np.maximum.accumulate(page[:, ::-1], 1)[:, ::-1]
    sides = [np.flatnonzero(side.any(0)) for side in (page[:2], page[:, -2:].T, page[-2:], page[:, :2].T)]
    if not all(map(len, sides)) or not 0.5 < page.mean() < WHOLE:
        return False
    for end in (0, -1):  # turned this way or that: where each side is touched by a corner
        top, right, bottom, left = (side[place] for side, place in zip(sides, (end, end, ~end, ~end), strict=True))
        outline = Image.new("1", page.shape[::-1])
        ImageDraw.Draw(outline).polygon([(top, 0), (SAMPLED, right), (bottom, SAMPLED), (0, left)], 1)
        if (np.asarray(outline) != page).mean() < ASTRAY:
            return True
    return False


def faults(looks: list[Look]) -> Iterator[tuple[int, Kind, str]]:
    """Images with a fault: its kind, and in words how it shows."""
    blank = np.array([v.contrast < BLANK for v in looks])
    dark = np.array([v.brightest < DARK for v in looks]) & ~blank
    bright = np.array([v.clipped > CLIPPED for v in looks]) & ~blank
    blurred = np.array([v.sharpness < SHARP for v in looks]) & ~blank & ~dark
    likeness = np.array([v.drawn for v in looks])
    drawn = likeness > max(DRAWN, TIMES_USUAL * np.quantile(likeness, 0.9))
    for rows, kind, says in (
        (blank, Kind.BLANK, "all of it has about the same colour"),
        (dark, Kind.DARK, "almost all of it is nearly black"),
        (bright & ~drawn, Kind.BRIGHT, "much of what is not white is at full brightness"),
        (blurred, Kind.BLURRED, "it has no sharp edges"),
        (np.array([v.crooked for v in looks]), Kind.FOREIGN, "a page or picture at an angle, on a plain ground"),
        (drawn, Kind.FOREIGN, "few colours and long straight lines, as in a screenshot"),
    ):
        if rows.sum() <= max(USUAL * len(looks), 1):
            yield from ((int(row), kind, says) for row in np.flatnonzero(rows))


def unusual(looks: list[Look]) -> Array:
    """How far each image is from what is usual in this folder [n]: 1 is as far as the outer fifth of the images."""
    table = np.array([
        (v.brightness, v.contrast, np.log(v.sharpness + 0.01), v.flat, np.log(v.colour + 1)) for v in looks
    ])  # fmt: skip
    low, middle, high = np.quantile(table, [0.1, 0.5, 0.9], axis=0)
    above = (table - middle) / np.maximum(high - middle, SPREADS)
    below = (middle - table) / np.maximum(middle - low, SPREADS)
    return np.asarray(np.maximum(above, below).max(1))

"""Drawings as people make them with a mouse: a few strokes per thing, wobbly, of any size, anywhere on the canvas."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

Stroke = list[tuple[float, float]]


def arc(x: float, y: float, rx: float, ry: float | None = None, start: float = 0, end: float = 360) -> Stroke:
    """Part of an ellipse; degrees from the right, clockwise on a screen."""
    ry = rx if ry is None else ry
    angles = [math.radians(start + (end - start) * n / 24) for n in range(25)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


def scallops(x: float, y: float, r: float, bumps: int, size: float) -> Stroke:
    """Bumps around an ellipse, as of a cloud."""
    points: Stroke = []
    for n in range(bumps):
        a = 360 * n / bumps
        cx, cy = x + r * math.cos(math.radians(a)), y + 0.6 * r * math.sin(math.radians(a))
        points += arc(cx, cy, size, None, a - 110, a + 110)[2:-2:2]
    return [*points, points[0]]


def petals(x: float, y: float, r: float, count: int) -> list[Stroke]:
    spread = [math.radians(360 * n / count) for n in range(count)]
    return [arc(x + 1.9 * r * math.cos(a), y + 1.9 * r * math.sin(a), r) for a in spread]


SKETCHES: dict[str, list[Stroke]] = {
    "airplane": [
        [(0.05, 0.5), (0.15, 0.44), (0.8, 0.42), (0.95, 0.5), (0.8, 0.57), (0.15, 0.56), (0.05, 0.5)],
        [(0.45, 0.56), (0.3, 0.85), (0.42, 0.85), (0.65, 0.56)], [(0.45, 0.43), (0.34, 0.2), (0.44, 0.2), (0.62, 0.43)],
        [(0.1, 0.46), (0.03, 0.3), (0.12, 0.3), (0.22, 0.44)],
    ],
    "apple": [
        [(0.5, 0.3), (0.38, 0.24), (0.22, 0.3), (0.15, 0.5), (0.24, 0.78), (0.4, 0.9), (0.5, 0.86), (0.6, 0.9),
         (0.76, 0.78), (0.85, 0.5), (0.78, 0.3), (0.62, 0.24), (0.5, 0.3)],
        [(0.5, 0.3), (0.52, 0.18), (0.57, 0.1)], [(0.54, 0.18), (0.66, 0.1), (0.74, 0.15), (0.62, 0.22), (0.54, 0.18)],
    ],
    "bicycle": [
        arc(0.24, 0.66, 0.17), arc(0.76, 0.66, 0.17),
        [(0.24, 0.66), (0.38, 0.36), (0.66, 0.36), (0.47, 0.66), (0.24, 0.66)], [(0.47, 0.66), (0.38, 0.36)],
        [(0.76, 0.66), (0.66, 0.36), (0.64, 0.24), (0.74, 0.22)], [(0.30, 0.30), (0.44, 0.30)],
    ],
    "butterfly": [
        arc(0.5, 0.52, 0.04, 0.26), arc(0.29, 0.36, 0.2, 0.17), arc(0.71, 0.36, 0.2, 0.17),
        arc(0.34, 0.67, 0.15, 0.14), arc(0.66, 0.67, 0.15, 0.14), [(0.5, 0.27), (0.42, 0.12)],
        [(0.5, 0.27), (0.58, 0.12)],
    ],
    "car": [
        [(0.05, 0.66), (0.06, 0.5), (0.24, 0.46), (0.34, 0.3), (0.64, 0.3), (0.76, 0.47), (0.94, 0.52), (0.95, 0.66),
         (0.05, 0.66)],
        arc(0.26, 0.68, 0.09), arc(0.74, 0.68, 0.09),
        [(0.3, 0.46), (0.38, 0.35), (0.5, 0.35), (0.5, 0.46), (0.3, 0.46)],
    ],
    "clock": [
        arc(0.5, 0.5, 0.4), [(0.5, 0.5), (0.5, 0.22)], [(0.5, 0.5), (0.68, 0.58)], [(0.5, 0.1), (0.5, 0.16)],
        [(0.9, 0.5), (0.84, 0.5)], [(0.5, 0.9), (0.5, 0.84)], [(0.1, 0.5), (0.16, 0.5)],
    ],
    "cloud": [scallops(0.5, 0.5, 0.3, 8, 0.14)],
    "envelope": [
        [(0.08, 0.25), (0.92, 0.25), (0.92, 0.78), (0.08, 0.78), (0.08, 0.25)],
        [(0.08, 0.25), (0.5, 0.55), (0.92, 0.25)],
    ],
    "eyeglasses": [
        arc(0.27, 0.5, 0.18, 0.16), arc(0.73, 0.5, 0.18, 0.16), arc(0.5, 0.48, 0.06, 0.05, 180, 360),
        [(0.09, 0.47), (0.02, 0.36)], [(0.91, 0.47), (0.98, 0.36)],
    ],
    "flower": [
        arc(0.5, 0.34, 0.09), *petals(0.5, 0.34, 0.11, 6), [(0.5, 0.6), (0.5, 0.97)],
        [(0.5, 0.85), (0.62, 0.74), (0.7, 0.76), (0.6, 0.85), (0.5, 0.85)],
    ],
    "house": [
        [(0.2, 0.45), (0.2, 0.9), (0.8, 0.9), (0.8, 0.45), (0.2, 0.45)], [(0.13, 0.46), (0.5, 0.12), (0.87, 0.46)],
        [(0.44, 0.9), (0.44, 0.66), (0.58, 0.66), (0.58, 0.9)],
        [(0.27, 0.54), (0.38, 0.54), (0.38, 0.64), (0.27, 0.64), (0.27, 0.54)],
    ],
    "ladder": [
        [(0.35, 0.05), (0.33, 0.95)], [(0.65, 0.05), (0.67, 0.95)],
        *[[(0.34, 0.05 + 0.15 * n), (0.66, 0.05 + 0.15 * n)] for n in range(1, 6)],
    ],
    "pants": [
        [(0.28, 0.08), (0.72, 0.08), (0.8, 0.94), (0.58, 0.94), (0.5, 0.36), (0.42, 0.94), (0.2, 0.94), (0.28, 0.08)],
        [(0.27, 0.17), (0.73, 0.17)],
    ],
    "pizza": [
        [(0.5, 0.95), (0.12, 0.2), (0.88, 0.2), (0.5, 0.95)], arc(0.5, 0.2, 0.4, 0.13, 180, 360),
        arc(0.38, 0.36, 0.06), arc(0.6, 0.4, 0.06), arc(0.49, 0.62, 0.05),
    ],
    "rainbow": [arc(0.5, 0.75, r, r, 180, 360) for r in (0.46, 0.38, 0.3, 0.22)],
    "sailboat": [
        [(0.1, 0.68), (0.9, 0.68), (0.76, 0.88), (0.24, 0.88), (0.1, 0.68)], [(0.5, 0.68), (0.5, 0.08)],
        [(0.5, 0.1), (0.84, 0.6), (0.5, 0.6)], [(0.48, 0.18), (0.2, 0.6), (0.48, 0.6)],
    ],
    "snowman": [
        arc(0.5, 0.2, 0.13), arc(0.5, 0.44, 0.16), arc(0.5, 0.76, 0.21), arc(0.46, 0.18, 0.012), arc(0.54, 0.18, 0.012),
        [(0.34, 0.42), (0.16, 0.3)], [(0.66, 0.42), (0.84, 0.3)],
    ],
    "star": [[(0.5, 0.06), (0.76, 0.9), (0.06, 0.36), (0.94, 0.36), (0.24, 0.9), (0.5, 0.06)]],
    "t-shirt": [
        [(0.36, 0.12), (0.08, 0.3), (0.17, 0.46), (0.3, 0.38), (0.3, 0.92), (0.7, 0.92), (0.7, 0.38), (0.83, 0.46),
         (0.92, 0.3), (0.64, 0.12)], arc(0.5, 0.12, 0.14, 0.1, 180, 0),
    ],
    "umbrella": [
        arc(0.5, 0.5, 0.44, 0.38, 180, 360), arc(0.206, 0.5, 0.147, 0.07, 180, 360),
        arc(0.5, 0.5, 0.147, 0.07, 180, 360),
        arc(0.794, 0.5, 0.147, 0.07, 180, 360), [(0.5, 0.12), (0.5, 0.86), (0.47, 0.93), (0.4, 0.93), (0.38, 0.86)],
    ],
}  # fmt: skip


def mouse_drawings(per_thing: int, seed: int = 0) -> Iterator[tuple[str, list[Stroke]]]:
    """The name and the strokes of each drawing, in parts of the canvas. A hand leans, stretches, wobbles, and does not
    close its circles."""
    rng = np.random.default_rng(seed)
    for name, strokes in SKETCHES.items():
        for _ in range(per_thing):
            lean, turn = rng.normal(0, 0.06), rng.normal(0, 0.05)
            stretch, size = np.exp(rng.normal(0, 0.1, 2)), rng.uniform(0.45, 0.85)
            at = rng.uniform(size / 2, 1 - size / 2, 2)
            matrix = np.array([[1, lean - turn], [turn, 1]]) * stretch * size
            yield name, [_by_hand(np.array(s), rng) @ matrix.T + at for s in strokes]


def _by_hand(points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Around 0, with a point every few pixels as a mouse gives them."""
    points = points - 0.5
    steps = np.r_[0, np.cumsum(np.hypot(*np.diff(points, axis=0).T))]
    length = steps[-1]
    count = max(3, int(length / 0.02))
    along = np.linspace(0, length * rng.normal(1, 0.01), count)
    path = np.c_[np.interp(along, steps, points[:, 0]), np.interp(along, steps, points[:, 1])]
    knots = np.linspace(0, length, max(3, int(length / 0.15)))
    wobble = [np.interp(along, knots, rng.normal(0, 0.012, len(knots))) for _ in range(2)]
    return path + np.stack(wobble, axis=1) + rng.normal(0, 0.012, 2)

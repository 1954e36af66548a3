"""The accuracy matrix A_ij and the numbers that are computed from it (the paper's appendix); calibration.

`accuracy[i][j]` is the accuracy (in percent) on task i after learning task j; None where j < i, before task i was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = Sequence[Sequence[float | None]]


def _columns(accuracy: Matrix) -> list[list[float]]:
    """Right after each task, the accuracies on the tasks so far."""
    columns = []
    for j in range(len(accuracy)):
        column = [a for row in accuracy[: j + 1] if (a := row[j]) is not None]
        if len(column) <= j:
            raise ValueError(f"accuracy after task {j + 1} is incomplete: {column}")
        columns.append(column)
    return columns


def average_accuracies(accuracy: Matrix) -> list[float]:
    """Mean accuracy over the tasks seen so far, after each task: the curve that papers plot. Its last value is the
    final average accuracy (FAA), its mean the cumulative average accuracy (CAA)."""
    return list(map(fmean, _columns(accuracy)))


def forgetting_per_task(accuracy: Matrix) -> list[float]:
    """How far each task but the last has fallen from its best accuracy (Chaudhry et al. 2018)."""
    columns = _columns(accuracy)
    return [max(column[i] for column in columns[i:-1]) - columns[-1][i] for i in range(len(columns) - 1)]


def forgetting(accuracy: Matrix) -> float:
    """Mean of `forgetting_per_task`; 0 for a single task, because nothing came after it."""
    drops = forgetting_per_task(accuracy)
    return fmean(drops) if drops else 0.0


def transfer(accuracy: Matrix) -> dict[str, float]:
    """What tasks do to each other, of two or more. backward_transfer: how later tasks changed earlier ones, mean of
    A_iT − A_ii (Lopez-Paz & Ranzato 2017). plasticity: accuracy on a task right after it was learned, mean of A_ii.
    new_accuracy, old_accuracy: after each task but the first, on it and on those before, mean of each; the classifier
    favours the newest task if they are far apart."""
    columns = _columns(accuracy)
    learned = [column[-1] for column in columns]
    return {
        "backward_transfer": fmean(columns[-1][:-1]) - fmean(learned[:-1]),
        "plasticity": fmean(learned),
        "new_accuracy": fmean(learned[1:]),
        "old_accuracy": fmean(fmean(column[:-1]) for column in columns[1:]),
    }


def area_under_curve(curve: Sequence[tuple[int, float]]) -> float:
    """Accuracy of an online stream, as a mean over the images shown. curve: images shown so far, accuracy then."""
    shown = [0, *(images for images, _ in curve)]
    return sum((now - before) * a for before, (now, a) in zip(shown, curve, strict=False)) / shown[-1]


def wilson(share: float, count: float) -> tuple[float, float]:
    """The interval that holds the true share 19 times in 20, if this share of so many images was right (Wilson)."""
    if not count:
        return 0.0, 1.0
    z = 1.959963984540054  # standard deviations on either side of 95 % of a normal distribution
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)


def balanced_interval(accuracy: float, tested: Sequence[int]) -> tuple[float, float]:
    """Of an accuracy for which classes count the same, 95 % (Wilson): classes with few images make it wide. tested:
    images per class."""
    counts = [count for count in tested if count]
    return wilson(accuracy, len(counts) ** 2 / sum(1 / count for count in counts) if counts else 0.0)


# ---------------------------------------------------------------------------------------------- calibration


class ReliabilityBin(NamedTuple):
    """Answers of about the same certainty: how many, their average certainty, and the share of them that was right."""

    images: int
    certainty: float
    right: float


def reliability(certainty: NDArray[Any], right: NDArray[Any], bins: int) -> tuple[ReliabilityBin, ...]:
    """Answers by how certain they are, in `bins` intervals of equal width. certainty: [n], from 0 to 1. right: [n]."""
    place = np.minimum((certainty * bins).astype(int), bins - 1)
    counts, sums, hits = (np.bincount(place, weights, bins) for weights in (None, certainty, right))
    middles = (np.arange(bins) + 0.5) / bins  # where there is no answer
    averages = np.divide(sums, counts, out=middles, where=counts > 0)
    shares = hits / np.maximum(counts, 1)
    return tuple(ReliabilityBin(int(n), float(c), float(r)) for n, c, r in zip(counts, averages, shares, strict=True))


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """Expected calibration error: how far certainty is from the share of right answers, on average; nan of none."""
    total = sum(b.images for b in bins)
    return sum(b.images * abs(b.certainty - b.right) for b in bins) / total if total else float("nan")

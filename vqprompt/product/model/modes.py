"""Several modes of one class: the features of photographs and drawings of the same thing are far apart.

A class is split in two if images that were not used to find the split confirm it. Two-means on one half of the images
gives a direction. Along it, the other half must form two groups that are further apart than those of any distribution
with a single peak. Each part can be split again.
"""

from __future__ import annotations

import numpy as np

MOST = 4  # modes per class
SMALLEST = 3  # each half needs this many images in each mode
# Smallest distance of two groups, divided by their spread. The halves of a uniform distribution have 3.5, those of a
# normal one 2.6.
APART = 4.5


def find_modes(features: np.ndarray) -> np.ndarray:
    """The mode of each feature [n]; the first image is in mode 0. features: [n, D], in an order that depends only on
    the set of images."""
    labels = np.zeros(len(features), dtype=np.uint8)
    waiting = [0]
    while waiting and labels.max(initial=0) + 1 < MOST:
        mode = waiting.pop(0)
        rows = np.flatnonzero(labels == mode)
        second = split_in_two(features[rows])
        if second is not None:
            new = int(labels.max()) + 1
            labels[rows[second]] = new
            waiting += [mode, new]
    return labels


def split_in_two(features: np.ndarray) -> np.ndarray | None:
    """Which rows belong to the second of two groups (bool [n], the first row never does); None if it is one group."""
    if len(features) < 4 * SMALLEST:
        return None
    halves = features[0::2], features[1::2]
    for known, fresh in (halves, halves[::-1]):
        centers = two_means(known)
        direction = centers[1] - centers[0]
        length = np.linalg.norm(direction)
        if length == 0:
            return None
        place = (fresh - centers.mean(0)) @ (direction / length)
        low, high = place[place < 0], place[place >= 0]
        if min(len(low), len(high)) < SMALLEST:
            return None
        spread = np.sqrt((low.var() * len(low) + high.var() * len(high)) / max(len(place) - 2, 1))
        if high.mean() - low.mean() < APART * spread:
            return None
    centers = two_means(features)
    second = _nearer_second(features, centers)
    return ~second if second[0] else second


def two_means(features: np.ndarray, rounds: int = 20) -> np.ndarray:
    """Two centers [2, D], starting from the two ends of the direction of greatest variance."""
    centered = features - features.mean(0)
    # the leading direction from the n x n products: there are fewer images than dimensions
    _, vectors = np.linalg.eigh(centered @ centered.T)
    second = vectors[:, -1] > 0
    centers = np.stack([features[~second].mean(0), features[second].mean(0)]) if 0 < second.sum() < len(second) else (
        np.stack([features[0], features[-1]])
    )  # fmt: skip
    for _ in range(rounds):
        now = _nearer_second(features, centers)
        if not 0 < now.sum() < len(now) or np.array_equal(now, second):
            break
        second = now
        centers = np.stack([features[~second].mean(0), features[second].mean(0)])
    return centers


def _nearer_second(features: np.ndarray, centers: np.ndarray) -> np.ndarray:
    first, second = centers
    return features @ (second - first) > (second @ second - first @ first) / 2

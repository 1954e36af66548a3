"""Several modes of one class: the features of photographs and drawings of the same thing are far apart.

A class is split in two if images that were not used to find the split confirm it. Two-means on one half of the images
gives a direction. Along it, the other half must form two groups that are further apart than those of any distribution
with a single peak. Each part can be split again.
"""

from __future__ import annotations

import numpy as np

from vqprompt.core.statistics.world import k_means

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
        second = two_means(known)
        if not second.any():
            return None
        one, other = known[~second].mean(0), known[second].mean(0)
        place = (fresh - (one + other) / 2) @ ((other - one) / np.linalg.norm(other - one))
        low, high = place[place < 0], place[place >= 0]
        if min(len(low), len(high)) < SMALLEST:
            return None
        spread = np.sqrt((low.var() * len(low) + high.var() * len(high)) / max(len(place) - 2, 1))
        if high.mean() - low.mean() < APART * spread:
            return None
    second = two_means(features)
    return ~second if second[0] else second


def two_means(features: np.ndarray) -> np.ndarray:
    """Which features belong to the second of two clusters [n], starting from the two ends of the direction of greatest
    variance; none if all features are alike."""
    centered = features - features.mean(0)
    # the leading direction from the n x n products: there are fewer images than dimensions
    _, vectors = np.linalg.eigh(centered @ centered.T)
    second = vectors[:, -1] > 0
    if not centered.any() or second.all() or not second.any():
        return np.zeros(len(features), bool)
    return k_means(features, np.stack([features[~second].mean(0), features[second].mean(0)])) == 1

"""What is remembered of a class: counts, sums, and the features of some of its images.

What is notable about this implementation:
- Features are rounded to multiples of 1/1024 and kept as integers. Sums of integers do not depend on the order in which
  they are added. So any order and any number of teachings give the same bits, and a class that is removed leaves no
  trace.
- Of every image, its name (the first 8 bytes of a SHA-256 of its content) and its part in the sum are kept. Features
  are kept of at most `KEPT` images per class: those with the smallest names. This choice depends only on the set of
  images, not on their order. The common covariance, the accuracy and the modes of a class are computed from the kept
  features; the mean of a class is computed from all its images.
- A trained network answers too well on the images that it was trained on. So the images that were held out are marked,
  and accuracy is measured with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vqprompt.product.model.modes import find_modes

STEP = 1 / 1024
KEPT = 256  # features per class; at 768 dimensions a class takes at most 0.4 MB


def to_fixed_point(features: np.ndarray) -> np.ndarray:
    """Features as int16 multiples of `STEP`; values beyond ±32 are clipped."""
    return np.clip(np.rint(np.asarray(features, np.float64) / STEP), -32768, 32767).astype(np.int16)


@dataclass(frozen=True, eq=False)
class ClassRecord:
    """One class.

    names: uint64 [n], sorted: which images it was taught. total: int64 [D], the sum of their features. kept: int16
    [k, D], the features of the first k names. modes: uint8 [k], the mode of the class that each of them belongs to (all
    0 if there is only one). unseen: bool [k], whether no network was trained on the image (all, if none was trained).
    """

    names: np.ndarray
    total: np.ndarray
    kept: np.ndarray
    modes: np.ndarray
    unseen: np.ndarray

    @classmethod
    def of(cls, names: np.ndarray, features: np.ndarray, unseen: np.ndarray | None = None) -> ClassRecord:
        """Of new images: names [n] without repetition, fixed-point features [n, D], and which were held out [n]."""
        order = np.argsort(names, kind="stable")
        unseen = np.ones(len(names), bool) if unseen is None else unseen
        return cls.from_sums(
            names[order], features.sum(0, dtype=np.int64), features[order][:KEPT], unseen[order][:KEPT]
        )

    @classmethod
    def from_sums(cls, names: np.ndarray, total: np.ndarray, kept: np.ndarray, unseen: np.ndarray) -> ClassRecord:
        """A record without its modes, which are computed here. Names are sorted."""
        return cls(names, total, np.ascontiguousarray(kept), find_modes(kept.astype(np.float64) * STEP), unseen)

    def merged(self, other: ClassRecord) -> ClassRecord:
        """Both records as one. No image may be in both."""
        names = np.concatenate([self.names, other.names])
        order = np.argsort(names, kind="stable")
        first = [r.names[: len(r.kept)] for r in (self, other)]
        best = np.argsort(np.concatenate(first), kind="stable")[:KEPT]
        kept, unseen = (np.concatenate(parts)[best] for parts in ((self.kept, other.kept), (self.unseen, other.unseen)))
        return self.from_sums(names[order], self.total + other.total, kept, unseen)

    def moved(self, where: Callable[[np.ndarray], np.ndarray]) -> ClassRecord:
        """The same class after features moved. where: maps old features [n, D] to new ones. The map is linear, so the
        mean moves like the images."""
        total = np.rint(where(self.mean[None])[0] * (self.count / STEP)).astype(np.int64)
        return self.from_sums(self.names, total, to_fixed_point(where(self.features)), self.unseen)

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.names, self.total, self.kept, self.modes, self.unseen))

    @property
    def features(self) -> np.ndarray:
        """The kept features [k, D], in double precision."""
        return self.kept.astype(np.float64) * STEP

    @property
    def mean(self) -> np.ndarray:
        """Of all images [D]."""
        return self.total.astype(np.float64) * (STEP / self.count)

    def same_as(self, other: ClassRecord) -> bool:
        return (
            np.array_equal(self.names, other.names)
            and np.array_equal(self.total, other.total)
            and np.array_equal(self.kept, other.kept)
        )


def gram_of(record: ClassRecord) -> np.ndarray:
    """The sum of the outer products of the kept features [D, D]: whole numbers below 2^53, so it is exact."""
    kept = record.kept.astype(np.float64)
    return kept.T @ kept

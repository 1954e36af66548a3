"""What is remembered of a class: counts, sums, and the features of some of its images.

What is notable about this implementation:
- Features are rounded to multiples of 1/1024 and kept as integers. Sums of integers do not depend on the order in which
  they are added, so any order and any number of teachings gives the same bits, and what is taken away again leaves no
  trace.
- Every image leaves behind its name (the first 8 bytes of a SHA-256 of its content) and its part in the sum. The
  features themselves are kept for at most `KEPT` images per class: those with the smallest names. That choice depends
  on the set of images alone, not on when they came. The kept features are what the common covariance, the measurement
  of accuracy and the modes of a class are computed from; the mean of a class is computed from all its images.
- A network that was trained knows the images it was trained on. Those that were held out then are marked, and accuracy
  is measured with these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vqprompt.model.modes import find_modes

STEP = 1 / 1024
KEPT = 256  # features per class; at 768 dimensions a class takes at most 0.4 MB


def to_fixed_point(features: np.ndarray) -> np.ndarray:
    """Features as int16 multiples of `STEP`; what lies beyond ±32 is cut off there."""
    return np.clip(np.rint(np.asarray(features, np.float64) / STEP), -32768, 32767).astype(np.int16)


@dataclass(frozen=True, eq=False)
class ClassRecord:
    """One class.

    names: uint64 [n], sorted: which images it was taught. total: int64 [D], the sum of their features. kept: int16
    [k, D], the features of the first k names. modes: uint8 [k], the mode of the class that each of them belongs to (all
    0 where there is one). unseen: bool [k], whether no network was trained on the image (all, if none was trained).
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
        return cls.made(names[order], features.sum(0, dtype=np.int64), features[order][:KEPT], unseen[order][:KEPT])

    @classmethod
    def made(cls, names: np.ndarray, total: np.ndarray, kept: np.ndarray, unseen: np.ndarray) -> ClassRecord:
        """Of sorted names, the sum of all features, and the features of the first names, with whether a network has
        not seen them."""
        return cls(names, total, np.ascontiguousarray(kept), find_modes(kept.astype(np.float64) * STEP), unseen)

    def merged(self, other: ClassRecord) -> ClassRecord:
        """Both together; no image may be in both."""
        names = np.concatenate([self.names, other.names])
        order = np.argsort(names, kind="stable")
        first = [r.names[: len(r.kept)] for r in (self, other)]
        best = np.argsort(np.concatenate(first), kind="stable")[:KEPT]
        kept, unseen = (np.concatenate(parts)[best] for parts in ((self.kept, other.kept), (self.unseen, other.unseen)))
        return self.made(names[order], self.total + other.total, kept, unseen)

    def moved(self, where: Callable[[np.ndarray], np.ndarray]) -> ClassRecord:
        """The same class after features moved. where: features [n, D] to where they are now; a linear map, so that the
        mean moves like the images."""
        total = np.rint(where(self.mean[None])[0] * (self.count / STEP)).astype(np.int64)
        return self.made(self.names, total, to_fixed_point(where(self.features)), self.unseen)

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

"""What is remembered of a class: counts, sums, and the features of some of its images.

What is notable about this implementation:
- Features are rounded to multiples of 1/1024 and kept as integers. Sums of integers do not depend on the order in which
  they are added. So any order and any number of teachings give the same bits, and a class that is removed leaves no
  trace.
- Of every image, its content id (the first 8 bytes of a SHA-256 of its content) and its part in the sum are kept.
  Features are kept of at most `KEPT` images per class: those with the smallest ids. This choice depends only on the set
  of images, not on their order. The common covariance, the accuracy and the modes of a class are computed from the
  kept features; the mean of a class is computed from all its images.
- A trained network answers too well on the images that it was trained on. So the images that were held out are marked,
  and accuracy is measured with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

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

    ids: uint64 [n], sorted: the content ids of its images. total: int64 [D], the sum of their features. kept: int16
    [k, D], the features of the first k ids. modes: uint8 [k], the mode of the class that each of them belongs to (all
    0 if there is only one). unseen: bool [k], whether no network was trained on the image (all, if none was trained).
    """

    ids: np.ndarray
    total: np.ndarray
    kept: np.ndarray
    modes: np.ndarray
    unseen: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, features: np.ndarray, unseen: np.ndarray | None = None) -> ClassRecord:
        """Of new images: ids [n] without repetition, fixed-point features [n, D], and which were held out [n]."""
        order = np.argsort(ids, kind="stable")
        unseen = np.ones(len(ids), bool) if unseen is None else unseen
        return cls.from_sums(ids[order], features.sum(0, dtype=np.int64), features[order][:KEPT], unseen[order][:KEPT])

    @classmethod
    def from_sums(cls, ids: np.ndarray, total: np.ndarray, kept: np.ndarray, unseen: np.ndarray) -> ClassRecord:
        """A record without its modes, which are computed here. The ids are sorted."""
        return cls(ids, total, np.ascontiguousarray(kept), find_modes(kept.astype(np.float64) * STEP), unseen)

    def merged(self, other: ClassRecord) -> ClassRecord:
        """Both records as one. No image may be in both."""
        ids = np.concatenate([self.ids, other.ids])
        order = np.argsort(ids, kind="stable")
        first = [r.ids[: len(r.kept)] for r in (self, other)]
        best = np.argsort(np.concatenate(first), kind="stable")[:KEPT]
        kept, unseen = (np.concatenate(parts)[best] for parts in ((self.kept, other.kept), (self.unseen, other.unseen)))
        return self.from_sums(ids[order], self.total + other.total, kept, unseen)

    def without(self, removed: ClassRecord) -> ClassRecord | None:
        """As if some of its images had never been added; None if no image is left."""
        stays = ~np.isin(self.ids, removed.ids)
        if not stays.any():
            return None
        rows = stays[: len(self.kept)]
        return self.from_sums(self.ids[stays], self.total - removed.total, self.kept[rows], self.unseen[rows])

    def moved(self, where: Callable[[np.ndarray], np.ndarray], doubt: np.ndarray) -> ClassRecord:
        """The same class after features moved. where: maps old features [n, D] to new ones. The map is linear, so the
        mean moves like the images. doubt: what the images may be off by [k, D]; it does not change the mean."""
        k = len(self.kept)
        doubt = (doubt - doubt.mean(0)) * np.sqrt(k / max(k - 1, 1))
        total = np.rint(where(self.mean[None])[0] * (self.count / STEP)).astype(np.int64)
        return replace(self, total=total, kept=to_fixed_point(where(self.features) + doubt))

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.ids, self.total, self.kept, self.modes, self.unseen))

    @property
    def features(self) -> np.ndarray:
        """The kept features [k, D], in double precision."""
        return self.kept.astype(np.float64) * STEP

    @property
    def mean(self) -> np.ndarray:
        """Of all images [D]."""
        return self.total.astype(np.float64) * (STEP / self.count)


def added(records: Mapping[str, ClassRecord], new: Mapping[str, ClassRecord]) -> dict[str, ClassRecord]:
    """Records of classes with those of new images in them."""
    return {**records, **{name: records[name].merged(r) if name in records else r for name, r in new.items()}}


def ids_of(records: Iterable[ClassRecord]) -> np.ndarray:
    """Of all their images, record after record: uint64 [n]."""
    return np.concatenate([np.zeros(0, np.uint64), *(record.ids for record in records)])


def gram_of(record: ClassRecord) -> np.ndarray:
    """The sum of the outer products of the kept features [D, D]: whole numbers below 2^53, so it is exact."""
    kept = record.kept.astype(np.float64)
    return kept.T @ kept

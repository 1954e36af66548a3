"""Pictures of shards, however many, without keeping them in memory; and the sums of a class while it is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from vqprompt.core.data.shards import Shards
from vqprompt.product.model.pictures import Picture, clean_name
from vqprompt.product.model.records import KEPT, ClassRecord

PENDING = 1024  # images of a class that are collected before they are added up


class ShardPictures(Sequence[Picture]):
    """The rows of shards as pictures, made on demand. Test images are left out."""

    def __init__(self, shards: Shards, rows: np.ndarray | None = None) -> None:
        self.shards = shards
        everything = np.arange(len(shards.labels)) if shards.splits is None else np.flatnonzero(~shards.splits)
        self.rows = everything if rows is None else rows
        self.names = [clean_name(name) for name in shards.classes]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Picture: ...
    @overload
    def __getitem__(self, index: slice) -> ShardPictures: ...
    def __getitem__(self, index: int | slice) -> Picture | ShardPictures:
        if isinstance(index, slice):
            return ShardPictures(self.shards, self.rows[index])
        row = int(self.rows[index])
        return Picture(self.shards.where(row), self.names[self.shards.labels[row]], lambda: self.shards.read(row))

    @property
    def labels(self) -> set[str]:
        return self.labels_at(np.arange(len(self.rows)))

    def labels_at(self, places: np.ndarray) -> set[str]:
        return {self.names[label] for label in np.unique(self.shards.labels[self.rows[places]])}


class Chosen(Sequence[Picture]):
    """Some pictures of a sequence, by position."""

    def __init__(self, pictures: Sequence[Picture], places: np.ndarray) -> None:
        self.pictures, self.places = pictures, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.pictures[int(self.places[index])]

    def __iter__(self) -> Iterator[Picture]:
        return (self.pictures[place] for place in map(int, self.places))


class Growing:
    """A class while its images arrive: names, the sum of all features, and the features of the smallest names. The
    result does not depend on the order in which they arrive."""

    def __init__(self) -> None:
        self.names: list[np.ndarray] = []  # of all images, in parts
        self.total: np.ndarray | None = None
        self.kept_names = np.zeros(0, np.uint64)
        self.kept: np.ndarray | None = None
        self._pending: list[tuple[int, np.ndarray]] = []

    def add(self, name: int, feature: np.ndarray) -> None:
        """One image: its name, and its features in fixed point [D]."""
        self._pending.append((name, feature))
        if len(self._pending) >= PENDING:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            names = np.array([name for name, _ in self._pending], np.uint64)
            features = np.stack([feature for _, feature in self._pending])
            self._pending = []
            self.merge(names, features.sum(0, dtype=np.int64), names, features)

    def merge(self, names: np.ndarray, total: np.ndarray, kept_names: np.ndarray, kept: np.ndarray) -> None:
        """More images of the class: all their names, the sum of their features, and those features that may be kept."""
        self.names.append(names)
        self.total = total if self.total is None else self.total + total
        every = np.concatenate([self.kept_names, kept_names])
        features = kept if self.kept is None else np.concatenate([self.kept, kept])
        best = np.argsort(every, kind="stable")[:KEPT]
        self.kept_names, self.kept = every[best], features[best]

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `merge` takes them."""
        self._flush()
        assert self.total is not None and self.kept is not None
        return np.concatenate(self.names), self.total, self.kept_names, self.kept

    def record(self) -> ClassRecord:
        names, total, _, kept = self.parts()
        return ClassRecord.from_sums(np.sort(names, kind="stable"), total, kept, np.ones(len(kept), bool))


def shard_pictures(path: str | Path) -> ShardPictures | None:
    """The pictures of tar shards or parquet files; None if there are other files at this path."""
    from vqprompt.research.datasets.parquet import open_shards

    shards = open_shards(path)
    return None if shards is None else ShardPictures(shards)

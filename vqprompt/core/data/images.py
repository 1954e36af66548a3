"""Labelled images of one or several stores. Everything that reads pixels reads them through this module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.data.store import Store

Guard = Callable[[], None]
"""Called before every read; raises if these images may not be read now (see stream.py)."""


class Images:
    """Rows of a store, with labels. Joined images (`concatenate`) have rows of several stores and work the same way."""

    def __init__(self, store: Store, rows: np.ndarray, labels: np.ndarray, guard: Guard | None = None) -> None:
        self._parts = [_Part(store, np.asarray(rows), () if guard is None else (guard,))]
        self.labels = torch.from_numpy(labels.astype(np.int64))

    @classmethod
    def _of(cls, parts: Sequence[_Part], labels: Tensor) -> Images:
        images = cls.__new__(cls)
        images._parts, images.labels = _merged(parts), labels
        return images

    @staticmethod
    def concatenate(parts: Sequence[Images]) -> Images:
        """Join several sets, such as the test sets of the tasks so far, or a task's images and a memory of old ones."""
        return Images._of([own for part in parts for own in part._parts], torch.cat([part.labels for part in parts]))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> np.ndarray:
        """The row of each image in its store."""
        return np.concatenate([part.rows for part in self._parts])

    @property
    def aspect(self) -> Tensor:
        """Width / height of each original image [n]."""
        return torch.cat([part.store.aspect[part.rows] for part in self._parts])

    @property
    def key(self) -> str:
        """Identifies exactly these pixels in this order. Results computed from them are kept under this key."""
        keys = [hashlib.sha256(p.store.identity.encode() + p.rows.tobytes()).hexdigest()[:24] for p in self._parts]
        return keys[0] if len(keys) == 1 else hashlib.sha256("".join(keys).encode()).hexdigest()[:24]

    @property
    def named(self) -> bool:
        """Whether `key` means the same images in another process, so that what is computed can be kept on disk."""
        return all(part.store.fingerprint for part in self._parts)

    def digest(self) -> str:
        """16 hex digits of the content, wherever it is stored. Only the middle row of each image is read."""
        if len(self._parts) == 1:
            return self._parts[0].store.digest(self._parts[0].rows)
        return hashlib.sha256("".join(p.store.digest(p.rows) for p in self._parts).encode()).hexdigest()[:16]

    @property
    def groups(self) -> np.ndarray | None:
        """For each image, which others it is best read with; None where any order is as good."""
        store = self._parts[0].store
        return store.groups[self._parts[0].rows] if len(self._parts) == 1 and store.groups is not None else None

    def take(self, index: Tensor) -> Images:
        """The images at `index`, in that order, with the same guards."""
        chosen, labels = index.numpy(), self.labels[index]
        if len(self._parts) == 1 or not len(chosen):
            return self._of([self._parts[0].take(chosen)], labels)
        number, inside = self._locate(chosen)
        breaks = np.flatnonzero(np.diff(number)) + 1  # a new part wherever the store changes
        runs = zip(np.split(number, breaks), np.split(inside, breaks), strict=True)
        return self._of([self._parts[part[0]].take(rows) for part, rows in runs], labels)

    def check(self) -> None:
        """Raise if these images may not be read now."""
        for guard in (guard for part in self._parts for guard in part.guards):
            guard()

    def read(self, index: Tensor, device: torch.device) -> Tensor:
        """uint8 pixels [len(index), C, S, S] on `device`."""
        self.check()
        if len(self._parts) == 1:
            return self._parts[0].read(index.numpy(), device)
        number, inside = self._locate(index.numpy())
        pixels, places = [], []
        for i in np.unique(number):
            here = np.flatnonzero(number == i)
            pixels.append(self._parts[i].read(inside[here], device))
            places.append(torch.from_numpy(here))
        return torch.cat(pixels)[torch.cat(places).argsort().to(device)]

    def batches(self, order: Sequence[Tensor], device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (index, pixels) per batch of indices, reading the next one while the caller works on this one."""
        if device.type != "cuda" or all(part.store.on_device(device) is not None for part in self._parts):
            for index in order:
                yield index, self.read(index, device)
            return
        with ThreadPoolExecutor(1) as reader:
            pending: list[Any] = []
            for index in order:
                pending.append((index, reader.submit(self.read, index, device)))
                if len(pending) > 2:
                    ready, future = pending.pop(0)
                    yield ready, future.result()
            for ready, future in pending:
                yield ready, future.result()

    def _locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each index the number of its part and the position inside it."""
        starts = np.cumsum([0, *(len(part.rows) for part in self._parts)])
        number = np.searchsorted(starts, index, side="right") - 1
        return number, index - starts[number]


class _Part:
    """Rows of one store."""

    def __init__(self, store: Store, rows: np.ndarray, guards: tuple[Guard, ...]) -> None:
        self.store, self.rows, self.guards = store, rows, guards

    def take(self, index: np.ndarray) -> _Part:
        return _Part(self.store, self.rows[index], self.guards)

    def read(self, index: np.ndarray, device: torch.device) -> Tensor:
        rows = self.rows[index]
        resident = self.store.on_device(device)
        if resident is not None:
            return resident[torch.from_numpy(rows).to(device, non_blocking=True)]
        pixels = self.store.read(rows)
        return (pixels.pin_memory() if device.type == "cuda" else pixels).to(device, non_blocking=True)


def _merged(parts: Sequence[_Part]) -> list[_Part]:
    """Join parts of the same store, so that their images are read together."""
    if any(part.store is not parts[0].store for part in parts):
        return list(parts)
    guards = dict.fromkeys(guard for part in parts for guard in part.guards)
    return [_Part(parts[0].store, np.concatenate([part.rows for part in parts]), tuple(guards))]

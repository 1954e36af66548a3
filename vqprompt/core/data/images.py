"""Labelled images of one or several stores. Everything that reads pixels reads them through this module."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.data.store import Store
from vqprompt.core.runtime.cores import parallel

Guard = Callable[[], None]
"""Called before every read; raises if these images may not be read now (see stream.py)."""


class Images:
    """Rows of a store, with labels. Joined images (`concatenate`) have rows of several stores and work the same way."""

    def __init__(self, store: Store, rows: np.ndarray, labels: np.ndarray, guard: Guard | None = None) -> None:
        self._stores: tuple[Store, ...] = (store,)
        self._guards: tuple[Guard, ...] = () if guard is None else (guard,)
        self.rows = np.asarray(rows)  # [n], in the image's own store
        self._owners = np.zeros(len(self.rows), np.int64)  # [n], positions in `_stores`
        self.labels = torch.from_numpy(labels.astype(np.int64))

    @staticmethod
    def concatenate(parts: Sequence[Images]) -> Images:
        """Join several sets, such as the test sets of the tasks so far, or a task's images and a memory of old ones."""
        joined = copy.copy(parts[0])
        joined._stores = tuple(dict.fromkeys(store for part in parts for store in part._stores))
        joined._guards = tuple(dict.fromkeys(guard for part in parts for guard in part._guards))
        owners = [np.array([joined._stores.index(store) for store in part._stores])[part._owners] for part in parts]
        joined.rows, joined._owners = np.concatenate([part.rows for part in parts]), np.concatenate(owners)
        joined.labels = torch.cat([part.labels for part in parts])
        return joined

    def take(self, index: Tensor) -> Images:
        """The images at `index`, in that order, with the same guards."""
        taken, chosen = copy.copy(self), index.numpy()
        taken.rows, taken._owners, taken.labels = self.rows[chosen], self._owners[chosen], self.labels[index]
        return taken

    def __len__(self) -> int:
        return len(self.labels)

    def _by_store(self, index: np.ndarray) -> Iterator[tuple[Store, np.ndarray, np.ndarray]]:
        """Each store that has some of these images: which of them, and their rows."""
        owners, rows = self._owners[index], self.rows[index]
        for number in np.unique(owners):
            here = np.flatnonzero(owners == number)
            yield self._stores[number], here, rows[here]

    @property
    def aspect(self) -> Tensor:
        """Width / height of each original image [n]."""
        aspect = torch.empty(len(self))
        for store, here, rows in self._by_store(np.arange(len(self))):
            aspect[here] = store.aspect[rows]
        return aspect

    @property
    def key(self) -> str:
        """Identifies exactly these pixels in this order. Results computed from them are kept under this key."""
        stores = "".join(store.identity for store in self._stores).encode()
        order = self._owners.tobytes() if len(self._stores) > 1 else b""
        return hashlib.sha256(stores + self.rows.tobytes() + order).hexdigest()[:24]

    @property
    def named(self) -> bool:
        """Whether `key` means the same images in another process, so that what is computed can be kept on disk."""
        return all(store.fingerprint for store in self._stores)

    def digest(self) -> str:
        """16 hex digits of the content, wherever it is stored. Only the middle row of each image is read."""
        if len(self._stores) == 1:
            return self._stores[0].digest(self.rows)
        digests = [store.digest(rows) for store, _, rows in self._by_store(np.arange(len(self)))]
        return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]

    @property
    def groups(self) -> np.ndarray | None:
        """For each image, which others it is best read with; None where any order is as good."""
        groups = self._stores[0].groups
        return groups[self.rows] if len(self._stores) == 1 and groups is not None else None

    def check(self) -> None:
        """Raise if these images may not be read now."""
        for guard in self._guards:
            guard()

    def read(self, index: Tensor, device: torch.device) -> Tensor:
        """uint8 pixels [len(index), C, S, S] on `device`."""
        self.check()
        if len(self._stores) == 1:
            return _read(self._stores[0], self.rows[index.numpy()], device)
        parts = list(self._by_store(index.numpy()))
        pixels = torch.cat([_read(store, rows, device) for store, _, rows in parts])
        return pixels[torch.from_numpy(np.concatenate([here for _, here, _ in parts])).argsort().to(device)]

    def batches(self, order: Sequence[Tensor], device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """(index, pixels) per batch of indices, reading the next one while the caller works on this one."""
        read = partial(self.read, device=device)
        wait = device.type == "cuda" and any(store.on_device(device) is None for store in self._stores)
        return zip(order, parallel(read, order, 1, ahead=3) if wait else map(read, order), strict=True)


def _read(store: Store, rows: np.ndarray, device: torch.device) -> Tensor:
    resident = store.on_device(device)
    if resident is not None:
        return resident[torch.from_numpy(rows).to(device, non_blocking=True)]
    pixels = store.read(rows)
    return (pixels.pin_memory() if device.type == "cuda" else pixels).to(device, non_blocking=True)

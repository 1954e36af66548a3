"""Some images of a store, with labels; everything that reads pixels reads them here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vqprompt.data.store import Store


class Images:
    """Some rows of a store, with labels; the only way anything reads pixels.

    `guard` is called before every read and raises when these images may not be read now (see stream.py).
    """

    def __init__(
        self, store: Store, rows: np.ndarray, labels: np.ndarray, guard: Callable[[], None] | None = None
    ) -> None:
        self.store, self.rows, self.labels, self._guard = store, rows, torch.from_numpy(labels.astype(np.int64)), guard

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def aspect(self) -> Tensor:
        return self.store.aspect[self.rows]

    @property
    def key(self) -> str:
        """Names exactly these pixels in this order: the key under which things computed from them are kept."""
        return hashlib.sha256(self.store.identity.encode() + self.rows.tobytes()).hexdigest()[:24]

    @property
    def named(self) -> bool:
        """Whether `key` means the same images in another process, so that what is computed can be kept on disk."""
        return bool(self.store.fingerprint)

    def digest(self) -> str:
        """Of what is in these images, wherever they lie: the middle line of each, for it has to be quick."""
        pixels = self.store.pixels
        return hashlib.sha256(pixels[self.rows, :, pixels.shape[2] // 2].tobytes()).hexdigest()[:16]

    def take(self, index: Tensor) -> Images:
        """Some of these images, as closely guarded."""
        return Images(self.store, self.rows[index.numpy()], self.labels[index].numpy(), self._guard)

    def check(self) -> None:
        """Raise if these images may not be read now."""
        if self._guard is not None:
            self._guard()

    def read(self, index: Tensor, device: torch.device) -> Tensor:
        """uint8 pixels [len(index), C, S, S] on `device`."""
        self.check()
        rows = self.rows[index.numpy()]
        resident = self.store.on_device(device)
        if resident is not None:
            return resident[torch.from_numpy(rows).to(device, non_blocking=True)]
        pixels = self.store.read(rows)
        if device.type == "cuda":
            return pixels.pin_memory().to(device, non_blocking=True)
        return pixels

    def batches(self, order: Sequence[Tensor], device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (index, pixels) for each index batch, reading the next one while the caller works on this one."""
        if device.type != "cuda" or self._on_device(device):
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

    def _on_device(self, device: torch.device) -> bool:
        return self.store.on_device(device) is not None

    @staticmethod
    def concatenate(parts: Sequence[Images]) -> Images:
        """Several sets as one (test sets of the tasks so far, say)."""
        store = parts[0].store
        if any(p.store is not store for p in parts):
            return _Joined(parts)

        def check() -> None:
            for part in parts:
                part.check()

        rows = np.concatenate([p.rows for p in parts])
        return Images(store, rows, torch.cat([p.labels for p in parts]).numpy(), check)


class _Joined(Images):
    """Images of several stores as one: a task's own and a memory of earlier ones, say."""

    def __init__(self, parts: Sequence[Images]) -> None:
        self.parts, self.labels = parts, torch.cat([p.labels for p in parts])
        self.starts = np.cumsum([0, *(len(p) for p in parts)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def aspect(self) -> Tensor:
        return torch.cat([p.aspect for p in self.parts])

    @property
    def key(self) -> str:
        return hashlib.sha256("".join(p.key for p in self.parts).encode()).hexdigest()[:24]

    @property
    def named(self) -> bool:
        return all(part.named for part in self.parts)

    def check(self) -> None:
        for part in self.parts:
            part.check()

    def take(self, index: Tensor) -> Images:
        raise NotImplementedError("take from the parts, then join")

    def read(self, index: Tensor, device: torch.device) -> Tensor:
        found, places = [], []
        for part, start in zip(self.parts, self.starts, strict=False):
            here = torch.nonzero((index >= start) & (index < start + len(part)))[:, 0]
            if len(here):
                found.append(part.read(index[here] - start, device))
                places.append(here)
        return torch.cat(found)[torch.cat(places).argsort().to(device)]

    def _on_device(self, device: torch.device) -> bool:
        return all(part._on_device(device) for part in self.parts)

"""Decoded images that do not all fit: decoded when they are needed, and kept on disk up to a limit.

A store of this kind reads the header of every image once, for its aspect ratio; what is no image, or is too large, is
named then. Pixels are decoded when they are read. As many decoded images as the limit allows are kept in a temporary
file: those that were read first. They stay, because in training every image comes again after all others; replacing the
oldest ones would mean that none is ever found.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.data.decode import aspect_of, decode_pixels
from vqprompt.core.data.limits import CACHE_GB
from vqprompt.core.data.source import Rows
from vqprompt.core.data.store import Store, for_each, unreadable
from vqprompt.core.files import cache_folder, keep_array, load_array, read_at, temporary_file, write_at
from vqprompt.core.progress import Report


class StreamedStore(Store):
    """groups: [n], images that are read together, if reading them one by one would be slow; else None."""

    def __init__(self, rows: Rows, side: int, progress: Report, groups: np.ndarray | None = None) -> None:
        self.rows, self.side, self.count = rows, side, len(rows)
        name = hashlib.sha256(f"{side}:{rows.key}".encode()).hexdigest()[:24]
        # without a fingerprint: what is computed from so many images would fill the disk too
        super().__init__(np.zeros((0, 3, side, side), np.uint8), self._aspects(name, progress), "")
        self.groups = groups
        self._cache = DecodedCache(self.count, 3 * side * side)

    def __len__(self) -> int:
        return self.count

    def read(self, rows: np.ndarray) -> Tensor:
        pixels = np.empty((len(rows), 3, self.side, self.side), np.uint8)
        order = np.argsort(rows, kind="stable")
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # Pillow releases the GIL while it decodes
            for _ in pool.map(lambda place: self._fill(pixels[place], int(rows[place])), order):
                pass
        return torch.from_numpy(pixels)

    def on_device(self, device: torch.device) -> None:
        """Never: they do not fit."""

    def digest(self, rows: np.ndarray) -> str:
        """Changes with the content of the files. (For the pixels, all images would have to be decoded.)"""
        return "files:" + hashlib.sha256(f"{self.rows.key}:".encode() + rows.tobytes()).hexdigest()[:16]

    def _fill(self, pixels: np.ndarray, row: int) -> None:
        if self._cache.load(row, pixels):
            return
        try:
            pixels[:] = decode_pixels(self.rows.read(row), self.rows.where(row), self.side)[0]
        except OSError as error:
            raise unreadable(self.rows, row, error) from None
        self._cache.keep(row, pixels)

    def _aspects(self, name: str, progress: Report) -> np.ndarray:
        """Width / height of every image, from the headers, or from the cache."""
        file = cache_folder() / "images" / f"{name}.aspect.npy"
        known = load_array(file)
        if known is not None and known.shape == (self.count,):
            return known
        aspect = np.empty(self.count, np.float32)

        def read_header(row: int) -> None:
            aspect[row] = aspect_of(self.rows.read(row), self.rows.where(row))

        for_each(self.rows, read_header, progress)
        keep_array(file, aspect)
        return aspect


class DecodedCache:
    """Pixels of the rows that were read first, in a temporary file."""

    def __init__(self, count: int, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._slots = np.full(count, -1, np.int32)
        self._lock = threading.Lock()
        self._used, self._room = 0, 0
        with suppress(OSError):  # no cache: everything is decoded every time
            self._file = temporary_file()
            free = shutil.disk_usage(cache_folder()).free
            self._room = int(min(CACHE_GB.value * 1e9, free / 2) // row_bytes)

    def load(self, row: int, pixels: np.ndarray) -> bool:
        slot = int(self._slots[row])
        if slot < 0:
            return False
        data = read_at(self._file, slot * self.row_bytes, self.row_bytes)
        pixels.reshape(-1)[:] = np.frombuffer(data, np.uint8)
        return True

    def keep(self, row: int, pixels: np.ndarray) -> None:
        with self._lock:
            if self._used >= self._room or self._slots[row] >= 0:
                return
            slot, self._used = self._used, self._used + 1
        try:
            write_at(self._file, slot * self.row_bytes, pixels.tobytes())
        except OSError:  # the disk is full: no more are kept
            self._room = 0
            return
        self._slots[row] = slot  # last, so that no thread reads pixels that are not written yet

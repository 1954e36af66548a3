"""Images as people have them (folders, zips, arrays), decoded once into a compact uint8 store.

The store is one memory-mapped array [N, C, S, S] of whole images squashed to a square, with each image's true aspect
ratio beside it (views.py undoes the squashing when it crops). It lies in the cache folder under a key made from the
SHA-256 of the content, may be larger than memory, and is written whole or not at all. It is checked before it is used.
Because every image is decoded before anything is learned, broken images are found early.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import uuid
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.cache import (
    cache_folder,
    keep_array,
    load_array,
    replacing_cached,
    save_array,
    temporary_file,
    warn_no_cache,
)
from vqprompt.core.data.decode import aspect_of, decode_pixels
from vqprompt.core.data.limits import CACHE_GB
from vqprompt.core.data.source import Rows
from vqprompt.core.errors import ImageError, WriteError
from vqprompt.core.files import delete_abandoned, read_at, write_at
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.runtime.cores import cpu_cores, parallel

AT_ONCE = 4096  # images that are read together


class Store:
    """Decoded images: uint8 [N, C, S, S], their aspect ratios [N], and a fingerprint of the content.

    A fingerprint of "" means that nothing computed from these images is kept on disk.
    """

    def __init__(self, pixels: np.ndarray, aspect: np.ndarray, fingerprint: str) -> None:
        self.pixels, self.fingerprint = pixels, fingerprint
        self.identity = fingerprint or uuid.uuid4().hex  # so that two stores without a fingerprint are never confused
        self.aspect = torch.from_numpy(np.ascontiguousarray(aspect)).float()
        self.groups: np.ndarray | None = None  # [N], images that are best read together (see StreamedStore)
        self._resident: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: np.ndarray) -> Tensor:
        """Pixels of some rows, in memory. Rows are read in sorted order, which is fastest from a disk."""
        ordered, back = np.unique(rows, return_inverse=True)
        return torch.from_numpy(np.ascontiguousarray(self.pixels[ordered][back]))

    def digest(self, rows: np.ndarray) -> str:
        """Changes with the content of these rows. Only the middle row of each image is read."""
        digest, middle = hashlib.sha256(), self.pixels.shape[2] // 2
        for start in range(0, len(rows), AT_ONCE):
            digest.update(self.pixels[rows[start : start + AT_ONCE], :, middle].tobytes())
        return digest.hexdigest()[:16]

    def on_device(self, device: torch.device) -> Tensor | None:
        """All pixels on the GPU, if they take at most a third of its free memory; else None."""
        if device.type != "cuda":
            return None
        if device not in self._resident:
            if self.pixels.nbytes > torch.cuda.mem_get_info(device)[0] // 3:
                return None
            self._resident[device] = torch.from_numpy(np.ascontiguousarray(self.pixels[:])).to(device)
        return self._resident[device]


def build_store(rows: Rows, side: int, progress: Report = ignore) -> Store:
    """The decoded store of a source: from the cache if the content is the same, else decoded now. What is larger than
    VQPROMPT_CACHE_GB is decoded when it is needed."""
    if 3 * side * side * len(rows) > CACHE_GB.value * 1e9:
        return StreamedStore(rows, side, progress)
    fingerprint = hashlib.sha256(f"{side}:{rows.key}".encode()).hexdigest()[:24]
    folder = cache_folder() / "images"
    target, aspects = folder / f"{fingerprint}.npy", folder / f"{fingerprint}.aspect.npy"
    stored = _load(target, aspects, len(rows), side)
    if stored is None:
        try:
            _decode_to_cache(rows, side, target, aspects, progress)
            stored = _load(target, aspects, len(rows), side)
        except WriteError as error:
            warn_no_cache(error)
    if stored is None:  # there is no cache: the pixels stay in memory
        stored = _in_memory(rows, side, progress)
    return Store(*stored, fingerprint)


def _load(target: Path, aspects: Path, count: int, side: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Pixels and aspect ratios, if both files are complete and of these images."""
    aspect = load_array(aspects)
    pixels = load_array(target, mapped=True) if aspect is not None else None
    if pixels is None or aspect is None or pixels.shape != (count, 3, side, side) or aspect.shape != (count,):
        return None
    return pixels, aspect


def _decode_to_cache(rows: Rows, side: int, target: Path, aspects: Path, progress: Report) -> None:
    delete_abandoned(target.parent)
    with replacing_cached(target) as partial:
        pixels = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=(len(rows), 3, side, side))
        if hasattr(os, "posix_fallocate"):  # writing to a mapped file on a full disk would kill the process
            with open(partial, "rb+") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        aspect = _decode_all(rows, side, pixels, progress)
        pixels.flush()
        del pixels
        save_array(aspects, aspect)


def _in_memory(rows: Rows, side: int, progress: Report) -> tuple[np.ndarray, np.ndarray]:
    shape = (len(rows), 3, side, side)
    try:
        pixels = np.empty(shape, dtype=np.uint8)
    except MemoryError:
        raise ImageError(
            f"{rows.path}: {np.prod(shape) / 1e9:.1f} GB of pixels fit neither in the cache nor in memory; set "
            "VQPROMPT_HOME to a folder with space, or choose a smaller size"
        ) from None
    return pixels, _decode_all(rows, side, pixels, progress)


def _decode_all(rows: Rows, side: int, pixels: np.ndarray | None, progress: Report) -> np.ndarray:
    """Fill `pixels`, if there are any, in threads; returns the aspect ratios of all images [n]. Those that cannot be
    used are named in one error."""
    problems, count, aspects = list[str](), len(rows), np.empty(len(rows), np.float32)

    def guarded(row: int) -> None:
        try:
            content, where = _content(rows, row), rows.where(row)
            if pixels is None:
                aspects[row] = aspect_of(content, where)
            else:
                pixels[row], aspects[row] = decode_pixels(content, where, side)
        except ImageError as error:
            problems.append(str(error))

    with closing(parallel(guarded, range(count), cpu_cores())) as work:  # Pillow releases the GIL while it decodes
        for done, _ in enumerate(work, start=1):
            progress(Progress(Stage.DECODING, done, count))
    if problems:
        shown = "\n  ".join(sorted(problems)[:10])
        more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ImageError(f"{rows.path}: {len(problems)} of {count} images cannot be used:\n  {shown}{more}")
    return aspects


def _content(rows: Rows, row: int) -> bytes:
    try:
        return rows.read(row)
    except OSError as error:
        raise ImageError(f"{rows.where(row)}: cannot be read ({error}); replace the file or take it out") from None


# ---------------------------------------------------------------------------------------------- more images than fit


class StreamedStore(Store):
    """Decoded images that do not all fit: decoded when they are needed, and kept on disk up to a limit.

    The header of every image is read once, for its aspect ratio; what is no image, or is too large, is named then. As
    many decoded images as the limit allows are kept in a temporary file: those that were read first. They stay, because
    in training every image comes again after all others; replacing the oldest ones would mean that none is ever found.

    groups: [n], images that are read together, if reading them one by one would be slow; else None.
    """

    def __init__(self, rows: Rows, side: int, progress: Report, groups: np.ndarray | None = None) -> None:
        self.rows, self.side, self.count = rows, side, len(rows)
        name = hashlib.sha256(f"{side}:{rows.key}".encode()).hexdigest()[:24]
        file = cache_folder() / "images" / f"{name}.aspect.npy"
        aspect = load_array(file)
        if aspect is None or aspect.shape != (self.count,):
            aspect = _decode_all(rows, side, None, progress)
            keep_array(file, aspect)
        # without a fingerprint: what is computed from so many images would fill the disk too
        super().__init__(np.zeros((0, 3, side, side), np.uint8), aspect, "")
        self.groups = groups
        self._slots = np.full(self.count, -1, np.int32)  # where each row is in the file
        self._lock, self._used, self._room = threading.Lock(), 0, 0
        with suppress(OSError):  # no cache: everything is decoded every time
            self._file = temporary_file()
            free = shutil.disk_usage(cache_folder()).free
            self._room = int(min(CACHE_GB.value * 1e9, free / 2) // (3 * side * side))

    def __len__(self) -> int:
        return self.count

    def read(self, rows: np.ndarray) -> Tensor:
        pixels = np.empty((len(rows), 3, self.side, self.side), np.uint8)
        order = np.argsort(rows, kind="stable")
        for _ in parallel(lambda place: self._fill(pixels[place], int(rows[place])), order):
            pass
        return torch.from_numpy(pixels)

    def on_device(self, device: torch.device) -> None:
        """Never: they do not fit."""

    def digest(self, rows: np.ndarray) -> str:
        """Changes with the content of the files. (For the pixels, all images would have to be decoded.)"""
        return "files:" + hashlib.sha256(f"{self.rows.key}:".encode() + rows.tobytes()).hexdigest()[:16]

    def _fill(self, pixels: np.ndarray, row: int) -> None:
        if (slot := int(self._slots[row])) >= 0:
            data = read_at(self._file, slot * pixels.nbytes, pixels.nbytes)
            pixels[:] = np.frombuffer(data, np.uint8).reshape(pixels.shape)
        else:
            pixels[:] = decode_pixels(_content(self.rows, row), self.rows.where(row), self.side)[0]
            self._keep(row, pixels)

    def _keep(self, row: int, pixels: np.ndarray) -> None:
        with self._lock:
            if self._used >= self._room or self._slots[row] >= 0:
                return
            slot, self._used = self._used, self._used + 1
        try:
            write_at(self._file, slot * pixels.nbytes, pixels.tobytes())
        except OSError:  # the disk is full: no more are kept
            self._room = 0
            return
        self._slots[row] = slot  # last, so that no thread reads pixels that are not written yet

"""Images as people have them (folders, zips, arrays), decoded once into a compact uint8 store.

The store is one memory-mapped array [N, C, S, S] of whole images squashed to a square, with each image's true aspect
ratio beside it (views.py undoes the squashing when it crops). It lives in the cache folder under a key made from the
content listing, need not fit in memory, and is written whole or not at all. Decoding every image once, before
anything is learned, is also what finds the broken ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vqprompt.data.decode import decode, to_pixels
from vqprompt.data.source import ImageSource
from vqprompt.errors import ImageError
from vqprompt.files import A_DAY, cache_folder, save_array
from vqprompt.progress import Progress, Report, Stage, ignore


class Store:
    """Decoded images: uint8 [N, C, S, S], their aspect ratios [N] and a fingerprint of the content ("": nameless)."""

    def __init__(self, pixels: np.ndarray, aspect: np.ndarray, fingerprint: str) -> None:
        self.pixels, self.fingerprint = pixels, fingerprint
        self.identity = fingerprint or uuid.uuid4().hex  # no two nameless stores are taken for one another
        self.aspect = torch.from_numpy(np.ascontiguousarray(aspect)).float()
        self._resident: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: np.ndarray) -> Tensor:
        """Pixels of some rows, in memory. Sorted reads keep a disk-backed store sequential."""
        order = np.argsort(rows, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return torch.from_numpy(np.ascontiguousarray(self.pixels[rows[order]][back]))

    def on_device(self, device: torch.device) -> Tensor | None:
        """All pixels on the accelerator, where a third of its free memory holds them; else None."""
        if device.type != "cuda":
            return None
        if device not in self._resident:
            if self.pixels.nbytes > torch.cuda.mem_get_info(device)[0] // 3:
                return None
            self._resident[device] = torch.from_numpy(np.ascontiguousarray(self.pixels)).to(device)
        return self._resident[device]


def build_store(source: ImageSource, side: int, progress: Report = ignore) -> Store:
    """The decoded store of a source: from the cache when the listing is unchanged, else decoded now."""
    listing = json.dumps([side, [(e.path, e.stamp) for e in source.entries]])
    fingerprint = hashlib.sha256((listing + source.key).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = cache_folder() / "images"
    target, aspects = folder / f"{fingerprint}.npy", folder / f"{fingerprint}.aspect.npy"
    if not (target.exists() and aspects.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        _decode_all(source, side, target, aspects, progress)
    return Store(np.load(target, mmap_mode="c"), np.load(aspects), fingerprint)


def _decode_all(source: ImageSource, side: int, target: Path, aspects: Path, progress: Report) -> None:
    entries = source.entries
    for stale in target.parent.glob("*.partial.npy"):  # left by a process that was killed while it decoded
        if time.time() - stale.stat().st_mtime > A_DAY:
            stale.unlink(missing_ok=True)
    partial = target.with_name(f"{target.stem}.{os.getpid()}.partial.npy")
    pixels = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=(len(entries), 3, side, side))
    aspect = np.empty(len(entries), dtype=np.float32)
    problems: list[str] = []

    def work(i: int) -> None:
        try:
            image = decode(source.read(entries[i]), entries[i].path)
            aspect[i] = image.width / image.height
            pixels[i] = to_pixels(image, side)
        except ImageError as error:
            problems.append(str(error))
        except (
            OSError,
            zipfile.BadZipFile,
            zlib.error,
            RuntimeError,
        ) as error:  # RuntimeError: encrypted, or odd method
            problems.append(f"{entries[i].path}: cannot be read ({error}); replace the file or take it out")

    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # Pillow lets go of the GIL while it decodes
            for done, _ in enumerate(pool.map(work, range(len(entries)), chunksize=16), start=1):
                progress(Progress(Stage.DECODING, done, len(entries)))
        if problems:
            shown = "\n  ".join(sorted(problems)[:10])
            more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise ImageError(
                f"{source.path}: {len(problems)} of {len(entries)} images cannot be used:\n  {shown}{more}"
            )
        pixels.flush()
        save_array(aspects, aspect)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)

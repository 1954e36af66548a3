"""Images as people have them (folders, zips, arrays), decoded once into a compact uint8 store.

The store is one memory-mapped array [N, C, S, S] of whole images squashed to a square, with each image's true aspect
ratio beside it (views.py undoes the squashing when it crops). It lives in the cache folder under a key made from the
content listing, need not fit in memory, and is written whole or not at all. Decoding every image once, before
anything is learned, is also what finds the broken ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import time
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vqprompt.archives import Files
from vqprompt.errors import ImageError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jfif"}
A_DAY = 24 * 3600
MAX_PIXELS = 100_000_000  # beyond this an image is more likely a decompression bomb than a photograph

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do in all, and what is being done."""


def no_progress(done: int, total: int, what: str) -> None: ...


def cache_folder() -> Path:
    """Where decoded images, queries and weights are kept."""
    return Path(os.environ.get("VQPROMPT_HOME") or "~/.cache/vqprompt").expanduser()


def save_array(path: Path, array: np.ndarray) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial.npy")
    np.save(partial, array)
    os.replace(partial, path)


# ---------------------------------------------------------------------------------------------- one image


def decode(data: bytes, name: str) -> Image.Image:
    """Any common image file to an RGB image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit, below, is stricter
            image = Image.open(io.BytesIO(data))
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ImageError(
                f"{name}: {width}×{height} pixels is more than the {MAX_PIXELS // 10**6} megapixels accepted "
                "(a decompression bomb?); shrink it or take it out"
            )
        return to_rgb(image)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: {error}; shrink it or take it out") from None
    except Exception as error:  # decoders stumble over damaged files in every way there is
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else f"damaged image ({error})"
        raise ImageError(f"{name}: {reason}; replace the file or take it out") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright, 8 bits, three channels; transparency becomes white paper."""
    with suppress(struct.error, SyntaxError, ValueError, TypeError, KeyError):  # damaged EXIF: then it stays as it lies
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # 16- and 32-bit grey: Pillow would clip, not scale
        values = np.asarray(image, dtype=np.float64)
        top = 65535 if image.mode != "F" else max(1.0, float(values.max()))
        return Image.fromarray((values / top * 255).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image).convert("RGB")
    return image.convert("RGB")


def to_pixels(image: Image.Image, side: int) -> np.ndarray:
    """RGB image to uint8 [3, side, side], squashed."""
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


# ---------------------------------------------------------------------------------------------- many images


@dataclass(frozen=True)
class Entry:
    """One image file: its path inside the source, its class, and its split where the source has one."""

    path: str
    label: str
    split: str | None
    stamp: str  # changes when the content does


class ImageSource(Protocol):
    """What a store can be built from. key: what identifies the images besides their paths and stamps."""

    path: Path
    entries: list[Entry]

    @property
    def key(self) -> str: ...

    def read(self, entry: Entry) -> bytes: ...


class Source:
    """A folder, zip or tar of `train/<class>/…` + `test/<class>/…`, or of `<class>/…`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise ImageError(f"{path}: no such folder or zip file; give the folder that holds one folder per class")
        self.files = Files(self.path, cache_folder() / "unpacked")
        self.ignored: list[str] = []
        self.entries = self._list()

    @property
    def key(self) -> str:
        return self.files.key

    def read(self, entry: Entry) -> bytes:
        return self.files.read(entry.path)

    def _list(self) -> list[Entry]:
        files = [(p, s) for p, s in self.files.stamps.items() if not hidden(p)]
        folders = [f for f in self.files.folders if not hidden(f)]
        images = [p for p, _ in files if Path(p).suffix.lower() in SUFFIXES]
        prefix = _common_folder(images, folders)
        splits = {p[len(prefix) :].split("/")[0] for p, _ in files} | {f[len(prefix) :].split("/")[0] for f in folders}
        has_splits = {"train", "test"} <= splits
        if lone := not has_splits and splits & {"train", "test"}:
            (split,) = lone
            inside = [p[len(prefix) :] for p in images if p[len(prefix) :].startswith(f"{split}/")]
            if inside and all(p.count("/") > 1 for p in inside):  # else it is a class: railway images, say
                raise ImageError(
                    f"{self.path}: has {split}/ but no {'test' if split == 'train' else 'train'}/; add it, "
                    "or give the class folders alone, and 20 % of each class will be held out to test with"
                )
        depth = 2 if has_splits else 1  # folders above an image: split/class or class
        entries = []
        for path, stamp in files:
            parts = path[len(prefix) :].split("/")
            if Path(path).suffix.lower() not in SUFFIXES:
                self.ignored.append(path)
            elif len(parts) > depth and (not has_splits or parts[0] in ("train", "test")):
                entries.append(Entry(path, parts[depth - 1], parts[0] if has_splits else None, stamp))
            elif not has_splits:
                raise ImageError(
                    f"{self.path}: the image {path!r} is not inside a class folder; "
                    "expected <class>/<image>, or train/<class>/<image> and test/<class>/<image>"
                )
            else:
                self.ignored.append(path)
        if not entries:
            raise ImageError(
                f"{self.path}: no image found; expected <class>/<image>, or train/<class>/<image> and "
                f"test/<class>/<image>, with images ending in {' '.join(sorted(SUFFIXES))}"
            )
        filled = {(e.split, e.label) for e in entries}
        for folder in folders:
            parts = folder[len(prefix) :].split("/")
            if folder.startswith(prefix) and len(parts) == depth and parts[-1]:
                within = parts[0] if has_splits else None
                if within in (None, "train", "test") and (within, parts[-1]) not in filled:
                    raise ImageError(f"{self.path}: the class folder {folder!r} has no image; fill it or take it out")
        return entries


def hidden(path: str) -> bool:
    """What systems leave behind, not people."""
    return any(part.startswith((".", "__MACOSX")) for part in path.split("/"))


def _common_folder(images: Sequence[str], folders: Sequence[str]) -> str:
    """Archives often wrap everything in one folder, even two. A wrapper is not train/ or test/, and no image lies
    directly in it."""
    prefix = ""
    while True:
        inside = [p[len(prefix) :] for p in images]
        tops = {p.split("/")[0] for p in [*inside, *(f[len(prefix) :] for f in folders if len(f) > len(prefix))]}
        if len(tops) != 1 or tops & {"train", "test"} or not inside or min(p.count("/") for p in inside) < 2:
            return prefix
        prefix += tops.pop() + "/"


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


def build_store(source: ImageSource, side: int, progress: Progress = no_progress) -> Store:
    """The decoded store of a source: from the cache when the listing is unchanged, else decoded now."""
    listing = json.dumps([side, [(e.path, e.stamp) for e in source.entries]])
    fingerprint = hashlib.sha256((listing + source.key).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = cache_folder() / "images"
    target, aspects = folder / f"{fingerprint}.npy", folder / f"{fingerprint}.aspect.npy"
    if not (target.exists() and aspects.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        _decode_all(source, side, target, aspects, progress)
    return Store(np.load(target, mmap_mode="c"), np.load(aspects), fingerprint)


def _decode_all(source: ImageSource, side: int, target: Path, aspects: Path, progress: Progress) -> None:
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
                progress(done, len(entries), "decoding images")
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

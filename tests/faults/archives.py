"""Damaged archives: the same images as before, or an error. Never fewer images, never other ones."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import random
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from faults.damage import damaged
from vqprompt.research.datasets import open_dataset

SIZE = 14
KINDS = [
    *(f"zip-{method}" for method in ("stored", "deflated", "bzip2", "lzma")),
    *(f"tar-{kind}-{packed}" for kind in ("ustar", "gnu", "pax") for packed in ("", "gz", "bz2", "xz")),
]
METHODS = {
    "stored": zipfile.ZIP_STORED,
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@functools.cache
def members() -> dict[str, bytes]:
    rng, found = np.random.default_rng(0), {}
    for label in ("cat", "größe"):
        for i in range(3):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).save(buffer, "PNG")
            found[f"data/{label}/{i}.png"] = buffer.getvalue()
    found["data/README.txt"] = b"about these images"
    return found


@functools.cache
def whole_archive(kind: str) -> bytes:
    buffer = io.BytesIO()
    family, *rest = kind.split("-")
    if family == "zip":
        with zipfile.ZipFile(buffer, "w", METHODS[rest[0]]) as archive:
            for name, data in members().items():
                archive.writestr(name, data)
    else:
        with tarfile.open(fileobj=buffer, mode=f"w:{rest[1]}", format=FORMATS[rest[0]]) as archive:
            for name, data in members().items():
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(data), 1.5 if rest[0] == "pax" else 1
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def content(path: Path, pixels: bool) -> list[tuple[str, str]]:
    """Class and pixels of every image."""
    dataset = open_dataset(str(path), SIZE)
    digests = [hashlib.sha256(p.tobytes()).hexdigest() if pixels else "" for p in dataset.store.pixels]
    return sorted((dataset.classes[c], d) for c, d in zip(dataset.labels, digests, strict=True))


def try_archive(rng: random.Random, folder: Path) -> str:
    """One damaged archive, opened as a data set."""
    kind = rng.choice(KINDS)
    checked = kind.startswith("zip") or not kind.endswith("-")  # a plain tar has checksums for its headers alone
    os.environ["VQPROMPT_HOME"] = str(folder / "home")
    reference = _reference(kind, checked, folder)
    path = folder / f"x.{'zip' if kind.startswith('zip') else 'tar'}"
    path.write_bytes(damaged(whole_archive(kind), rng))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = content(path, checked)
    return "handled" if found == reference else f"bad: {kind}: {len(found)} images of {len(reference)}, or others"


_references: dict[tuple[str, bool], list[tuple[str, str]]] = {}


def _reference(kind: str, checked: bool, folder: Path) -> list[tuple[str, str]]:
    if (kind, checked) not in _references:
        path = folder / f"whole.{'zip' if kind.startswith('zip') else 'tar'}"
        path.write_bytes(whole_archive(kind))
        _references[kind, checked] = content(path, checked)
    return _references[kind, checked]

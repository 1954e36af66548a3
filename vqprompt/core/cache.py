"""The cache: arrays and other files that can be made again. Private to the user, with checksums, without names.

- Files are named by the SHA-256 of what they were made from. No file name and no class name is kept.
- Every file ends with a checksum. One that fails its check is never used.
- Folders are open to their owner only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.core.files import make_folder, open_regular, read_at, replacing

PARTS = {
    "images": "decoded images", "queries": "features", "unpacked": "unpacked archives", "hashes": "hashes of files",
    "kernels": "compiled kernels",
}  # fmt: skip


def cache_folder() -> Path:
    """The folder where decoded images, queries and weights are kept: VQPROMPT_HOME, or the system's own for caches."""
    from platformdirs import user_cache_path  # here, because most commands do not need it

    folder = Path(os.environ.get("VQPROMPT_HOME") or user_cache_path("vqprompt", appauthor=False)).expanduser()
    with suppress(OSError):
        if folder.is_file():
            raise UserError(f"{folder}: the cache must be a folder, but this is a file; set VQPROMPT_HOME to a folder")
    return folder


@dataclass(frozen=True)
class CachePart:
    """One kind of files in the cache."""

    what: str
    folder: Path
    files: int
    size: int  # bytes


def list_cache() -> list[CachePart]:
    """Everything in the cache that can be made again. (Weights and data sets that were downloaded are not listed.)"""
    parts = []
    for name, what in PARTS.items():
        folder, sizes = cache_folder() / name, list[int]()
        for file in folder.rglob("*"):
            with suppress(OSError):  # another process may delete or replace it at this moment
                sizes += [file.stat().st_size] if file.is_file() else []
        parts.append(CachePart(what, folder, len(sizes), sum(sizes)))
    return parts


def clear_cache() -> None:
    """Delete everything in the cache that can be made again when it is needed."""
    for part in list_cache():
        if part.folder.is_dir():
            shutil.rmtree(part.folder)


def temporary_file(size: int = 0, anywhere: bool = False) -> BinaryIO:
    """A file in the cache folder that only this process can read. The system deletes it when the process ends, even if
    it is killed.

    Raises OSError if no such file can be made, or if `size` bytes are more than half of the free space on the disk.
    anywhere: where the cache cannot be written to, take the system's folder for temporary files.
    """
    folder = cache_folder()
    try:
        make_folder(folder)
        if size > shutil.disk_usage(folder).free / 2:
            raise OSError(errno.ENOSPC, f"{size:,} bytes are more than half of the free space", str(folder))
        return tempfile.TemporaryFile(dir=folder, prefix=".temporary-")
    except OSError:
        if not anywhere:
            raise
        return tempfile.TemporaryFile()


# ---------------------------------------------------------------------------------------------- checksums

MARK = b"vqp-sum1"  # a sealed file ends with this mark, the length of its content and the checksum
TICK = 2.0  # seconds: changes of a file within them may not change its times, on the coarsest file systems
FOOTER = len(MARK) + 8 + 32
PIECE = 16 << 20  # bytes that one thread hashes at a time
READ = 256 << 10  # bytes per read: few enough to stay in the processor's cache
_verified: dict[tuple[Any, ...], int] = {}


def _digest(file: BinaryIO, length: int, name: str) -> bytes:
    """SHA-256 over the SHA-256 of each piece, the length and the name. Pieces are hashed by several threads.

    The name is part of it, so two files that changed places are noticed.
    """

    def piece(start: int) -> bytes:
        digest, end = hashlib.sha256(), min(start + PIECE, length)
        for place in range(start, end, READ):
            digest.update(read_at(file, place, min(READ, end - place)))
        return digest.digest()

    whole = hashlib.sha256(f"{name}:{length}:".encode("utf-8", "surrogateescape"))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for part in pool.map(piece, range(0, length, PIECE)):
            whole.update(part)
    return whole.digest()


@contextmanager
def replacing_cached(path: Path) -> Iterator[Path]:
    """`replacing` for a file of the cache: private to this user, with a checksum at its end."""
    with replacing(path, private=True) as partial:
        yield partial
        with open(partial, "rb+") as file:
            length = file.seek(0, os.SEEK_END)
            digest = _digest(file, length, path.name)
            file.seek(length)
            file.write(MARK + length.to_bytes(8, "little") + digest)


def sealed_length(path: Path) -> int | None:
    """The length of a sealed file's content if its checksum is right, else None. Checked once per process.

    A missing file gives None silently; a damaged one also gives a warning, because it will be made again.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            key = (str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if key in _verified:
                return _verified[key]
            length = max(0, status.st_size - FOOTER)
            footer = read_at(file, length, FOOTER)
            if footer == MARK + length.to_bytes(8, "little") + _digest(file, length, path.name):
                if time.time() - status.st_ctime > TICK:
                    _verified[key] = length
                return length
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{path}: the cached file cannot be read ({error}) and is made again", stacklevel=3)
        return None
    warnings.warn(f"{path}: the cached file is damaged (wrong checksum) and is made again", stacklevel=3)
    return None


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array with a checksum, whole or not at all."""
    with replacing_cached(path) as partial, open(partial, "wb") as file:
        np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def load_array(path: Path, mapped: bool = False) -> np.ndarray | None:
    """What `save_array` wrote, or None if it is missing or fails its check (then with a warning).

    mapped: map the file into memory copy-on-write instead of reading it. It is still read once, to be checked.
    """
    if sealed_length(path) is None:
        return None
    array: np.ndarray = np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)
    return array


def keep_array(path: Path, array: np.ndarray) -> None:
    """`save_array` into the cache. Where the cache cannot be written to, warn once and go on without it."""
    try:
        save_array(path, array)
    except OSError as error:
        warn_no_cache(error)


_warned: set[str] = set()


def warn_no_cache(error: BaseException) -> None:
    """Say once per cache folder and process that nothing can be kept there."""
    folder = str(cache_folder())
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(
            f"nothing is kept in the cache ({error}); set VQPROMPT_HOME to a folder with space, or go on more slowly",
            stacklevel=3,
        )

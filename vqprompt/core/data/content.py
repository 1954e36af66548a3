"""SHA-256 of files, remembered so that an unchanged file is not read again.

A remembered hash is used only while size, inode and both times of the file are the same. A program can set the time of
modification (mtime) back, but not the time of change (ctime). Two changes in quick succession may share a ctime, so the
hash of a file that changed in the last two seconds is not remembered. Files are known by their inode, not by name: the
cache keeps no names.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vqprompt.core.cache import TICK, cache_folder, keep_array, load_array
from vqprompt.core.files import open_regular, sha256_of


class ContentHashes:
    """Hashes of the files below one folder (or of one file)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:24]
        self.index = cache_folder() / "hashes" / f"{name}.npy"
        kept = load_array(self.index)  # [n, 3]: the file's inode; its size and times; its hash
        self.known = {} if kept is None else {inode: (state, digest) for inode, state, digest in kept.tolist()}
        self._new = False

    def of(self, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 of each file, by path relative to the root; "" for one that cannot be read (reading it later says
        why)."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            hashes = dict(zip(names, pool.map(self._one, names, chunksize=64), strict=True))
        self._save()
        return hashes

    def of_open(self, file: BinaryIO) -> str:
        """SHA-256 of the root itself, already open."""
        file.seek(0)
        digest = self._hash(file)
        self._save()
        return digest

    def remembers(self, file: BinaryIO, digest: str) -> bool:
        """Whether an open file is known to have this hash, without reading it."""
        inode, state = _state(file)
        return self.known.get(inode) == (state, digest.encode())

    def _one(self, name: str) -> str:
        try:
            with open_regular(self.root / name) as file:
                return self._hash(file)
        except (OSError, ValueError):
            return ""

    def _hash(self, file: BinaryIO) -> str:
        inode, state = _state(file)
        known = self.known.get(inode)
        if known is not None and known[0] == state:
            return known[1].decode()
        digest, now = sha256_of(file), time.time()
        if now - os.fstat(file.fileno()).st_ctime > TICK and _state(file) == (inode, state):
            self.known[inode] = state, digest.encode()
            self._new = True
        return digest

    def _save(self) -> None:
        if self._new:
            keep_array(self.index, np.array([(inode, *rest) for inode, rest in self.known.items()], "S"))
            self._new = False


def _state(file: BinaryIO) -> tuple[bytes, bytes]:
    """Which file it is, and what changes when its content does."""
    status = os.fstat(file.fileno())
    state = f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}".encode(), state.encode()

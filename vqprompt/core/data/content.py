"""SHA-256 of files, remembered so that an unchanged file is not read again.

A remembered hash is used only while size, inode and both times of the file are the same. A program can set the time of
modification (mtime) back, but not the time of change (ctime). Two changes in quick succession may share a ctime, so the
hash of a file that changed in the last two seconds is not remembered. Files are known by their inode, not by name: the
cache keeps no names.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vqprompt.core.cache import TICK, cache_folder, replacing_cached, sealed_length, warn_no_cache
from vqprompt.core.files import open_regular, sha256_of


class ContentHashes:
    """Hashes of the files below one folder (or of one file)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:24]
        self.index = cache_folder() / "hashes" / f"{name}.json"
        self.known = self._load()  # by the file's inode: its size and times, and its hash

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
        return self.known.get(inode) == [*state, digest]

    def _one(self, name: str) -> str:
        try:
            with open_regular(self.root / name) as file:
                return self._hash(file)
        except (OSError, ValueError):
            return ""

    def _hash(self, file: BinaryIO) -> str:
        inode, state = _state(file)
        known = self.known.get(inode)
        if known is not None and known[:-1] == state:
            return str(known[-1])
        digest, now = sha256_of(file), time.time()
        if now - os.fstat(file.fileno()).st_ctime > TICK and _state(file) == (inode, state):
            self.known[inode] = [*state, digest]
            self._new = True
        return digest

    def _load(self) -> dict[str, list[object]]:
        self._new = False
        with suppress(OSError, ValueError, RecursionError, TypeError):
            length = sealed_length(self.index)
            if length is not None:
                with open_regular(self.index) as file:
                    return {str(k): list(v) for k, v in json.loads(file.read(length)).items()}
        return {}

    def _save(self) -> None:
        if not self._new:
            return
        try:
            with replacing_cached(self.index) as partial:
                partial.write_text(json.dumps(self.known), encoding="utf-8")
        except OSError as error:
            warn_no_cache(error)
        self._new = False


def _state(file: BinaryIO) -> tuple[str, list[object]]:
    """Which file it is, and what changes when its content does."""
    status = os.fstat(file.fileno())
    return f"{status.st_dev}:{status.st_ino}", [status.st_size, status.st_mtime_ns, status.st_ctime_ns]

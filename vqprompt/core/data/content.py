"""SHA-256 of files, remembered so that an unchanged file is not read again.

A remembered hash is used only while size, inode and both times of the file are the same. A program can set the time of
modification (mtime) back, but not the time of change (ctime). Two changes in quick succession may share a ctime, so the
hash of a file that changed in the last two seconds is not remembered.
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

from vqprompt.core.files import (
    TICK,
    cache_folder,
    open_regular,
    replacing,
    seal,
    sealed_length,
    sha256_of,
    warn_no_cache,
)

Known = dict[str, list[object]]


class ContentHashes:
    """Hashes of the files below one folder (or of one file), by path relative to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:24]
        self.index = cache_folder() / "hashes" / f"{name}.json"
        self.known = self._load()

    def of(self, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 of each file; "" for one that cannot be read (reading it later says why)."""
        before = len(self.known)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            found = dict(zip(names, pool.map(self._one, names, chunksize=64), strict=True))
        if self._fresh or len(self.known) != before:
            self._save()
        return found

    def of_open(self, file: BinaryIO) -> str:
        """SHA-256 of the root itself, already open."""
        file.seek(0)
        found = self._hash("", file)
        self._save()
        return found

    def _one(self, name: str) -> str:
        try:
            with open_regular(self.root / name) as file:
                return self._hash(name, file)
        except (OSError, ValueError):
            return ""

    def _hash(self, name: str, file: BinaryIO) -> str:
        status = os.fstat(file.fileno())
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
        known = self.known.get(name)
        if known is not None and known[:-1] == state:
            return str(known[-1])
        found, now = sha256_of(file), time.time()
        after = os.fstat(file.fileno())
        if now - status.st_ctime > TICK and after.st_ctime_ns == status.st_ctime_ns:
            self.known[name] = [*state, found]
            self._fresh = True
        return found

    def _load(self) -> Known:
        self._fresh = False
        with suppress(OSError, ValueError, RecursionError, TypeError):
            length = sealed_length(self.index)
            if length is not None:
                with open_regular(self.index) as file:
                    return {str(k): list(v) for k, v in json.loads(file.read(length)).items()}
        return {}

    def _save(self) -> None:
        if not self._fresh:
            return
        try:
            with replacing(self.index) as partial:
                partial.write_text(json.dumps(self.known), encoding="utf-8")  # odd names as \\u escapes
                seal(partial, self.index.name)
        except OSError as error:
            warn_no_cache(error)
        self._fresh = False

"""Tar files, plain or compressed. A compressed one is decompressed once into the cache, within limits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from vqprompt.core.cache import cache_folder, replacing_cached, sealed_length, temporary_file, warn_no_cache
from vqprompt.core.data.archives import Files, refusing_damage
from vqprompt.core.data.limits import ENTRIES, UNPACKED_GB, check_ratio
from vqprompt.core.errors import ImageError, WriteError
from vqprompt.core.files import delete_abandoned, open_regular, read_at

BLOCK = tarfile.BLOCKSIZE
OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZ": bz2.open,
    b"\xfd7": lzma.open,
}  # by the first bytes


def is_tar(path: Path) -> bool:
    """Whether a file starts like a tar, compressed or not."""
    try:
        with open_regular(path) as file, _plain(file) as plain:
            tarfile.TarInfo.frombuf(plain.read(BLOCK), "utf-8", "surrogateescape")
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        return True  # an empty one
    except Exception:  # a decompressor may raise any error
        return False
    return True


def _plain(file: BinaryIO) -> Any:
    opener = OPENERS.get(file.read(2))
    file.seek(0)
    return opener(file, "rb") if opener else file


class TarFiles(Files):
    """A tar file. Its members are read from the plain tar by position. keep: leave that in the cache if it had to be
    made."""

    def __init__(self, path: Path, keep: bool = True) -> None:
        super().__init__(path)
        with refusing_damage(path):
            self._packed = self._archive = open_regular(path)
            self._file, self._length = self._packed, _size(self._packed)
            if self._packed.read(2) in OPENERS:
                self._file, self._length = self._kept() if keep else self._unpacked()
            self._list()

    def _kept(self) -> tuple[BinaryIO, int]:
        """The plain tar and its length: from the cache, or made now and left there, if there is a cache."""
        target = cache_folder() / "unpacked" / f"{self.key}.tar"
        length = sealed_length(target)
        if length is None:
            delete_abandoned(target.parent)
            try:
                with replacing_cached(target) as partial, open(partial, "wb") as plain:
                    _copy(self.path, self._packed, plain)
                length = sealed_length(target)
            except WriteError as error:
                warn_no_cache(error)
        return self._unpacked() if length is None else (open_regular(target), length)

    def _unpacked(self) -> tuple[BinaryIO, int]:
        """The plain tar in a temporary file, and its length."""
        plain = temporary_file(anywhere=True)
        _copy(self.path, self._packed, plain)
        return plain, plain.tell()

    def _list(self) -> None:
        members: dict[str, tarfile.TarInfo] = {}
        self._file.seek(0)
        with tarfile.open(fileobj=self._file, mode="r:", errorlevel=2) as archive:
            for member in archive:
                members[member.name.removeprefix("./")] = member
                if member.isreg() and not 0 <= member.size <= self._length - member.offset_data:
                    raise tarfile.ReadError(f"{member.name!r} claims {member.size:,} bytes, more than there are")
                ENTRIES.check(
                    str(self.path), f"a tar file of over {len(members) - 1:,} files", len(members), so_far=True
                )
            end = archive.offset
        self._check_end(end)
        self._members = {name: m for name, m in sorted(members.items()) if m.isreg()}  # no links, no devices
        self.sizes = {name: m.size for name, m in self._members.items()}
        self.folders = sorted(name for name, m in members.items() if m.isdir())

    def _check_end(self, end: int) -> None:
        """A tar ends with blocks of zeros. `tarfile` also stops, silently, at a damaged header."""
        if self._length - end < BLOCK:
            raise tarfile.ReadError("it has no end mark, so a part of it is missing")
        self._file.seek(end)
        for position in range(end, self._length, 1 << 20):
            if self._file.read(min(1 << 20, self._length - position)).strip(b"\0"):
                raise tarfile.ReadError(f"no file can be read from byte {end:,} on, but there is more")

    def offset(self, name: str) -> int:
        """Where a member's content begins in the plain tar."""
        if self._members[name].issparse():
            raise ImageError(f"{self.path}: {name!r} is a sparse member, not read here; pack it again without --sparse")
        return self._members[name].offset_data

    def close(self) -> None:
        self._file.close()
        self._packed.close()

    def _read(self, name: str) -> bytes:
        data = read_at(self._file, self.offset(name), self.sizes[name])
        if len(data) < self.sizes[name]:
            raise OSError("the archive ends too early")
        return data


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _copy(path: Path, packed: BinaryIO, plain: Any) -> None:
    """Decompress; refuse before the limits are passed."""
    packed.seek(0)
    whole, written = _size(packed), 0
    with _plain(packed) as stream:
        while piece := stream.read(1 << 20):
            written += len(piece)
            check_ratio(str(path), written, whole)
            UNPACKED_GB.check(str(path), f"over {written / 1e9:,.0f} GB unpacked", written / 1e9, so_far=True)
            plain.write(piece)
    plain.flush()

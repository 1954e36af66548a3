"""The files of a folder, a zip or a tar, by relative path.

- Nothing is unpacked into the file system, so nothing can escape from an archive.
- A compressed tar, which cannot be read at random, is decompressed once into the cache.
- An archive that is damaged is refused as a whole: what its directory lists must agree with what is there.
- Folders: regular files only, no links that lead out of the folder, and every directory once.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import tarfile
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from vqprompt.core.cache import cache_folder, replacing_cached, sealed_length, temporary_file, warn_no_cache
from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.limits import ENTRIES, UNPACKED_GB, check_file_size, check_ratio
from vqprompt.core.errors import ImageError, WriteError
from vqprompt.core.files import delete_abandoned, open_regular, read_at

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
FOLLOW_LINKS = "VQPROMPT_FOLLOW_LINKS"
BLOCK = tarfile.BLOCKSIZE
# by the first bytes
OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}


class Files:
    """The files of one folder or archive.

    sizes: bytes of each file, by path, in a fixed order. folders: paths of the folders (an archive may not name them).
    skipped: what is not read, such as a second link to the same folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: BinaryIO | None = None
        self._lock = threading.Lock()  # one file handle, many decoding threads
        self.sizes: dict[str, int] = {}
        self.folders: list[str] = []
        self.skipped: list[str] = []

    @property
    def names(self) -> KeysView[str]:
        return self.sizes.keys()

    @cached_property
    def key(self) -> str:  # not in the constructor, because hashing takes long and teaching does not need it
        """SHA-256 of an archive's content; "" for a folder."""
        if self._archive is None:
            return ""
        with self._lock:
            return ContentHashes(self.path).of_open(self._archive)

    def key_of(self, names: Sequence[str]) -> str:
        """Identifies some of the files: their content and their paths."""
        whole = hashlib.sha256(self.key.encode())
        for path, stamp in self._stamp(names).items():
            whole.update(f"{path}\0{stamp}\0".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    def _stamp(self, names: Sequence[str]) -> dict[str, str]:
        """For each file a text that changes when its content does (together with `key`)."""
        return {name: str(self.sizes[name]) for name in names}

    def read(self, name: str) -> bytes:
        """The content of one file. Raises OSError if it cannot be read, ImageError if it is too large."""
        check_file_size(name, self.sizes[name])
        try:
            return self._read(name)
        except (ImageError, OSError):
            raise
        except Exception as error:  # zip, zlib, LZMA and their own kinds; encrypted or unknown methods
            raise OSError(str(error) or type(error).__name__) from None

    def _read(self, name: str) -> bytes:
        raise NotImplementedError


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # a damaged archive may raise anything; decompressors have their own kinds
        raise ImageError(f"{path}: damaged archive ({error}); get it again") from None


def hidden(path: str) -> bool:
    """Whether a path is one that operating systems create, not people (such as .DS_Store)."""
    return any(part.startswith((".", "__MACOSX")) for part in path.split("/"))


def _reading_order(path: str) -> list[tuple[int, str]]:
    """Sorts the files of a folder before its subfolders, both by name."""
    *folders, name = path.split("/")
    return [*((1, folder) for folder in folders), (0, name)]


def open_files(path: Path, keep: bool = True) -> Files:
    """The files of a folder, a zip or a tar. keep: whether an unpacked tar may stay in the cache."""
    if path.is_dir():
        return FolderFiles(path)
    try:
        with open_regular(path) as file:
            zipped = zipfile.is_zipfile(file)
    except OSError as error:
        raise ImageError(f"{path}: cannot be opened ({error}); give a folder, a zip or a tar file") from None
    if zipped:
        return ZipFiles(path)
    if is_tar(path):
        return TarFiles(path, keep)
    raise ImageError(
        f"{path}: neither a folder nor a zip or tar file that is whole; copy it again, or give the folder that "
        "holds the class folders"
    )


# ---------------------------------------------------------------------------------------------- folders


class FolderFiles(Files):
    """A folder. Stamps are the SHA-256 of each file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.root = path.resolve()
        self.follow = os.environ.get(FOLLOW_LINKS, "").lower() in ("1", "true", "yes")
        self._hashes: ContentHashes | None = None
        self._stamps: dict[str, str] = {}
        try:
            self._walk()
        except OSError as error:
            raise ImageError(f"{path}: cannot be listed ({error}); check that you may read it") from None
        self.sizes = dict(sorted(self.sizes.items(), key=lambda item: _reading_order(item[0])))
        self.folders.sort()

    def _stamp(self, names: Sequence[str]) -> dict[str, str]:
        self._hashes = ContentHashes(self.path)
        self._stamps = self._hashes.of(names)
        return self._stamps

    def _read(self, name: str) -> bytes:
        with open_regular(self.path / name) as file:
            size = _size(file)
            check_file_size(name, size)
            data = file.read(size)  # a file of /proc says that its size is 0, and may never end
            stamp = self._stamps.get(name)
            unchanged = not stamp or self._hashes is None or self._hashes.remembers(file, stamp)
        if not unchanged and hashlib.sha256(data).hexdigest() != stamp:
            raise OSError("it changed while it was being read; run again when it is complete")
        return data

    def _walk(self) -> None:
        pending, visited, most = deque([""]), set[tuple[int, int]](), ENTRIES.value
        while pending and len(self.sizes) <= most:
            inside = pending.popleft()
            status = (self.path / inside).stat()
            if (status.st_dev, status.st_ino) in visited:
                self.skipped.append(inside)
                continue
            visited.add((status.st_dev, status.st_ino))
            if inside:
                self.folders.append(inside)
            with os.scandir(self.path / inside) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
            for entry in entries:
                name = f"{inside}/{entry.name}" if inside else entry.name
                if hidden(name):
                    continue
                if entry.is_symlink():
                    self._refuse_leading_out(name)
                if os.path.isdir(entry):  # noqa: PTH112 (DirEntry.is_dir raises for a link in a circle)
                    # real folders first, so that a link never takes the place of one
                    (pending.append if entry.is_symlink() else pending.appendleft)(name)
                else:
                    # 0 for what is missing or not a regular file (if it is ever read, the error says so)
                    self.sizes[name] = entry.stat().st_size if os.path.isfile(entry) else 0  # noqa: PTH113 (as above)
        ENTRIES.check(str(self.path), f"a folder of over {len(self.sizes) - 1:,} files", len(self.sizes), so_far=True)

    def _refuse_leading_out(self, name: str) -> None:
        """Refuse a link that leads out of the folder."""
        try:
            target = Path(os.path.realpath(self.path / name, strict=True))
        except OSError:  # a link to nowhere or in a circle: refused when it is read, if it is an image
            return
        if not self.follow and not target.is_relative_to(self.root):
            raise ImageError(
                f"{self.path}: the link {name!r} leads out of the folder, to {str(target)!r}; copy what you need into "
                f"the folder, or set {FOLLOW_LINKS}=1 if you trust it"
            )


# ---------------------------------------------------------------------------------------------- zips


class ZipFiles(Files):
    """A zip file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with refusing_damage(path):
            self._file = self._archive = open_regular(path)
            listed = count_listed(self._file)
            ENTRIES.check(str(path), f"a zip file of {listed:,} files", listed)
            self._zip = zipfile.ZipFile(self._file)
            self._list(listed)

    def _stamp(self, names: Sequence[str]) -> dict[str, str]:
        return {name: f"{self._infos[name].file_size}:{self._infos[name].CRC}" for name in names}

    def _list(self, listed: int) -> None:
        infos = sorted(self._zip.infolist(), key=lambda info: info.filename)
        self._infos = {info.filename: info for info in infos}
        if not len(infos) == len(self._infos) == listed:
            raise zipfile.BadZipFile(
                f"its directory lists {listed:,} files, {len(infos):,} were found, {len(self._infos):,} of them with "
                "different names"
            )
        total = sum(info.file_size for info in infos)
        UNPACKED_GB.check(str(self.path), f"{total / 1e9:,.0f} GB unpacked", total / 1e9)
        check_ratio(str(self.path), total, _size(self._file))
        for info in infos:
            with suppress(RuntimeError):  # encrypted, or packed in an unknown way: reading it says so
                self._zip.open(info).close()  # the name before the data must be the one that the directory gives
            if info.is_dir() and info.file_size:
                raise zipfile.BadZipFile(f"the folder {info.filename!r} has content")
            if info.is_dir():
                self.folders.append(info.filename.rstrip("/"))
            else:
                self.sizes[info.filename] = info.file_size

    def _read(self, name: str) -> bytes:
        info = self._infos[name]
        check_ratio(name, info.file_size, info.compress_size)
        with self._lock, self._zip.open(info) as member:
            data = member.read(info.file_size + 1)
        if len(data) != info.file_size:
            raise OSError(f"it has {len(data)} bytes, but the directory says {info.file_size}")
        return data


def count_listed(file: BinaryIO) -> int:
    """How many files the end record of a zip says there are; the directory must have room for just these. (`zipfile`
    reads this record but does not show it; tests/test_archives.py notices if it changes.)"""
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if not end:
        raise zipfile.BadZipFile("it has no end record")
    count, size = end[zipfile._ECD_ENTRIES_TOTAL], end[zipfile._ECD_SIZE]  # type: ignore[attr-defined]
    if end[zipfile._ECD_DISK_NUMBER] or end[zipfile._ECD_DISK_START]:  # type: ignore[attr-defined]
        raise zipfile.BadZipFile("it is one part of several")
    if size < 46 * count or size > count * (46 + 3 * 65535):
        raise zipfile.BadZipFile(f"its directory of {size} bytes cannot list {count} files")
    return int(count)


# ---------------------------------------------------------------------------------------------- tars


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

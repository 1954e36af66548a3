"""The files of a folder, a zip or a tar, by relative path: nothing is unpacked into the file system, so nothing can
escape from an archive. A compressed tar, which cannot be read at random, is decompressed once into the cache."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vqprompt.errors import ImageError

SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZ": bz2.open,
    b"\xfd7": lzma.open,
}  # by the first bytes


class Files:
    """
    stamps: what tells a changed file from an unchanged one, by path, in a fixed order.
    folders: paths of the folders (an archive may not name them).
    key: what else identifies the content: sizes and times do only within one folder, checksums do anywhere.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self.path, self.key = path, ""
        self.stamps: dict[str, str] = {}
        self.folders: list[str] = []
        self._zip: zipfile.ZipFile | None = None
        self._tar: tuple[Path, dict[str, tarfile.TarInfo]] | None = None
        if path.is_dir():
            self._list_folder()
        elif zipfile.is_zipfile(path):
            self._list_zip()
        elif _is_tar(path):
            self._list_tar(cache)
        else:
            raise ImageError(
                f"{path}: neither a folder nor a zip or tar file that is whole; copy it again, or give the folder that "
                "holds the class folders"
            )

    def read(self, name: str) -> bytes:
        if self._zip is not None:
            with self._lock:
                return self._zip.read(name)
        if self._tar is not None:
            file, members = self._tar
            with file.open("rb") as stream:
                stream.seek(members[name].offset_data)
                data = stream.read(members[name].size)
            if len(data) < members[name].size:
                raise OSError("the archive ends too early")
            return data
        return (self.path / name).read_bytes()

    def _list_folder(self) -> None:
        self.key = str(self.path.resolve())
        for folder, folders, names in os.walk(self.path, followlinks=True):
            folders.sort()
            self.folders += [(Path(folder) / name).relative_to(self.path).as_posix() for name in folders]
            for name in sorted(names):
                full = Path(folder) / name
                try:
                    status = full.stat()
                    stamp = f"{status.st_size}:{status.st_mtime_ns}"
                except OSError:  # a link to nowhere: refused when it is read, if it is an image at all
                    stamp = "missing"
                self.stamps[full.relative_to(self.path).as_posix()] = stamp

    def _list_zip(self) -> None:
        self._zip, self._lock = zipfile.ZipFile(self.path), threading.Lock()  # one file handle, many decoding threads
        for info in sorted(self._zip.infolist(), key=lambda i: i.filename):
            if info.is_dir():
                self.folders.append(info.filename.rstrip("/"))
            else:
                self.stamps[info.filename] = f"{info.file_size}:{info.CRC}"

    def _list_tar(self, cache: Path) -> None:
        status = self.path.stat()
        self.key = f"{self.path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
        try:
            plain = _decompressed(self.path, cache / f"{hashlib.sha256(self.key.encode()).hexdigest()[:24]}.tar")
            with tarfile.open(plain) as archive:
                members = {m.name.removeprefix("./"): m for m in archive}
        except (tarfile.TarError, OSError, EOFError, lzma.LZMAError) as error:
            raise ImageError(f"{self.path}: damaged archive ({error}); get it again") from None
        self._tar = plain, {name: m for name, m in sorted(members.items()) if m.isreg()}  # no links, no devices
        self.stamps = {name: f"{m.size}:{m.mtime}" for name, m in self._tar[1].items()}
        self.folders = sorted(name for name, m in members.items() if m.isdir())


def _is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (OSError, EOFError):
        return False


def _decompressed(path: Path, target: Path) -> Path:
    with path.open("rb") as file:
        opener = OPENERS.get(file.read(2))
    if opener is None:
        return path
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.partial")
        try:
            with opener(path, "rb") as packed, partial.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return target

"""Files on disk: read only if regular, written whole or not at all, locked.

- Pipes, sockets and devices, which could block for ever or never end, are refused.
- `replacing` is the one way to write: a partial file beside the target, synced to disk, then renamed over it.
- A lock is a file. The system releases it when the process ends, even if it is killed.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vqprompt.core.errors import UserError, WriteError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; anything else raises an OSError that says what it is, without waiting for it."""
    _check_regular(path.stat())  # before opening, because opening a device can have effects
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _check_regular(os.fstat(descriptor))  # and after, because it may have been replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file but a pipe, socket or device")


def read_regular(path: Path) -> bytes:
    """The content of a regular file. As much as its size says: files of /proc say 0, and some of them never end."""
    with open_regular(path) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def sha256_of(file: BinaryIO) -> str:
    """SHA-256 of a file from where it stands to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def read_text(path: Path) -> str:
    """The content of a regular text file in UTF-8, with or without a byte order mark. Raises OSError or ValueError."""
    return read_regular(path).decode("utf-8-sig")


def read_json(path: Path, advice: str = "restore it, or do the run again") -> Any:
    """The content of a JSON file: one that this package wrote, unless other advice is given."""
    try:
        return json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {advice}") from None


def exists(path: str | Path) -> bool:
    """Whether there is something at a path; False for one that cannot be (too long, a null byte)."""
    return os.path.exists(os.path.expanduser(path))  # noqa: PTH110, PTH111 (pathlib raises for these)


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file at a path; False for one that cannot be (too long, a null byte)."""
    return os.path.isfile(os.path.expanduser(path))  # noqa: PTH113, PTH111 (pathlib raises for these)


# ---------------------------------------------------------------------------------------------- parts of a file

_seeking = threading.Lock()  # for systems without pread: a file has one position for all threads


def read_at(file: BinaryIO, start: int, length: int) -> bytes:
    """Some bytes of a file. Threads can read at the same time."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), length, start)
    with _seeking:
        file.seek(start)
        return file.read(length)


def write_at(file: BinaryIO, start: int, data: bytes) -> None:
    """Write at a place of a file. Threads can write at the same time."""
    if hasattr(os, "pwrite"):
        os.pwrite(file.fileno(), data, start)
        return
    with _seeking:
        file.seek(start)
        file.write(data)
        file.flush()


# ---------------------------------------------------------------------------------------------- write

ABANDONED_AFTER = 24 * 3600  # seconds; for partial files of other hosts, whose processes cannot be looked up
HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"  # part of a partial file's name, beside the process number
CANNOT_WRITE = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some of your quota, or choose another place",
    errno.EFBIG: "choose a file system that takes large files",
    errno.EROFS: "choose a place that can be written to",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get permission, or choose another place"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a part of this path is a file; choose another place"),
    errno.EISDIR: "there is a folder of this name; move it away",
    errno.ENAMETOOLONG: "choose a shorter name (most systems allow 255 bytes per name)",
    errno.ELOOP: "its links go in a circle; choose another place",
    errno.EINVAL: "choose another place",
    errno.EIO: "check the disk, or choose another place",
}


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[Path]:
    """Yield a partial path to write to; when the block ends it is synced to disk and renamed to `path`.

    Readers see the old file or the whole new one, never a part. If the block raises, `path` stays as it was and the
    partial file is deleted. A disk that is full or may not be written to becomes a `WriteError` that says so.
    private: only this user may read the file and its folder.
    """
    with writing(path):
        make_folder(path.parent, private)
        if exists(path) and not path.is_file() and not path.is_dir():  # else a device would be replaced by a file
            raise OSError(errno.EINVAL, "it is a pipe, socket or device")
        partial = partial_path(path)
        try:
            yield partial
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            if private:
                partial.chmod(0o600)
            os.replace(partial, path)
            _sync_folder(path.parent)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            delete_abandoned(path.parent, path.name)


def partial_path(path: Path) -> Path:
    """A hidden name beside `path` for what is not finished or not to stay; `delete_abandoned` finds it after a kill."""
    return path.with_name(f".{path.name}.{HOST}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into a `WriteError` that names the path, the reason and the way out."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WriteError) or error.errno not in CANNOT_WRITE:
            raise
        raise WriteError(f"{path}: cannot be written ({error.strerror}); {CANNOT_WRITE[error.errno]}") from error


def make_folder(folder: Path, private: bool = False) -> None:
    """Make a folder and those above it. private: only this user may look into it, also if it was there before."""
    try:
        folder.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
    except FileNotFoundError:  # in some places, such as /proc, no folders can be made
        raise OSError(errno.EACCES, "no folder can be made here") from None
    if private and folder.stat().st_mode & 0o077:
        with suppress(PermissionError):  # it belongs to somebody else, who lets us write to it
            folder.chmod(0o700)


def check_writable(folder: Path) -> None:
    """Raise a WriteError now for what would otherwise fail after long work. The folder need not be there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{folder}: {there} is a file; give a folder")
    with writing(folder), suppress(FileNotFoundError):  # of places such as /proc; making the folder says more
        tempfile.TemporaryFile(dir=there).close()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power loss, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def delete_abandoned(folder: Path, name: str | None = None) -> None:
    """Delete partial files and folders (of one file, or of all in a folder) whose process was killed."""
    with suppress(OSError):
        for partial in folder.glob(f".{glob.escape(name)}.*.partial" if name is not None else "*.partial*"):
            host, number = [*partial.name.split(".")[-4:], "", ""][:2]
            with suppress(OSError):
                if host == HOST and number.isdecimal() and len(number) < 10:
                    from psutil import pid_exists  # here, because partial files of others are rare

                    abandoned = not pid_exists(int(number))
                else:
                    abandoned = time.time() - partial.stat().st_mtime > ABANDONED_AFTER
                if abandoned and partial.is_dir():
                    shutil.rmtree(partial, ignore_errors=True)
                elif abandoned:
                    partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


# ---------------------------------------------------------------------------------------------- locks

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # some network file systems have none


@contextmanager
def lock_file(path: Path, busy: str | None = None) -> Iterator[None]:
    """Hold the lock at `path`, which is created and deleted again.

    busy: what the error says if another process holds it. None: wait for that process.
    """
    from filelock import FileLock, Timeout  # here, because most commands do not need it

    lock = FileLock(path, timeout=-1 if busy is None else 0, thread_local=False)
    with writing(path.parent):
        make_folder(path.parent)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(busy) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes it when the lock is released
            path.unlink(missing_ok=True)  # while it is held: those who wait for it notice that it has no name any more
        lock.release()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder. It is created if missing, and deleted again if it stays empty."""
    busy = f"{folder}: another process is at work here; wait for it, or give another folder"
    try:
        with lock_file(folder / ".lock", busy):
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # fails, as intended, if it is not empty

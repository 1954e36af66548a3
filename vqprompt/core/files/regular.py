"""Read regular files. Pipes, sockets and devices, which could block for ever or never end, are refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any, BinaryIO

from vqprompt.core.errors import UserError


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


def read_json(path: Path) -> Any:
    """The content of a JSON file that this package wrote."""
    try:
        return json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or do the run again") from None


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

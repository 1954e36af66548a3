"""Files on disk: written whole or not at all, read only if regular, checked when they come from the cache.

- `replacing` is the one way to write: a partial file beside the target, synced to disk, then renamed over it.
- `lock_folder` lets one process at a time work in a folder.
- `save_array`/`load_array` keep arrays in the cache with a checksum. A file that fails the check is never used.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import socket
import stat
import time
import uuid
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from vqprompt.core.errors import UserError, WriteError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

A_DAY = 24 * 3600
TICK = 2.0  # seconds: two changes within it may leave a file with the same times, on the coarsest file systems
HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"  # process numbers mean something on one host only
CANNOT_WRITE = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some of your quota, or choose another place",
    errno.EFBIG: "choose a file system that takes large files",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "get permission to write there, or choose another place",
    errno.EPERM: "get permission to write there, or choose another place",
    errno.ENOTDIR: "a part of this path is a file; choose another place",
    errno.EEXIST: "a part of this path is a file; choose another place",
    errno.EISDIR: "there is a folder of this name; move it away",
    errno.ENAMETOOLONG: "choose a shorter name (most systems allow 255 bytes per name)",
    errno.ELOOP: "its links go in a circle; choose another place",
    errno.EIO: "check the disk, or choose another place",
}


def cache_folder() -> Path:
    """The folder where decoded images, queries and weights are kept: VQPROMPT_HOME, or ~/.cache/vqprompt."""
    folder = Path(os.environ.get("VQPROMPT_HOME") or "~/.cache/vqprompt").expanduser()
    with suppress(OSError):
        if folder.is_file():
            raise UserError(f"{folder}: the cache must be a folder, but this is a file; set VQPROMPT_HOME to a folder")
    return folder


# ---------------------------------------------------------------------------------------------- write


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a partial path to write to; when the block ends it is synced to disk and renamed to `path`.

    Readers see the old file or the whole new one, never a part. If the block raises, `path` stays as it was and the
    partial file is deleted. A disk that is full or may not be written to becomes a `WriteError` that says so.
    """
    with writing(path):
        _make_folder(path.parent)
        partial = partial_path(path)
        try:
            yield partial
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # in some places, such as /proc, no folders can be made
        raise OSError(errno.EACCES, "no folder can be made here") from None


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
        for partial in folder.glob(f".{_escaped(name)}.*.partial" if name is not None else "*.partial*"):
            host, number = [*partial.name.split(".")[-4:], "", ""][:2]
            with suppress(OSError):
                if host == HOST and number.isdecimal():
                    abandoned = not _is_running(int(number))
                else:
                    abandoned = time.time() - partial.stat().st_mtime > A_DAY
                if abandoned and partial.is_dir():
                    shutil.rmtree(partial, ignore_errors=True)
                elif abandoned:
                    partial.unlink(missing_ok=True)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, but belongs to somebody else
        return True
    return True


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


def save_tensors(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    from safetensors import SafetensorError  # here, because importing torch takes seconds
    from safetensors.torch import save_file

    with replacing(path) as partial:
        room = partial_path(path)  # safetensors makes a temporary file beside its target, and a kill leaves it
        room.mkdir()
        try:
            save_file(tensors, room / "tensors", metadata=metadata)
            os.replace(room / "tensors", partial)
        except SafetensorError as error:  # its errors of the system carry the number in their text
            for number in CANNOT_WRITE:
                if f"os error {number})" in str(error):
                    raise OSError(number, os.strerror(number)) from error
            raise
        finally:
            shutil.rmtree(room, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder. It is created if missing, and deleted again if it stays empty."""
    with writing(folder):
        _make_folder(folder)
        lock = folder / ".lock"
        file = open(lock, "w")  # noqa: SIM115 (closed below)
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it, however the process ends
            except BlockingIOError:
                raise UserError(
                    f"{folder}: another process is at work here; wait for it, or give another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink(missing_ok=True)
                folder.rmdir()  # fails, as intended, if it is not empty


# ---------------------------------------------------------------------------------------------- read


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read. Pipes, sockets and devices, which could block for ever, raise OSError."""
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
        raise OSError("it is not a regular file but a pipe, socket or device")


def exists(path: str | Path) -> bool:
    """Whether there is something at a path; False for one that cannot be (too long, a null byte)."""
    return os.path.exists(os.path.expanduser(path))  # noqa: PTH110, PTH111 (pathlib raises for these)


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file at a path; False for one that cannot be (too long, a null byte)."""
    return os.path.isfile(os.path.expanduser(path))  # noqa: PTH113, PTH111 (pathlib raises for these)


def read_json(path: Path) -> Any:
    """The content of a JSON file that this package wrote."""
    try:
        with open_regular(path) as file:
            return json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or do the run again") from None


# ---------------------------------------------------------------------------------------------- checksums

MARK = b"vqp-sum1"  # a sealed file ends with this mark, the length of its content and the checksum
FOOTER = len(MARK) + 8 + 32
PIECE = 16 << 20  # bytes that one thread hashes at a time
READ = 256 << 10  # bytes per read: few enough to stay in the processor's cache
_verified: dict[tuple[Any, ...], int] = {}


def sha256_of(file: BinaryIO) -> str:
    """SHA-256 of a file from where it stands to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _digest(file: BinaryIO, length: int, name: str) -> bytes:
    """SHA-256 over the SHA-256 of each piece, the length and the name. Pieces are hashed by several threads.

    The name is part of it, so two files that changed places are noticed.
    """

    def piece(start: int) -> bytes:
        found, end = hashlib.sha256(), min(start + PIECE, length)
        for place in range(start, end, READ):
            found.update(read_at(file, place, min(READ, end - place)))
        return found.digest()

    whole = hashlib.sha256(f"{name}:{length}:".encode("utf-8", "surrogateescape"))
    if length <= PIECE or not hasattr(os, "pread"):
        for start in range(0, length, PIECE):
            whole.update(piece(start))
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for part in pool.map(piece, range(0, length, PIECE)):
                whole.update(part)
    return whole.digest()


def read_at(file: BinaryIO, start: int, length: int) -> bytes:
    """Some bytes of a file; where the system can, without moving its position, so that threads can read at once."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), length, start)
    file.seek(start)
    return file.read(length)


def seal(path: Path, name: str) -> None:
    """Append a checksum to a file that will be called `name`."""
    with open(path, "rb+") as file:
        length = file.seek(0, os.SEEK_END)
        file.write(MARK + length.to_bytes(8, "little") + _digest(file, length, name))


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
            old = not footer.startswith(MARK) and _is_plain_array(file, status.st_size)
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{path}: the cached file cannot be read ({error}) and is made again", stacklevel=3)
        return None
    if not old:  # a file of an earlier version has no checksum; it is made again silently
        warnings.warn(f"{path}: the cached file is damaged (wrong checksum) and is made again", stacklevel=3)
    return None


def _is_plain_array(file: BinaryIO, size: int) -> bool:
    try:
        file.seek(0)
        version = np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file) if version == (1, 0) else ((), False, np.dtype("O"))
        return file.tell() + int(np.prod(shape, dtype=np.float64)) * dtype.itemsize == size
    except Exception:  # numpy evaluates the header as Python, and fails as Python does
        return False


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array with a checksum, whole or not at all."""
    with replacing(path) as partial:
        with open(partial, "wb") as file:
            np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
        seal(partial, path.name)


def load_array(path: Path, mapped: bool = False) -> np.ndarray | None:
    """What `save_array` wrote, or None if it is missing or fails its check (then with a warning).

    mapped: map the file into memory copy-on-write instead of reading it. It is still read once, to be checked.
    """
    length = sealed_length(path)
    if length is None:
        return None
    try:
        if mapped:
            return np.load(path, mmap_mode="c", allow_pickle=False)
        with open_regular(path) as file:
            return np.load(io.BytesIO(file.read(length)), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        warnings.warn(f"{path}: the cached file cannot be read ({error}) and is made again", stacklevel=2)
        return None


def keep_array(path: Path, array: np.ndarray) -> bool:
    """`save_array` into the cache. Where the cache cannot be written to, warn once and go on without it."""
    try:
        save_array(path, array)
    except OSError as error:
        warn_no_cache(error)
        return False
    return True


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

"""Files that are written whole or not at all, folders that one process uses at a time, and the cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vqprompt.errors import UserError

A_DAY = 24 * 3600


def cache_folder() -> Path:
    """Where decoded images, queries and weights are kept."""
    return Path(os.environ.get("VQPROMPT_HOME") or "~/.cache/vqprompt").expanduser()


def save_array(path: Path, array: np.ndarray) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial.npy")
    np.save(partial, array)
    os.replace(partial, path)


fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such thing
    fcntl = None


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    for stale in path.parent.glob(f".{path.name}.*.partial"):  # of one that was killed
        stale.unlink(missing_ok=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """One process at a time is at work in a folder. It is made if need be, and goes again if nothing came into it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with open(lock, "w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it, however a process ends
            except BlockingIOError:
                raise UserError(
                    f"{folder}: another process is at work here; wait for it, or give another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def read_json(path: Path) -> Any:
    """The content of a JSON file that this package wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it or do the run again") from None

"""One process at a time: the only kind of lock in this package.

A lock is a file. The system releases it when the process ends, even if it is killed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vqprompt.core.errors import UserError
from vqprompt.core.files.atomic import make_folder, writing

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # some network file systems have none


class InUseError(UserError):
    """Another process (or thread) works here."""


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
            raise InUseError(busy) from None
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

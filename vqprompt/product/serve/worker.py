"""The process that changes models, so that predictions continue while a model learns.

It does one change at a time (changes.py) and reports its progress. It has a lower priority than the server, and ends
when the server ends, for whatever reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import psutil

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress
from vqprompt.product.serve.changes import Change, JobUpdate
from vqprompt.product.serve.models import without_folder

SECONDS_BETWEEN_UPDATES = 0.1
NICENESS = 5
CANCEL = "cancel"  # the server sends this to stop the running change


class Cancelled(Exception):
    """The change was cancelled. Raised where progress is reported; nothing has changed on disk."""


def main(connection: Connection) -> None:
    """Do the changes that come through the connection, until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(psutil.Error):
        psutil.Process().nice(getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", NICENESS))  # Windows has classes
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    while True:
        try:
            change = connection.recv()
        except (EOFError, OSError):
            return
        if change != CANCEL:  # else it came too late, for the change before
            connection.send(_do(change, connection))


def _end_with_the_server() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _do(change: Change, connection: Connection) -> JobUpdate:
    last = 0.0

    def tell(event: Progress) -> None:
        nonlocal last
        if connection.poll():
            connection.recv()
            raise Cancelled
        if time.monotonic() - last > SECONDS_BETWEEN_UPDATES or event.done == event.total:
            last = time.monotonic()
            connection.send(JobUpdate("running", event))

    try:
        done: JobUpdate = change.body.do(change, tell)
        return done
    except Cancelled:
        return JobUpdate("cancelled")
    except UserError as error:
        return JobUpdate("failed", error=without_folder(error, change.path))
    except OSError as error:
        return JobUpdate("failed", error=f"{error.strerror or type(error).__name__}; the model is as it was")
    except MemoryError:
        return JobUpdate("failed", error="there is not enough memory; the model is as it was")
    except Exception as error:  # report it; the worker stays ready for the next change
        traceback.print_exc()
        return JobUpdate("failed", error=f"{without_folder(error, change.path)}; the model is as it was")

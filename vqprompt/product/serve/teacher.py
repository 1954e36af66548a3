"""The process that changes models, so that predictions continue while a model learns.

It takes one task at a time: it loads the model's file, changes the copy in its memory, keeps the version before, and
replaces the file in one step. A task that it has reported as done is on disk; any other can be repeated. If it is
killed at any moment, the file is the old one or the new one. It has a lower priority than the server, and ends when the
server ends, for whatever reason.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress, Stage
from vqprompt.product.serve.models import New
from vqprompt.product.serve.versions import Versions

SECONDS_BETWEEN_REPORTS = 0.1
NICENESS = 5
CANCEL = "cancel"  # the server sends this to stop the running task


@dataclass(frozen=True)
class Task:
    """One change of one model. arguments: of the function in `TASKS` that does it."""

    kind: str
    path: Path
    new: New
    versions: int
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What the teacher reports. state: running, done, failed or cancelled. thumbnails: of what was taught; the name of
    the content, the class, and a small JPEG."""

    state: str
    progress: Progress | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    thumbnails: tuple[tuple[int, str, bytes], ...] = ()


class Cancelled(Exception):
    """The task was cancelled. Raised where progress is reported; nothing has changed on disk."""


def main(connection: Connection) -> None:
    """Do the tasks that come through the connection, until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(psutil.Error):
        psutil.Process().nice(getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", NICENESS))  # Windows has classes
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        if task != CANCEL:  # else it came too late, for the task before
            connection.send(_do(task, connection))


def _end_with_the_server() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _do(task: Task, connection: Connection) -> Report:
    last = 0.0

    def tell(event: Progress) -> None:
        nonlocal last
        if connection.poll():
            connection.recv()
            raise Cancelled
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS or event.done == event.total:
            last = time.monotonic()
            connection.send(Report("running", event))

    try:
        return TASKS[task.kind](task, tell, **task.arguments)
    except Cancelled:
        return Report("cancelled")
    except UserError as error:
        return Report("failed", error=str(error))
    except OSError as error:
        return Report("failed", error=f"{error.strerror or error}; the model is as it was")
    except MemoryError:
        return Report("failed", error="there is not enough memory; the model is as it was")
    except Exception as error:  # report it; the teacher stays ready for the next task
        import traceback

        traceback.print_exc()
        return Report("failed", error=f"{type(error).__name__}: {error}; the model is as it was")


# ---------------------------------------------------------------------------------------------- tasks

Tell = Callable[[Progress], None]


def _open(task: Task) -> Any:
    from vqprompt.product.model.model import Model

    if task.path.is_file():
        return Model.load(task.path, device=task.new.device)
    return Model(task.new.backbone, size=task.new.size, device=task.new.device)


@contextmanager
def _changing(task: Task, tell: Tell | None = None) -> Iterator[tuple[Any, Versions, Callable[[], None]]]:
    """The model, its versions, and a function that replaces the model's file by the changed model."""
    from vqprompt.product.model import file as files

    versions = Versions(task.path, task.versions)

    def replace() -> None:
        if tell is not None:
            tell(Progress(Stage.STATISTICS, 1, 1, detail="writing the model"))  # the last moment to cancel
        versions.keep()
        try:
            model.save(task.path, locked=True)
        except BaseException:
            versions.mend()
            raise

    with files.locked(task.path):
        model = _open(task)
        yield model, versions, replace


def teach(task: Task, tell: Tell, images: list[Path], labels: list[str], effort: str) -> Report:
    from vqprompt.product.serve.gallery import thumbnails

    with _changing(task, tell) as (model, _, replace):
        taught = model.learn(images, labels, effort=effort, skip_broken=True, progress=tell)
        made = tuple(thumbnails(images, labels))
        if taught.images:
            replace()
    return Report("done", result=taught.to_json(), thumbnails=made)


def check(task: Task, tell: Tell, images: list[Path], labels: list[str]) -> Report:
    """What is doubtful about images, before they are taught."""
    from vqprompt.product.check.check import check as check_images

    model = _open(task)
    known = {"model": model} if model.classes else {"backbone": task.new.backbone, "size": task.new.size}
    found = check_images(images, labels, device=task.new.device, progress=tell, **known)
    place = {str(path): number for number, path in enumerate(images)}
    findings = [
        {
            "image": place[f.where], "kind": f.kind.name.lower(), "title": str(f.kind), "says": f.says,
            "doubt": f.doubt, "leave_out": f.leave_out, "likelier": f.likelier,
            "other": None if f.other is None else place.get(f.other),
        }
        for f in found.findings
    ]  # fmt: skip
    return Report("done", result={"images": found.images, "findings": findings, "notes": list(found.notes)})


def undo(task: Task, tell: Tell, steps: int) -> Report:
    with _changing(task) as (model, versions, replace):
        first = len(model.history) == steps == model.show()["can_undo"] + 1
        undone = []
        for _ in range(steps - first):
            undone.append(model.undo())
        if first:  # nothing was known before: the model is empty again
            versions.keep()
            task.path.unlink()
            undone.append("the first teaching")
        else:
            replace()
    return Report("done", result={"undone": undone})


def rename(task: Task, tell: Tell, old: str, new: str) -> Report:
    with _changing(task) as (model, _, replace):
        model.rename(old, new)
        replace()
    return Report("done", result={"old": old, "new": new})


def forget(task: Task, tell: Tell, name: str, for_good: bool) -> Report:
    with _changing(task) as (model, versions, replace):
        before = model.accuracy
        model.forget(name, for_good=for_good)
        replace()
        if for_good:
            versions.clear()
    return Report("done", result={"name": name, "accuracy_before": before, "accuracy": model.accuracy})


def return_to(task: Task, tell: Tell, version: int) -> Report:
    from vqprompt.product.model import file as files

    with files.locked(task.path):
        Versions(task.path, task.versions).return_to(version)
    return Report("done", result={"version": version})


def onnx(task: Task, tell: Tell, target: Path, int8: bool) -> Report:
    from vqprompt.product.export.onnx import export_onnx

    export_onnx(_open(task), target, int8=int8)
    return Report("done", result={"bytes": target.stat().st_size})


TASKS: dict[str, Callable[..., Report]] = {
    "teach": teach, "check": check, "undo": undo, "rename": rename, "forget": forget, "return": return_to, "onnx": onnx,
}  # fmt: skip

"""A whole run that takes a fraction of a second, in a process of its own, and what must be equal when it is over."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import TINY, make_vit
from PIL import Image

from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.errors import UserError
from vqprompt.research.results.config import RunConfig, resolve
from vqprompt.research.runs import runner

METHODS = ("vq-prompt", "lwf", "slca", "moving-prompts")
FILES = {"config.json", "metrics.json", "classes.json", "checkpoint.json"}  # and one state-N.safetensors
TIMES = {"seconds", "task_seconds", "images_per_second", "seconds_training", "seconds_in_task", "peak_memory", "saved",
         "checksum", "tensors"}  # fmt: skip
CLASSES, TRAIN, TEST, TASKS, EPOCHS = 4, 5, 2, 2, 2
DIED = -int(signal.SIGKILL)


@functools.cache
def scene() -> Path:
    """A folder with the images and the weights of every tiny run. It stays as long as the process that made it."""
    folder, maker = Path(tempfile.mkdtemp(prefix="vqprompt-scene-")), os.getpid()
    atexit.register(lambda: os.getpid() == maker and shutil.rmtree(folder, ignore_errors=True))
    folder.chmod(0o755)
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        texture = rng.integers(30, 226, (8, 8, 3)).repeat(4, 0).repeat(4, 1)
        for part, count in (("train", TRAIN), ("test", TEST)):
            where = folder / "images" / part / f"class {label}"
            where.mkdir(parents=True)
            for i in range(count):
                noisy = texture + rng.integers(-30, 31, texture.shape)
                Image.fromarray(noisy.astype(np.uint8)).save(where / f"{i}.png")
    save_backbone(make_vit(TINY), folder / "tiny.safetensors")
    (folder / "tiny.safetensors").chmod(0o644)  # some tries are made as another user
    return folder


def config(method: str) -> RunConfig:
    brief = {} if method in ("lwf", "moving-prompts") else {"rebalancing.epochs": 1}
    return resolve(
        {**brief, "data": str(scene() / "images"),
         "backbone": str(scene() / "tiny.safetensors"), "method": method, "size": 28,
         "tasks": TASKS, "epochs": EPOCHS, "batch_size": 5, "seed": 1,
         "augment": "none", "device": "cpu"}
    )  # fmt: skip


def run(method: str, out: Path, home: Path, resume: bool = False) -> None:
    """A run with a checkpoint after every epoch."""
    os.environ["VQPROMPT_HOME"] = str(home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.run(config(method), out, resume, checkpoint_seconds=0, report=False)


def start(work: Callable[[], None], errors: Path | None = None) -> int:
    """Do `work` in a child process; returns its number. errors: a file for what it writes to standard error.

    It exits with 0, with 2 for an error in plain words, and with 1 for a traceback.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            descriptor = os.open(errors or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
            work()
            status = 0
        except UserError as error:
            status = 2
            sys.stderr.write(f"error: {error}\n")
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def wait(child: int) -> int:
    """The exit status of a child; -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(work: Callable[[], None], kill_after: float | None = None, errors: Path | None = None) -> int:
    """`start` and `wait`. kill_after: seconds until the child gets SIGKILL."""
    child = start(work, errors)
    if kill_after is not None:
        end = time.monotonic() + kill_after
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.002))
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                return os.waitstatus_to_exitcode(ended[1])
        os.kill(child, signal.SIGKILL)
    return wait(child)


def outcome(out: Path) -> dict[str, Any]:
    """Everything a run wrote, to the bit, but how long it took."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
        return [timeless(inner) for inner in value] if isinstance(value, list) else value

    found: dict[str, Any] = {}
    for name in FILES:
        found[name] = timeless(json.loads((out / name).read_text()))
    found["state"] = [path.read_bytes() for path in out.glob("state-*")]
    return found


def difference(out: Path, home: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a finished run, in words; None if it is as it should be."""
    names = {path.name for path in out.iterdir()}
    states = {name for name in names if name.startswith("state-")}
    if len(states) != 1 or names != FILES | states:
        return f"left behind: {sorted(names - FILES)}"
    if rest := [path.name for path in home.rglob("*") if ".partial" in path.name or path.name == ".lock"]:
        return f"left behind in the cache: {rest}"
    found = outcome(out)
    if found["checkpoint.json"]["images_seen"] != expected["checkpoint.json"]["images_seen"]:
        return f"images_seen is {found['checkpoint.json']['images_seen']}"
    wrong = [name for name in expected if found[name] != expected[name]]
    return f"another end: {wrong}" if wrong else None


# ---------------------------------------------------------------------------------------------- every step on disk


class Steps:
    """Counts every step that changes the disk, and does something else at one of them.

    A step is an open to write, a written file, fsync, rename, unlink, mkdir, rmdir, or a new size. `strike` is called
    at the step number `fatal`. If `torn`, the content was written by half before.
    """

    def __init__(self, fatal: int = 0, strike: Callable[[], None] = lambda: None) -> None:
        self.count, self.fatal, self.strike = 0, fatal, strike
        self.names: list[str] = []

    def now(self, name: str) -> bool:
        self.count += 1
        self.names.append(name)
        return self.count == self.fatal

    def plain(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def stepping(*given: Any, **named: Any) -> Any:
            if self.now(name):
                self.strike()
            return original(*given, **named)

        setattr(owner, name, stepping)

    def opening(self, owner: Any) -> None:
        original = owner.open

        def stepping(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
            strike = not isinstance(file, int) and set(mode) & set("wax+") and self.now("open")
            opened = original(file, mode, *given, **named)
            if strike:
                self.strike()  # the file is there, and empty
            return opened

        owner.open = stepping

    def install(self) -> None:
        """In a process of its own: nothing is taken back."""
        import builtins

        for name in ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync", "posix_fallocate"):
            self.plain(os, name)
        self.opening(builtins)
        self.opening(io)
        write_bytes, write_array = Path.write_bytes, np.lib.format.write_array

        def torn_bytes(path: Path, data: bytes) -> int:
            if self.now("write"):
                write_bytes(path, data[: len(data) // 2])
                self.strike()
            return write_bytes(path, data)

        def torn_array(file: Any, array: np.ndarray, *given: Any, **named: Any) -> None:
            if self.now("write"):
                file.write(np.asarray(array).tobytes()[: array.nbytes // 2])
                file.flush()
                self.strike()
            write_array(file, array, *given, **named)

        Path.write_bytes = torn_bytes  # type: ignore[method-assign,assignment]
        np.lib.format.write_array = torn_array


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Reference:
    """How an uninterrupted run of a method ends, how long it takes and how many steps it has."""

    def __init__(self, method: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="vqprompt-fault-"))
        torch.set_num_threads(1)
        os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is lost here, and it takes long
        scene()
        run(method, folder / "warm", folder / "warm home")  # so that children need not import anything
        count, errors = folder / "steps", folder / "errors"

        def work() -> None:
            steps = Steps()
            steps.install()
            run(method, folder / "out", folder / "home")
            os.write(os.open(count, os.O_WRONLY | os.O_CREAT), json.dumps(steps.names).encode())

        began = time.monotonic()
        if forked(work, errors=errors) != 0:
            raise RuntimeError(f"the uninterrupted run failed: {errors.read_text()}")
        self.seconds = time.monotonic() - began
        self.outcome, self.steps = outcome(folder / "out"), json.loads(count.read_text())
        if self.outcome["checkpoint.json"]["images_seen"] != CLASSES * TRAIN * EPOCHS:
            raise RuntimeError("the uninterrupted run counts its images wrongly")
        shutil.rmtree(folder, ignore_errors=True)


reference = functools.cache(Reference)

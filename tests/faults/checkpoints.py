"""Damaged checkpoints: exactly the model that was saved, or an error. Never another answer.

Most tries damage the files as disks and people do. Some are forged: a value is changed and the checksum is made right
again. No checksum helps against that, but it still has to end in a model or in an error in plain words.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from faults.damage import damaged
from faults.tiny import METHODS, config, run, scene
from vqprompt.research.learner.checkpoint import checksum, read_checkpoint
from vqprompt.research.learner.learner import Learner
from vqprompt.research.learner.predictor import Predictor
from vqprompt.research.learner.state import LearnerRecord, SavedState
from vqprompt.research.runs import runner

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**9, 10**30, -(10**30), 0.1, -0.5, 1e308, float("nan"), float("inf"), "", "0",
    "x", "\x1b[2J", "class 0", "../../etc/passwd", "a" * 5000, [], [0], [[]], [None], {}, {"a": 1}, [[0, 0, 2]],
)  # fmt: skip


class Stop(Exception):
    """Ends a run in the middle of its last task."""


@functools.cache
def saved(method: str, half: bool) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any], torch.Tensor | None]:
    """A finished run of a method, or one in mid-task: folder, tensors, JSON and what it says about an image."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is lost here, and it takes long
    folder = Path(tempfile.mkdtemp(prefix="saved-", dir=scene()))
    out, home = folder / "out", folder / "home"
    if half:
        os.environ["VQPROMPT_HOME"] = str(home)
        plain = runner.Run._save

        def stopping(self: runner.Run) -> None:
            plain(self)
            if self.learner.history and self.learner.open_task is not None:
                raise Stop

        runner.Run._save = stopping  # type: ignore[method-assign]
        try:
            runner.run(config(method), out, checkpoint_seconds=0, report=False)
        except Stop:
            pass
        finally:
            runner.Run._save = plain  # type: ignore[method-assign]
    else:
        run(method, out, home)
    tensors, info = read_checkpoint(out)
    return out, tensors, info, _answer(out)


def _answer(folder: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Predictor.load(folder, "cpu").predict_proba(scene() / "images/test/class 0/0.png")


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, below in inner for found in [(*path, key), *_places(below, (*path, key))]]


def _edit(info: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change, take out, add or exchange one value, somewhere."""
    info = copy.deepcopy(info)
    path = rng.choice(_places(info))
    owner = functools.reduce(lambda value, key: value[key], path[:-1], info)
    old, action = owner[path[-1]], rng.randrange(6)
    if action == 0:
        del owner[path[-1]]
    elif action == 1 and isinstance(owner, list):
        rng.choice((owner.reverse, lambda: owner.append(old), owner.clear))()
    elif action == 2 and isinstance(old, int | float):
        owner[path[-1]] = old + rng.choice((1, -1, 0.1, 1e-9))
    elif action == 3:
        other = rng.choice(_places(info))
        owner[path[-1]] = copy.deepcopy(functools.reduce(lambda value, key: value[key], other, info))
    else:
        owner[path[-1]] = rng.choice(VALUES)
    return info


def _harm(folder: Path, other: Path, rng: random.Random) -> bool:
    """Damage a checkpoint. Returns whether it was forged."""
    path, (state,) = folder / "checkpoint.json", folder.glob("state-*")
    action = rng.choice(("json", "json", "state", "edit", "edit", "edit", "forged", "forged", "swap", "odd"))
    if action in ("json", "state"):
        target = path if action == "json" else state
        target.write_bytes(damaged(target.read_bytes(), rng))
    elif action in ("edit", "forged"):
        info = json.loads(path.read_text())
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            info = _edit(info, rng) or info
        if action == "forged":
            info["checksum"] = checksum(info)
        path.write_text(json.dumps(info))
    elif action == "swap":
        if rng.random() < 0.5:
            shutil.copyfile(next(other.glob("state-*")), state)
        else:
            shutil.copyfile(other / "checkpoint.json", path)
    else:
        target = rng.choice((path, state))
        target.unlink()
        rng.choice((
            lambda: None, target.mkdir, lambda: os.mkfifo(target), lambda: target.symlink_to(target.name),
            lambda: target.symlink_to("/dev/zero"), target.touch, lambda: target.write_text("[" * 100_000),
            lambda: target.write_text("9" * 5000), lambda: target.write_text("null"),
        ))()  # fmt: skip
    return action == "forged"


def try_checkpoint(rng: random.Random, folder: Path) -> str:
    """One damaged checkpoint, loaded to predict, to go on learning, or to resume its run."""
    method, half = rng.choice(METHODS), rng.random() < 0.4
    source, tensors, info, answer = saved(method, half)
    out, other = folder / "out", saved(rng.choice(METHODS), rng.random() < 0.5)[0]
    shutil.copytree(source, out)
    os.environ["VQPROMPT_HOME"] = str(source.parent / "home")
    forged = _harm(out, other, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = SavedState.read(out)
        use = rng.randrange(2 if forged else 3)
        if use == 0:
            found = _answer(out)
        elif use == 1:
            Learner.load(out, "cpu")
        else:
            runner.run(config(method), out, resume=True, report=False)
        if forged:
            return "handled"
    same = state.tensors.keys() == tensors.keys() and all(torch.equal(t, tensors[n]) for n, t in state.tensors.items())
    if not same:
        return "bad: other tensors"
    if state.record != LearnerRecord(**info):
        return "bad: something in the JSON changed in silence"
    if use == 0 and not torch.equal(found, answer):
        return "bad: another answer"
    return "handled"

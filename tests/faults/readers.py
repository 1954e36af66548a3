"""Processes read a model while others save it: every read is a whole one, no save fails, nothing is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from faults.tiny import start, wait
from vqprompt.research.learner.checkpoint import read_checkpoint, write_checkpoint


def _slowly(rng: random.Random, work: Callable[[], None]) -> None:
    """Do `work`, and wait a moment before some steps on disk, so that processes overtake each other."""
    for name in ("replace", "unlink", "open", "stat"):
        plain: Callable[..., Any] = getattr(os, name)

        def waiting(*given: Any, plain: Callable[..., Any] = plain, **named: Any) -> Any:
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.002))
            return plain(*given, **named)

        setattr(os, name, waiting)
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is lost here, and it takes long
    work()


def _save(folder: Path, number: int, size: int) -> None:
    write_checkpoint(folder, {"value": torch.full((size,), number), "more": torch.tensor(number)}, {"number": number})


def _saver(folder: Path, first: int, saves: int, sizes: list[int]) -> None:
    for i in range(saves):
        _save(folder, first + i, sizes[i % len(sizes)])


def _reader(folder: Path, reads: int) -> None:
    for _ in range(reads):
        tensors, info = read_checkpoint(folder)
        number = info["number"]
        if not (tensors["value"] == number).all() or tensors["more"] != number:
            raise RuntimeError(f"a mixture of models: {number} and {tensors['more']}")


def try_readers(rng: random.Random, folder: Path) -> str:
    """One or two savers and one or two readers of one folder."""
    torch.set_num_threads(1)
    out = folder / "model"
    _save(out, 0, 3)
    sizes = [rng.choice((1, 100, 20_000)) for _ in range(3)]
    work = [partial(_saver, out, 1000 * number, rng.randint(2, 6), sizes) for number in range(1, rng.randint(2, 3))]
    work += [partial(_reader, out, rng.randint(3, 10)) for _ in range(rng.randint(1, 2))]
    children = []
    for number, do in enumerate(work):
        children.append(start(partial(_slowly, random.Random(rng.random()), do), folder / f"errors {number}"))
    statuses = [wait(child) for child in children]
    if any(statuses):
        said = [path.read_text()[-1500:] for path in sorted(folder.glob("errors *"))]
        return f"bad: exit status {statuses}: {said}"
    _, info = read_checkpoint(out)
    left = sorted(path.name for path in out.iterdir())
    if left != ["checkpoint.json", info["tensors"]]:
        return f"bad: left behind: {left}"
    return "handled"

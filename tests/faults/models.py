"""Model files that were edited and have a right checksum: a model whose answers are numbers, or one sentence.

First every field and every tensor of every file in turn, with every value that may hurt; after that, several edits at
once, at random. The files are those of tests/data, at every effort, in the old formats and in the present one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model.file import ModelError, checksum
from vqprompt.product.model.records import ClassRecord

DATA = Path(__file__).parents[1] / "data" / "older-models"
BACKBONE = DATA / "backbone.safetensors"
MODELS = ("instant", "good", "best", "no-weighing", "instant-3", "good-3")
REMOVE = object()
VALUES: tuple[Any, ...] = (
    REMOVE, None, True, 0, 1, -1, 2, 3, 255, 10**5, 200_000, 10**9, 2**31, 2**63, 10**400, 0.5, -1e300, 1e308, 1e-310,
    float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "unknown", "a" * 100_000, "../../etc/passwd", [], {},
    [[]] * 50, [1e9] * 6, {"a": 1}, [{"images": 10**9, "kept": 10**9}] * 6,
)  # fmt: skip

Description = Any
Tensors = dict[str, np.ndarray]
Edit = Callable[[Description, Tensors], None]


@functools.cache
def whole(name: str) -> tuple[str, Description, Tensors]:
    """A file that is right: its format, description and tensors."""
    with safe_open(DATA / f"{name}.vqp", "np") as opened:
        metadata, tensors = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return metadata["version"], json.loads(metadata["model"]), tensors


def places_in(value: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a description, outer ones first. Of a list, the first and the last."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if not isinstance(value, list) or key in (0, len(value) - 1):
            yield (*start, key)
            yield from places_in(inner, (*start, key))


def set_field(place: tuple[Any, ...], new: Any, description: Description, tensors: Tensors) -> None:
    for key in place[:-1]:
        description = description[key]
    if new is REMOVE:
        del description[place[-1]]
    else:
        description[place[-1]] = copy.deepcopy(new)


def add_field(place: tuple[Any, ...], description: Description, tensors: Tensors) -> None:
    for key in place:
        description = description[key]
    if isinstance(description, dict):
        description["new"] = 1
    elif isinstance(description, list):
        description.append(copy.deepcopy(description[0]) if description else 1)


def _with(value: float, tensor: np.ndarray) -> np.ndarray:
    changed = tensor.copy()
    if changed.size:
        changed.reshape(-1)[changed.size // 2] = np.array(value).astype(tensor.dtype)
    return changed


def _largest(tensor: np.ndarray) -> np.ndarray:
    limits = np.finfo(tensor.dtype) if tensor.dtype.kind == "f" else np.iinfo(tensor.dtype)
    return np.full_like(tensor, limits.max)


TENSORS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda t: t[:-1], lambda t: t[:0], lambda t: np.concatenate([t, t]), lambda t: t.astype(np.float64),
    lambda t: t.astype(np.int8), lambda t: t.astype(np.float16), lambda t: t[None], lambda t: t.reshape(-1),
    lambda t: t.T.copy(), np.zeros_like, np.ones_like, _largest, lambda t: _with(np.nan, t), lambda t: _with(np.inf, t),
    lambda t: _with(-np.inf, t), lambda t: _with(3e38, t), lambda t: _with(-1, t), lambda t: _with(1, t),
    lambda t: t[::-1].copy(), lambda t: np.zeros((0, 10**9), t.dtype), lambda t: np.zeros((), t.dtype),
)  # fmt: skip


def set_tensor(name: str, change: Callable[[np.ndarray], np.ndarray] | None, _: Description, tensors: Tensors) -> None:
    with np.errstate(all="ignore"):
        if change is None:
            del tensors[name]
        else:
            tensors[name] = np.ascontiguousarray(change(tensors[name]))


def add_tensor(name: str, _: Description, tensors: Tensors) -> None:
    tensors[name] = np.zeros(3, np.float32)


@functools.cache
def edits(name: str) -> list[Edit]:
    """Every edit of a file, each alone."""
    _, description, tensors = whole(name)
    places = list(places_in(description))
    found: list[Edit] = [functools.partial(set_field, place, value) for place in places for value in VALUES]
    found += [functools.partial(add_field, place) for place in [(), *places]]
    found += [functools.partial(set_tensor, key, change) for key in tensors for change in (None, *TENSORS)]
    return found + [functools.partial(add_tensor, key) for key in ("new", "trained.0.new", "trained.9.up0", "\x1b")]


def try_model(rng: random.Random, folder: Path) -> str:
    number = getattr(rng, "number", 0)
    name, turn = MODELS[number % len(MODELS)], number // len(MODELS)
    version, description, tensors = whole(name)
    description, tensors, possible = copy.deepcopy(description), dict(tensors), edits(name)
    step = 7919  # a prime, so that few tries already meet fields and tensors of every kind
    chosen = [possible[turn * step % len(possible)]]
    if turn >= len(possible):
        chosen = rng.sample(possible, rng.randint(1, 3))
    for edit in chosen:
        # an edit before it may have removed the place, or the type may not hold the value
        with contextlib.suppress(KeyError, IndexError, TypeError, ValueError, OverflowError):
            edit(description, tensors)
    path = folder / "edited.vqp"
    text = json.dumps(description)
    metadata = {"format": "vqprompt-model", "version": version, "model": text}
    path.write_bytes(save(tensors, {**metadata, "checksum": checksum(metadata, tensors)}))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return _use(path)


def _use(path: Path) -> str:
    """Load a model and do with it what people do."""
    try:
        model = Model.load(path, device="cpu", backbone=BACKBONE)
    except ModelError as error:
        return "handled" if str(path) in str(error) and "\n" not in str(error) else f"bad: it says {error}"
    json.dumps(model.show(), allow_nan=False).encode()
    backbone = model.knowledge.trained is not None and model.backbone.size <= 56
    picture = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    features = np.random.default_rng(0).normal(size=(4, model.backbone.width)).astype(np.float32)
    for change in ("none", "learn", "forget", "undo"):
        if not model.classes:
            break
        try:
            _change(model, change)
            seen = np.concatenate([features, model.embed([picture])]) if backbone else features
        except UserError as error:
            return "handled" if str(error) else "bad: an error without words"
        if problem := _wrong(*model.judge(seen)):
            return f"bad: {problem}"
        model = Model.from_bytes(model.to_bytes(), device="cpu", backbone=BACKBONE)
    return "handled"


def _change(model: Model, change: str) -> None:
    if change == "learn":
        features = np.random.default_rng(1).integers(-3000, 3000, (6, model.backbone.width)).astype(np.int16)
        model.learn_records({"a new class": ClassRecord.of(np.arange(6, dtype=np.uint64), features)})
    elif change == "forget":
        model.forget(model.classes[0])
    elif change == "undo":
        model.undo()


def _wrong(shares: np.ndarray, familiar: np.ndarray) -> str | None:
    if not np.isfinite(shares).all() or np.abs(shares.sum(1) - 1).max() > 1e-6:
        return f"the probabilities are {shares[0].tolist()}"
    return "familiarity is no number" if np.isnan(familiar).any() else None

"""Hostile settings: a configuration that can be run, or one error in plain words. Nothing large is ever allocated."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from conftest import make_dataset, make_vit

from faults.damage import damaged
from faults.tiny import forked
from vqprompt.commands import app
from vqprompt.core.data.stream import Stream
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.results.config import (
    RunConfig,
    completed,
    parse_assignment,
    read_config_file,
    read_saved_config,
    resolve,
)
from vqprompt.research.runs import runner
from vqprompt.research.runs.refusals import refuse_what_cannot_fit

HUGE = int("9" * 5000, 16)  # Python neither prints nor parses it in decimal digits
NUMBERS = (0, 1, -1, 2, 3, 10, 127, 1000, 14_000, 10**6, 10**9, 2**31, 2**63, 2**64, 10**18, 10**30, HUGE, 0.5, -0.1,
           1e-320, 1e308, float("nan"), float("inf"), float("-inf"))  # fmt: skip
TEXTS = ("", " ", "auto", "yes", "on", "cpu", "meta", "cuda:99", "cuda:99999999999999999999", "vq-prompt", "ft", "0",
         "x" * 300, "x" * 100_000, "\x1b[2J", "a\nb", "\x00", "\udcff", "größe", "..", "/", "/dev/zero", "/proc",
         "quickdraw50", "quickdraw50=", "cifar100=/dev/null", "~nobody/x", "=", "%s{}")  # fmt: skip
SMALL = 4000  # parameters of a kind: above it nothing is built here


@functools.cache
def dataset() -> Any:
    torch.set_num_threads(1)
    return make_dataset()


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return [_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5)))]
    if kind == 6:
        return {rng.choice((*TEXTS[:8], "lr", "ratio")): _value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    nested: Any = rng.choice(NUMBERS)
    for _ in range(rng.choice((5, 100, 5000))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


TASKS: tuple[Any, ...] = (
    0, -1, 1, 3, 6, 7, 10**9, [], [0, 6], [3, 3], [-1, 7], [10**12], [[]], [["class 0"], ["class 0"]],
    [["class 0", ""]], [["class 0"], []], [["nobody"]], [[" "]], [[1]], "3", True, 2.5, [["class 0"], 3],
    [True, 2], [HUGE],
)  # fmt: skip


def settings(rng: random.Random) -> dict[str, Any]:
    """A few settings of a run or a method, most of them absurd."""
    method = rng.choice([*METHODS, *METHODS, *TEXTS[:6]])
    known = [*RunConfig.model_fields, *RunConfig.model_fields]
    if method in METHODS:
        own = METHODS[method].Options.model_fields
        known += [*own, *own, "rebalancing.lr", "rebalancing.ratio", "rebalancing.epochs"]
    found: dict[str, Any] = {"method": method} if rng.random() < 0.9 else {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(known) if rng.random() < 0.9 else rng.choice(TEXTS)
        found[key] = rng.choice(TASKS) if key == "tasks" and rng.random() < 0.8 else _value(rng)
    return found


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return "nan" if value is None or value != value else json.dumps(value)


def _text(value: Any, how: str) -> str:
    """As JSON or TOML; values that have no such form (too deep, too long) become the worst that can be written."""
    try:
        if how == "json":
            return json.dumps(value)
        return "\n".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items())
    except (RecursionError, ValueError):
        deep, long = "[" * 20_000, "9" * 5000
        return f'{{"epochs": {deep}}}' if how == "json" else f"epochs = {deep if len(value) % 2 else long}"


def _use(config: RunConfig) -> None:
    """What a run does first with its settings, up to its learner, on tiny images and a tiny ViT."""
    refuse_what_cannot_fit(config)
    Stream(dataset(), config.tasks, config.seed, config.validation, config.train_per_class, config.test_per_class)
    sizes = [v for v in config.options.values() if isinstance(v, int)]
    if max([*sizes, config.size]) < SMALL:
        tasks = config.tasks if isinstance(config.tasks, int) else len(config.tasks)
        Learner(make_vit(), config.method, size=config.size - config.size % 14 or 14, tasks=tasks, seed=config.seed,
                training=config.training, device="cpu", precision=config.precision, **config.options)  # fmt: skip


def _command(given: dict[str, Any], folder: Path) -> str:
    """Through the command line: exit status 0 or 2, no traceback, and no control character on the terminal."""
    words = ["vqprompt", "run", "--out", str(folder / "out")]
    for key, value in given.items():
        text = value if isinstance(value, str) else _text(value, "json")
        if "\0" in key + text or len(text) > 100_000:
            continue  # the system passes no such word
        plain = key in ("tasks", "size", "epochs", "device", "method", "seed") and not isinstance(value, dict)
        words += [f"--{key}={text}"] if plain else ["--set", f"{key}={text}"]
    errors = folder / "errors"

    def work() -> None:
        runner.run = lambda config, *rest, **named: _use(config) or sys.exit(0)  # type: ignore[assignment,func-returns-value]
        sys.argv = [word.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") for word in words]
        warnings.simplefilter("ignore")
        app.main()

    status = forked(work, errors=errors)
    said = errors.read_bytes()
    if status not in (0, 2) or b"Traceback" in said:
        return f"bad: {words}: exit status {status}: {said.decode('utf-8', 'replace')[-1500:]}"[:3000]
    if any(byte < 32 and byte not in b"\n\t\r" for byte in said):
        return f"bad: {words}: control characters on the terminal: {said[:300]!r}"
    return "handled" if status == 0 or said else f"bad: {words}: an error without words"


def try_configuration(rng: random.Random, folder: Path) -> str:
    """Settings as a caller, a command line or a file gives them."""
    os.environ["VQPROMPT_HOME"] = str(folder / "home")
    dataset()
    given = settings(rng)
    way = rng.choice(("call", "call", "json", "toml", "damaged", "saved", "set", "command"))
    if way == "command":
        return _command(given, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "call":
            config = resolve(given, file=settings(rng) if rng.random() < 0.3 else None)
        elif way == "set":
            config = resolve(dict(parse_assignment(f"{key}={_text(value, 'json')}") for key, value in given.items()))
        else:
            kind = "toml" if way == "toml" else "json"
            path = folder / ("config.json" if way == "saved" else f"mine.{kind}")
            data = _text(given, kind).encode("utf-8", "surrogatepass")
            if way == "damaged":
                data = damaged(resolve({}).model_dump_json(indent=1).encode(), rng)
            path.write_bytes(data)
            if way == "saved":
                config = resolve(completed(read_saved_config(folder)))
            else:
                config = resolve({}, file=read_config_file(path))
        _use(config)
    if RunConfig(**json.loads(config.model_dump_json())) != config:
        return "bad: it does not come back from its own config.json"
    return "handled"

"""What the benchmarks share: data sets of noise, a clock that waits for the GPU, common options, JSON files."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset, Stream


def stored_side(size: int) -> int:
    """The side at which images for this training size are stored: `open_dataset` keeps an eighth as a margin."""
    return round(size * 8 / 7)


def noise_stream(
    tasks: Sequence[int], train: Sequence[int], test: int, side: int, rng: np.random.Generator | None = None
) -> Stream:
    """A stream of random images.

    tasks: number of classes per task. train: per task, the number of training images per class. test: number of test
    images per class. side: in pixels.
    """
    counts = np.repeat(np.asarray(train) + test, tasks)  # images per class
    labels = np.arange(len(counts)).repeat(counts)
    is_test = np.concatenate([np.arange(count) < test for count in counts])
    pixels = (rng or np.random.default_rng(0)).integers(0, 256, (len(labels), 3, side, side), dtype=np.uint8)
    names = [f"class {c}" for c in range(len(counts))]
    return Stream(Dataset("noise", names, Store(pixels, np.ones(len(labels)), ""), labels, is_test), list(tasks))


def wait(device: torch.device) -> None:
    """Until the GPU has finished what it was given. A CPU never lags behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have: --device and --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    return parser


def write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

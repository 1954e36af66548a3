"""Faults to try: each kind is a function that makes one random fault and says how the product took it.

A function gets a seeded random generator and an empty folder. It returns "handled", or "bad: …" with what went wrong.
A `UserError` that it lets through counts as handled, every other exception as bad. So do hangs and too much memory,
which the runner sees to (see runner.py). To add a kind, write its function and name it in KINDS.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from faults.archives import try_archive
from faults.caches import try_cache
from faults.images import try_image
from faults.weights import try_weights

Fault = Callable[[random.Random, Path], str]

KINDS: dict[str, Fault] = {
    "images": try_image,
    "archives": try_archive,
    "caches": try_cache,
    "weights": try_weights,
}

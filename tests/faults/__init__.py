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
from faults.checkpoints import try_checkpoint
from faults.command_lines import try_command_line, try_early_interrupt
from faults.configurations import try_configuration
from faults.disk import try_disk
from faults.images import try_image, try_thin_image
from faults.kills import try_kill
from faults.models import try_model
from faults.privacy import try_privacy
from faults.readers import try_readers
from faults.requests import try_request
from faults.slow_clients import try_slow_client
from faults.weights import try_weights

Fault = Callable[[random.Random, Path], str]

# Those that take longest come first, so that all workers end at about the same time.
KINDS: dict[str, Fault] = {
    "kills": try_kill,
    "early Ctrl-C": try_early_interrupt,
    "disk": try_disk,
    "slow clients": try_slow_client,
    "models": try_model,
    "privacy": try_privacy,
    "requests": try_request,
    "thin images": try_thin_image,
    "checkpoints": try_checkpoint,
    "command lines": try_command_line,
    "readers": try_readers,
    "caches": try_cache,
    "configurations": try_configuration,
    "weights": try_weights,
    "images": try_image,
    "archives": try_archive,
}

# How many of each kind: in CI, and in the long campaign. 1,520 kills go through every step on disk of every method.
# Those that start no process are the fastest, so they are tried most.
SHORT = {
    "kills": 8, "early Ctrl-C": 4, "disk": 4, "slow clients": 3, "models": 120, "privacy": 30, "requests": 20,
    "thin images": 20, "checkpoints": 50, "command lines": 14, "readers": 8, "caches": 20, "configurations": 60,
    "weights": 60, "images": 150, "archives": 60,
}  # fmt: skip
LONG = {
    "kills": 1520, "early Ctrl-C": 300, "disk": 300, "slow clients": 300, "models": 16_000, "privacy": 2000,
    "requests": 1000, "thin images": 1000, "checkpoints": 3000, "command lines": 300, "readers": 300, "caches": 2000,
    "configurations": 3000, "weights": 3000, "images": 10_000, "archives": 3000,
}  # fmt: skip

"""The processor's cores, and work that is spread over them. Nothing here needs PyTorch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
MOST_CORES = 16  # that work on images at a time
AHEAD = 4  # items per thread that are in work or wait


def cpu_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    import psutil

    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1


def cores() -> int:
    """How many of the cores that this process may use work on images."""
    return min(cpu_cores(), MOST_CORES)


def parallel(work: Callable[[T], R], items: Iterable[T], threads: int = 0, ahead: int = AHEAD) -> Generator[R]:
    """`map` over threads, in order, with few items in work at a time. threads: 0 takes one per core."""
    todo, threads = iter(items), threads or cores()
    pool = ThreadPoolExecutor(threads)
    try:
        waiting = deque(pool.submit(work, item) for item in islice(todo, threads * ahead))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(work, item) for item in islice(todo, 1))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@cache
def has_vnni() -> bool:
    """Whether the processor multiplies 8-bit integers without overflow, and fast. Known on Linux only."""
    try:
        return bool({"avx512_vnni", "avx_vnni"} & set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split()))
    except OSError:
        return False

"""The processor's cores. Nothing here needs PyTorch."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def cpu_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    import psutil

    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1


@cache
def has_vnni() -> bool:
    """Whether the processor multiplies 8-bit integers without overflow, and fast. Known on Linux only."""
    try:
        return bool({"avx512_vnni", "avx_vnni"} & set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split()))
    except OSError:
        return False

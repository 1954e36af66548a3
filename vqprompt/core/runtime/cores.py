"""The processor's cores. Nothing here needs PyTorch."""

from __future__ import annotations

import os

import psutil


def cpu_cores() -> int:
    """How many cores this process may use."""
    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1

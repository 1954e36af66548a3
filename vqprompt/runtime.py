"""Device, precision, repeatable kernels and seeds: where a computation happens, and what makes it repeatable."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vqprompt.errors import UserError


def derive_seed(*parts: int | str) -> int:
    """Independent seeds for independent purposes."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


@contextmanager
def same_bits(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Inside, CUDA uses only kernels that give the same bits every time, and refuses what has none. (CPUs have no other
    kind.) What matters in practice is attention and its gradient: cuDNN's are else added up in any order."""
    if device.type != "cuda" or not wanted:
        yield
        return
    more: Any = torch.utils.deterministic
    mode, filling = torch.get_deterministic_debug_mode(), more.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    more.fill_uninitialized_memory = False  # a help for debugging, and slow
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        more.fill_uninitialized_memory = filling


class seeded:
    """Draw from a seed inside the block and leave the caller's random state as it was."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.random.get_rng_state()
        torch.random.default_generator.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        torch.random.set_rng_state(self.state)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); try auto or cpu"
        ) from None
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """bf16 where the hardware has it; CPUs get fp32, which is many times faster there."""
    if name not in ("auto", "fp32", "bf16"):
        raise UserError(f"precision {name!r} is unknown; there are auto, fp32 and bf16")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"

"""Where a computation happens and what makes it repeatable: device, precision, compilation, kernels, seeds."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.cache import cache_folder
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.distributed import ALONE, Ranks, joined


@dataclass(frozen=True)
class Runtime:
    """The device, and how it computes. `precision` is bf16 or fp32; `deterministic` matters on CUDA only. `ranks` are
    the processes that compute together."""

    device: torch.device
    precision: torch.dtype = torch.float32
    compile: bool = False
    deterministic: bool = True
    ranks: Ranks = ALONE

    @classmethod
    def pick(
        cls, device: str = "auto", precision: str = "auto", compile: str = "auto", deterministic: bool = True
    ) -> Runtime:
        """device: "auto", "cpu", "cuda", "cuda:1" … Not Apple's GPU: it has no float64, in which statistics are kept.
        precision: "auto", "fp32", "bf16". compile: "auto" (on CUDA), "on", "off"."""
        if compile not in ("auto", "on", "off"):
            raise UserError(f"compile {compile!r} is unknown; give auto, on or off")
        ranks = joined()
        chosen = pick_device(ranks.device(device))
        if chosen.type == "mps":
            if device != "auto":
                raise UserError(f"device {device!r} has no float64, which is needed here; give auto or cpu")
            chosen = torch.device("cpu")
        if chosen.type == "cuda" and deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not repeat itself
        compiled = compile == "on" or (compile == "auto" and chosen.type == "cuda")
        if compiled:
            torch._dynamo.config.suppress_errors = compile == "auto"  # without a compiler, run as written
            keep_kernels(cache_folder() / "kernels")
        return cls(chosen, pick_precision(precision, chosen), compiled, deterministic, ranks)

    def place(self, vit: ViT, learns: bool, any_length: bool) -> ViT:
        """Move a backbone here. A frozen one is stored in the precision of the device; one that learns keeps fp32
        weights and computes under `autocast`."""
        vit = vit.to(self.device, torch.float32 if learns else self.precision).requires_grad_(learns)
        return vit.compile_blocks(any_length) if self.compile else vit

    def autocast(self, vit: ViT) -> AbstractContextManager[Any]:
        """Compute in bf16 where the weights are kept in fp32 because they learn."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision != vit.dtype)

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Inside the block, CUDA uses only kernels that give the same bits every time, and refuses operations without
        such a kernel. (CPUs have no other kind.) It matters for attention and its gradient: cuDNN may add in any order.

        PyTorch has one such setting per process, so the first thread that enters sets it and the last one that leaves
        restores it.
        """
        global _inside, _before
        if self.device.type != "cuda" or not self.deterministic:
            yield
            return
        more: Any = torch.utils.deterministic
        with _lock:
            if not _inside:
                _before = torch.get_deterministic_debug_mode(), more.fill_uninitialized_memory
                torch.set_deterministic_debug_mode("error")
                more.fill_uninitialized_memory = False  # it helps debugging, but is slow
            _inside += 1
        try:
            yield
        finally:
            with _lock:
                _inside -= 1
                if not _inside:
                    torch.set_deterministic_debug_mode(_before[0])
                    more.fill_uninitialized_memory = _before[1]


_lock = threading.Lock()
_inside = 0  # how many threads are inside `Runtime.repeatable` now
_before: tuple[int, bool] = (0, False)  # PyTorch's settings before the first of them entered


def keep_kernels(folder: Path) -> None:
    """Keep compiled kernels here, if it can be written to, and not among temporary files, as PyTorch does."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
            os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def pick_device(name: str) -> torch.device:
    """A device by its name; for "auto" an Nvidia GPU, else Apple's GPU, else the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # the device must hold values; "meta" has only shapes
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); try auto or cpu"
        ) from None
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """bf16 where the hardware has it; CPUs get fp32, which is many times faster there."""
    if name not in ("auto", "fp32", "bf16"):
        raise UserError(f"precision {name!r} is unknown; give auto, fp32 or bf16")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


# -------------------------------------------------------------------------------------------------------- seeds


def derive_seed(*parts: int | str) -> int:
    """Independent seeds for independent purposes."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


_seeding = threading.RLock()  # PyTorch has one random state for all threads


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed inside the block and leave the caller's random state as it was. One thread at a time."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


# ------------------------------------------------------------------------------------------------------ machine


def hardware(device: torch.device) -> str:
    """The hardware that a run's times were measured on, for people to read."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def cpu_name() -> str:
    """The processor's model, if the system tells it: math libraries choose their kernels by it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def rounding(device: torch.device, processes: int = 1) -> dict[str, str | int]:
    """Everything besides settings and seeds that decides the last bits of a result. Runs for which this is equal agree
    to the bit."""
    together: dict[str, str | int] = {"processes": processes} if processes > 1 else {}
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, **together}
    return {
        "device": cpu_name(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **together,
    }

"""What a run costs besides time: memory, what is kept between tasks, and operations per image."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vqprompt.core.runtime.device import seeded
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.base import View


def forget_peak(device: torch.device) -> None:
    """From now on, `memory_used` is about what comes: a worker's run is not charged for the run before."""
    if device.type == "cuda":
        gc.collect()  # what the run before left in circles
        torch.cuda.reset_peak_memory_stats(device)


def memory_used(device: torch.device) -> int:
    """Bytes: the most that this process has held on the GPU at once since `forget_peak`; without one, what it holds in
    memory now."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else int(psutil.Process().memory_info().rss)


class FlopCounter(TorchDispatchMode):
    """Adds up what PyTorch's formulas give. (PyTorch's own counter also follows modules, which fails for some.)"""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(learner: Learner, training: bool = False) -> int:
    """Floating-point operations per test image, or per image of a training step, forwards and backwards. A product and
    its sum are two. What a run computes once and keeps, such as queries, is counted as if it were computed each time.
    training: call it between two epochs."""
    method, vit, side = learner.method, learner.vit, learner.vit.config.image_size
    view = View(vit, lambda: torch.zeros(1, 3, side, side, dtype=vit.dtype, device=learner.device))
    # there are no formulas for compiled code, nor for all kinds of fused attention
    eager = torch.compiler.set_stance("force_eager") if vit.compiled else nullcontext()
    counter = FlopCounter()  # type: ignore[no-untyped-call]
    with eager, sdpa_kernel(SDPBackend.MATH), seeded(0), learner.runtime.autocast(vit), counter:
        if training:
            view.labels, view.task = torch.nonzero(~method.absent)[:1, 0], method.task.number  # any class of the task
            parameters = [p for group in method.parameter_groups() for p in group["params"] if p.requires_grad]
            torch.autograd.grad(torch.stack(list(method.losses(view).values())).sum(), parameters, allow_unused=True)
        else:
            method.logits(view)
    return counter.flops

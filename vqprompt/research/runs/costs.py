"""What a run costs besides time: memory, what is kept between tasks, and operations per image."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from vqprompt.core.runtime.device import seeded
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.base import Method, View


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held at once: on the GPU if it uses one, else in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    info = psutil.Process().memory_info()
    if sys.platform == "win32":
        return int(info.peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def kept_bytes(method: Method) -> int:
    """Bytes that a method carries from task to task: prompts, classifiers, statistics with the matrices that classes
    share, exemplars, a backbone if it is tuned. A frozen backbone does not count."""
    return sum(tensor.nbytes for name, tensor in method.state_dict().items() if method.saved(name))


def flops_to_test(learner: Learner) -> int:
    """Floating-point operations per test image; a multiplication and its addition are two."""
    with torch.no_grad():
        return _count(learner, lambda: learner.method.logits(_view(learner)))


def flops_to_train(learner: Learner) -> int:
    """The same per image of a training step, forwards and backwards. Call it between two epochs. What a run computes
    once and keeps, such as queries, is counted as if it were computed in every step."""
    method = learner.method
    label = torch.nonzero(~method.absent)[:1, 0]  # any class of the task
    parameters = [p for group in method.parameter_groups() for p in group["params"] if p.requires_grad]

    def step() -> None:
        losses = method.losses(_view(learner, label))
        torch.autograd.grad(torch.stack(list(losses.values())).sum(), parameters, allow_unused=True)

    return _count(learner, step)


def _view(learner: Learner, labels: torch.Tensor | None = None) -> View:
    """One black image."""
    side, vit = learner.vit.config.image_size, learner.vit
    image = torch.zeros(1, 3, side, side, dtype=vit.dtype, device=learner.device)
    return View(vit, lambda: image, labels=labels, task=None if labels is None else learner.method.task.number)


def _count(learner: Learner, work: Callable[[], object]) -> int:
    # the counter sees neither into compiled code nor into fused attention
    eager = torch.compiler.set_stance("force_eager") if learner.vit.compiled else nullcontext()
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._addmm_activation: addmm_flop})
    with eager, sdpa_kernel(SDPBackend.MATH), seeded(0), learner.runtime.autocast(learner.vit), counter:
        work()
    return int(counter.get_total_flops())

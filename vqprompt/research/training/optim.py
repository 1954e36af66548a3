"""Optimizers, and learning rates over a task: our own schedule, and those of published code.

A schedule gives the rate of a parameter group from its `scale`, because some published ones use the same rate for all
groups in some steps, whatever their scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vqprompt.research.training.settings import OptimizerName, Training

Inputs = dict[str, Tensor]
Losses = dict[str, Tensor]
"""Named terms; the loop minimizes their sum and logs each."""
Rate = Callable[[float], float]
"""The rate of a parameter group, by its scale."""


def make_optimizer(
    groups: Sequence[dict[str, Any]], name: OptimizerName, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """`scale` of a group multiplies the learning rate; its other settings go to the optimizer unchanged."""
    prepared = [{**g, "lr": lr * g.get("scale", 1.0)} for g in groups]
    on_gpu = any(p.is_cuda for g in groups for p in g["params"])
    if name == "sgd":
        return torch.optim.SGD(prepared, momentum=0.9, weight_decay=weight_decay, fused=on_gpu)
    return torch.optim.AdamW(prepared, betas=(0.9, 0.999), weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu)


def set_rates(optimizer: torch.optim.Optimizer, rate: float | Rate) -> None:
    """Every group gets the rate times its scale. On CUDA it is in device memory, where a recorded step reads it."""
    for group in optimizer.param_groups:
        scale, device = group.get("scale", 1.0), group["params"][0].device
        own = rate(scale) if callable(rate) else rate * scale
        if device.type != "cuda":
            group["lr"] = own
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = torch.tensor(own, device=device)


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float) -> None:
    """Scale gradients down to a norm of at most `largest`. Parameter groups with the same `clip` share one norm."""
    parts: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        parts.setdefault(group.get("clip", ""), []).extend(group["params"])
    for parameters in parts.values():
        torch.nn.utils.clip_grad_norm_(parameters, largest)


# ---------------------------------------------------------------------------------------------- schedules


def cosine_decay(peak: float, low: float, step: int, steps: int) -> float:
    """From `peak` at step 0 down to `low` at step `steps`."""
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * step / steps))


def rate_at(settings: Training, epoch: int, step: int, steps: int) -> Rate:
    """The rate of one step. epoch, step: which one, from 0. steps: how many the task has.

    cosine        ours: per step, from lr to min_lr
    constant      EvoPrompt
    steps         SLCA, HiDe-Prompt: lr, times gamma after each milestone
    epoch-cosine  HiDe-Prompt on ImageNet-R: per epoch, one epoch late, as its scheduler is called after an epoch
    annealing     SLDC: per epoch, on time
    released      VQ-Prompt: the first step at the full rate, then `hold` steps at min_lr, then cosine per step
    coda          CODA-Prompt, and VQ-Prompt on CUB-200: a quarter of a cosine, per epoch
    """
    s = settings
    if s.schedule == "released":
        return lambda scale: _released(s, step, steps, s.lr * scale)
    if s.schedule in ("epoch-cosine", "annealing"):
        late = int(s.schedule == "epoch-cosine")
        return lambda scale: cosine_decay(s.lr * scale, s.min_lr, max(epoch - late, 0), s.epochs)
    if s.schedule == "constant":
        rate = s.lr
    elif s.schedule == "steps":
        rate = s.lr * s.gamma ** sum(epoch >= share * s.epochs - 1e-9 for share in s.milestones)
    elif s.schedule == "coda":
        rate = s.lr * math.cos(99 * math.pi * epoch / (200 * max(s.epochs - 1, 1)))
    else:
        rate = cosine_decay(s.lr, s.min_lr, step, max(steps - 1, 1))
    return lambda scale: rate * scale


def _released(settings: Training, step: int, steps: int, peak: float) -> float:
    """The published code sets the first rate before its scheduler, so the schedule begins one step late. It counts
    `nominal_steps` per epoch: a task with fewer does not reach the end, a task with more stays at min_lr."""
    planned, late = settings.nominal_steps * settings.epochs or steps, step - 1
    if step == 0:
        return peak
    if late < settings.hold or late >= planned:
        return settings.min_lr
    return cosine_decay(peak, settings.min_lr, late - settings.hold, planned - settings.hold)

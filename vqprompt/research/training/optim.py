"""Optimizers and learning rates: what the training loop and the classifier's rebalancing share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vqprompt.research.training.schedules import Rate, cosine_decay
from vqprompt.research.training.settings import OptimizerName

__all__ = ["Inputs", "Losses", "clip_gradients", "cosine_decay", "make_optimizer", "set_rates"]

Inputs = dict[str, Tensor]
Losses = dict[str, Tensor]
"""Named terms; the loop minimizes their sum and logs each."""


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

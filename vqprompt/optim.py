"""Optimizers, learning rates and recorded steps: what the loop and the classifier's rebalancing share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

OptimizerName = Literal["adamw", "sgd"]
Inputs = dict[str, Tensor]
Losses = dict[str, Tensor]
"""Named terms; the loop minimizes their sum and logs each."""


def make_optimizer(
    groups: Sequence[dict[str, Any]], name: OptimizerName, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """`scale` of a group multiplies the learning rate; whatever else it sets passes through."""
    prepared = [{**g, "lr": lr * g.get("scale", 1.0)} for g in groups]
    on_gpu = any(p.is_cuda for g in groups for p in g["params"])
    if name == "sgd":
        return torch.optim.SGD(prepared, momentum=0.9, weight_decay=weight_decay, fused=on_gpu)
    return torch.optim.AdamW(prepared, betas=(0.9, 0.999), weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu)


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Every group gets the rate times its scale: in device memory, where a recorded step reads it; else as a number."""
    for group in optimizer.param_groups:
        own, device = rate * group.get("scale", 1.0), group["params"][0].device
        if device.type != "cuda":
            group["lr"] = own
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = torch.tensor(own, device=device)


def cosine(peak: float, low: float, step: int, steps: int) -> float:
    """From `peak` at step 0 down to `low` at step `steps`."""
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Recorded:
    """A step that, on CUDA, is recorded once as a graph and replayed: one launch instead of about a thousand.

    The first step runs as it is (compilers, allocators and the optimizer's state settle then); so do batches of
    another shape, and every step if the recording fails.
    """

    EAGER_STEPS = 1

    def __init__(self, step: Callable[[Inputs], Losses], device: torch.device) -> None:
        self.step, self.eager_left = step, self.EAGER_STEPS
        self.enabled = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Inputs = {}
        self.losses: Losses = {}

    def __call__(self, inputs: Inputs) -> Losses:
        if not self.enabled or (self.graph and any(t.shape != self.inputs[n].shape for n, t in inputs.items())):
            return self.step(inputs)
        if self.eager_left:
            self.eager_left -= 1
            side = torch.cuda.Stream()  # graphs want their warm-up on a stream of its own
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                losses = self.step(inputs)
            torch.cuda.current_stream().wait_stream(side)
            return losses
        if self.graph is None:
            self.inputs, graph = {name: t.clone() for name, t in inputs.items()}, torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may be reading images
                    self.losses = self.step(self.inputs)
            except RuntimeError as error:
                self.enabled = False
                warnings.warn(f"training runs unrecorded, and slower: {error}", stacklevel=2)
                return self.step(inputs)
            self.graph = graph
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return self.losses

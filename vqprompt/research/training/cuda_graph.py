"""Training steps that are recorded once as a CUDA graph and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from vqprompt.research.training.optim import Inputs, Losses

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_last: dict[torch.device, torch.cuda.CUDAGraph] = {}  # the last recording, which holds memory for the next one


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A stream besides the usual one, always the same for a purpose: steps then reuse its memory. It belongs to this
    device; PyTorch would take the current one."""
    return _streams.setdefault((device, purpose), torch.cuda.Stream(device))


class GraphedStep:
    """A step that, on CUDA, is recorded once as a graph and replayed: one launch instead of about a thousand.

    The first step is not recorded, because compilers, allocators and the optimizer's state are set up in it. Batches of
    another shape are not recorded either. If recording fails, or is not `enabled`, no step is recorded. An input that
    is the same tensor as in the last step is not copied again.
    """

    def __init__(self, step: Callable[[Inputs], Losses], device: torch.device, enabled: bool = True) -> None:
        self.step, self.device, self.first = step, device, True
        self.enabled = device.type == "cuda" and enabled
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Inputs = {}
        self.copied: Inputs = {}  # what `inputs` are copies of
        self.losses: Losses = {}

    def __call__(self, inputs: Inputs) -> Losses:
        if not self.enabled or (self.graph and any(t.shape != self.inputs[n].shape for n, t in inputs.items())):
            return self.step(inputs)
        if self.first:
            self.first = False
            side = side_stream(self.device, "recording")
            main = torch.cuda.current_stream(self.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                losses = self.step(inputs)
            main.wait_stream(side)
            return losses
        if self.graph is None:
            try:
                self.graph = self._record(inputs)
            except RuntimeError as error:
                self.enabled = False
                warnings.warn(f"steps cannot be recorded as a CUDA graph, so training is slower: {error}", stacklevel=2)
                return self.step(inputs)
        for name, tensor in inputs.items():
            if tensor is not self.copied.get(name):
                self.inputs[name].copy_(tensor)
        self.copied = inputs
        self.graph.replay()
        return self.losses

    def _record(self, inputs: Inputs) -> torch.cuda.CUDAGraph:
        """Unlike `torch.cuda.graph`, this gives no memory back to the driver if there is plenty: to ask for it again in
        every task takes time. Other threads may be reading images meanwhile (`thread_local`)."""
        self.inputs, graph = {name: t.clone() for name, t in inputs.items()}, torch.cuda.CUDAGraph()
        free, total = torch.cuda.mem_get_info(self.device)
        last, plenty = _last.pop(self.device, None), free > total // 2
        if not plenty:
            last = None
            torch.cuda.empty_cache()
        with torch.cuda.stream(side_stream(self.device, "recording")):
            graph.capture_begin(None if last is None else last.pool(), capture_error_mode="thread_local")
            try:
                self.losses = self.step(self.inputs)
            finally:
                graph.capture_end()
        if plenty:
            _last[self.device] = graph
        return graph

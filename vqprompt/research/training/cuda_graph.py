"""Training steps that are recorded once as a CUDA graph and replayed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch

from vqprompt.research.training.optim import Inputs, Losses


class _Shared(threading.local):
    """What the recordings of one thread share. The next one reuses the memory of the last one."""

    stream: torch.cuda.Stream | None = None  # a recording, and the step before it, need a stream of their own
    last: torch.cuda.CUDAGraph | None = None


_shared = _Shared()


class GraphedStep:
    """A step that, on CUDA, is recorded once as a graph and replayed: one launch instead of about a thousand.

    The first step is not recorded, because compilers, allocators and the optimizer's state are set up in it. Batches of
    another shape are not recorded either. If recording fails, or is not `enabled`, no step is recorded.
    """

    def __init__(self, step: Callable[[Inputs], Losses], device: torch.device, enabled: bool = True) -> None:
        self.step, self.first = step, True
        self.enabled = device.type == "cuda" and enabled
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Inputs = {}
        self.losses: Losses = {}

    def __call__(self, inputs: Inputs) -> Losses:
        if not self.enabled or (self.graph and any(t.shape != self.inputs[n].shape for n, t in inputs.items())):
            return self.step(inputs)
        if self.first:
            self.first = False
            _shared.stream = side = _shared.stream or torch.cuda.Stream()
            if torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():  # this step may need as much again
                _shared.last = None
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                losses = self.step(inputs)
            torch.cuda.current_stream().wait_stream(side)
            return losses
        if self.graph is None:
            self.inputs, graph = {name: t.clone() for name, t in inputs.items()}, torch.cuda.CUDAGraph()
            try:
                self.losses = self._record(graph)
            except RuntimeError as error:
                self.enabled = False
                warnings.warn(f"steps cannot be recorded as a CUDA graph, so training is slower: {error}", stacklevel=2)
                return self.step(inputs)
            self.graph = _shared.last = graph
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return self.losses

    def _record(self, graph: torch.cuda.CUDAGraph) -> Losses:
        """As `torch.cuda.graph` does it, but only the first recording gives free memory back to the driver."""
        memory = _shared.last.pool() if _shared.last else None
        if memory is None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        with torch.cuda.stream(_shared.stream):
            graph.capture_begin(memory, capture_error_mode="thread_local")  # other threads may be reading images
            try:
                return self.step(self.inputs)
            finally:
                graph.capture_end()

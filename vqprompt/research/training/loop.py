"""The one training loop (paper, section 4.4): optimizer and schedule by settings, everything drawn from seeds.

All randomness of an epoch comes from (seed, task, epoch), and kernels add up in the same order every time. So an epoch
can be repeated, and a run that was killed and resumed gives the same result as one that was not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.runtime.device import Runtime
from vqprompt.core.runtime.distributed import WHOLE
from vqprompt.research.training.batches import TaskBatches, draw
from vqprompt.research.training.cuda_graph import GraphedStep, side_stream
from vqprompt.research.training.optim import Inputs, Losses, clip_gradients, make_optimizer, rate_at, set_rates
from vqprompt.research.training.view import View

MANY_STEPS = 40  # with fewer, looking ahead takes longer than it saves: the last step does it for nothing


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: its number and, for each loss term, the value of every step."""

    number: int
    losses: dict[str, list[float]]


@dataclass(frozen=True)
class LoopState:
    """Where a loop is between two epochs: all that another loop needs to continue. optimizer: its state dict."""

    next_epoch: int
    optimizer: dict[str, Any]
    images_seen: int
    seconds: float


@dataclass(eq=False)
class TrainingLoop:
    """Minimizes the sum of a method's losses over the batches of one task.

    for epoch in TrainingLoop(method.losses, method.parameter_groups(), method.vit, batches, runtime):
        print(epoch.losses)
    """

    losses_of: Callable[[View], Losses]  # the loss terms of a view
    groups: list[dict[str, Any]]  # the optimizer's parameter groups
    vit: ViT
    batches: TaskBatches
    runtime: Runtime
    task: int = 0  # its number
    progress: Report = ignore
    queries: bool = False  # every step takes queries of its images, which a backbone computes that stays as it is

    def __post_init__(self) -> None:
        self.settings = s = self.batches.settings
        self.ranks, self.part = self.batches.ranks, WHOLE
        self.ahead: Ahead | None = None
        self.optimizer = make_optimizer(self.groups, s.optimizer, s.lr, s.weight_decay)
        self.next_epoch, self.images_seen, self.seconds = 0, 0, 0.0

    def state(self) -> LoopState:
        """Call it between two epochs."""
        return LoopState(self.next_epoch, self.optimizer.state_dict(), self.images_seen, self.seconds)

    def resume(self, state: LoopState) -> None:
        """Continue from another loop's `state`, which may come from another machine."""
        self.next_epoch, self.images_seen, self.seconds = state.next_epoch, state.images_seen, state.seconds
        groups = [  # these flags depend on the machine, not on what was learned
            {**saved, **{flag: own[flag] for flag in ("fused", "capturable") if flag in own}}
            for saved, own in zip(state.optimizer["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        self.optimizer.load_state_dict({**state.optimizer, "param_groups": groups})

    def __iter__(self) -> Iterator[Epoch]:
        """Train, and yield after each epoch."""
        step_or_replay = GraphedStep(self._step, self.runtime.device, enabled=self.ranks.count == 1)
        sizes = self.batches.sizes
        step, steps, images = sum(map(len, sizes[: self.next_epoch])), sum(map(len, sizes)), sum(map(sum, sizes))
        drawn, inputs = self.batches.inputs(self.next_epoch), None
        same = len({size for epoch in sizes for size in epoch}) == 1
        looks_ahead = step_or_replay.enabled and self.queries and same and steps >= MANY_STEPS
        for number in range(self.next_epoch, self.settings.epochs):
            started = time.perf_counter()
            losses, values = Losses(), list[Tensor]()
            with self.runtime.repeatable():
                for size in sizes[number]:
                    inputs = inputs or next(drawn)
                    if looks_ahead and self.ahead is None:
                        self.ahead = Ahead(self.vit, self.runtime.device, inputs)
                    set_rates(self.optimizer, rate_at(self.settings, number, step, steps))
                    self.part = self.ranks.part(size)
                    following = None if self.ahead is None else next(drawn, inputs)
                    losses = step_or_replay(inputs if following is None else {**following, "labels": inputs["labels"]})
                    inputs = following or next(drawn, None)  # drawn while the device still computes
                    # a copy: the next replay overwrites its losses
                    values.append(self.part.weigh(torch.stack(list(losses.values()))))
                    step += 1
                    self.images_seen += size
                    self.progress(Progress(Stage.LEARNING, self.images_seen, images))
            self.next_epoch = number + 1
            summed = self.ranks.add_up(torch.stack(values, dim=1))
            per_term = summed.tolist()  # the only place that waits for the device, once per epoch
            self.seconds += time.perf_counter() - started
            yield Epoch(number, dict(zip(losses, per_term, strict=True)))
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self, inputs: Inputs) -> Losses:
        """A step on these inputs. With an `Ahead`, only the labels are this step's, and all else is the next one's."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.runtime.autocast(self.vit):
            images, ahead = partial(draw, inputs, self.vit), self.ahead
            drawn, query = (images, inputs.get("query")) if ahead is None else (ahead.refuse, ahead.query)
            view = View(self.vit, drawn, query, inputs["labels"], self.task, self.part)
            if ahead is not None:
                ahead.begin(images)
                view.tokens = ahead.tokens
            losses = self.losses_of(view)
        self.part.weigh(torch.stack(list(losses.values())).sum()).backward()
        self.ranks.add_gradients(p for group in self.optimizer.param_groups for p in group["params"])
        if self.settings.clip:
            clip_gradients(self.optimizer, self.settings.clip)
        self.optimizer.step()
        if ahead is not None:
            ahead.end()
        return {name: value.detach() for name, value in losses.items()}


class Ahead:
    """Tokens and queries of a batch's images. While a step works on them, those of the next one are computed beside it,
    so that the GPU never waits between the kernels of a step: neither depends on what it learns."""

    def __init__(self, vit: ViT, device: torch.device, first: Inputs) -> None:
        self.vit, self.device = vit, device
        self.tokens, self.query = self._compute(partial(draw, first, vit))

    @torch.no_grad()
    def _compute(self, images: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        tokens = self.vit.embed(images())
        return tokens, self.vit.query(tokens).float()

    def refuse(self) -> Tensor:
        raise RuntimeError("the images of this step are not there any more, only their tokens and queries")

    def begin(self, images: Callable[[], Tensor]) -> None:
        """Start with the next step's images."""
        self.beside = side_stream(self.device, "beside")
        self.beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.beside):
            self.following = self._compute(images)

    def end(self) -> None:
        """The step is done: what was computed beside it is for the next one."""
        torch.cuda.current_stream(self.device).wait_stream(self.beside)
        self.tokens.copy_(self.following[0])
        self.query.copy_(self.following[1])
        del self.following

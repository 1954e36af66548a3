"""Moving-Weights, ours: the whole backbone tuned slowly, with a memory that moves along.

With `rank`, the change of each weight matrix is reduced to low rank before anything is remembered. A model then
consists of these changes, a few megabytes, and not of a second backbone.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.low_rank import linear_layers
from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import TaskData, View
from vqprompt.research.methods.finetuning import TuningOptions
from vqprompt.research.methods.moving import MovingMemory, MovingOptions

NOT_KEPT = re.compile(r"vit\.(cls_token|pos_embed|patch_embed\..*|blocks\..*\.(qkv|proj|fc1|fc2)\.weight)$")


class MovingWeightsOptions(TuningOptions, MovingOptions):
    rank: int = Field(0, ge=0, description="keep a change of this rank per weight matrix; 0: keep all weights")
    rank_every: int = Field(5, ge=1, description="epochs between two reductions to that rank")


class MovingWeights(MovingMemory):
    title = "Moving-Weights"
    Options: ClassVar[Any] = MovingWeightsOptions
    tunes_backbone = True

    def __init__(self, vit: ViT, options: MovingWeightsOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        if options.rank or options.frozen_beside:
            self.frozen = vit.frozen_copy()  # not saved: the backbone is named in every checkpoint
        if options.rank:
            for embedding in (vit.cls_token, vit.pos_embed, *vit.patch_embed.parameters()):
                embedding.requires_grad_(False)
            for number, layer in enumerate(linear_layers(vit)):
                rows, columns = layer.weight.shape
                self.register_buffer(f"up{number}", torch.zeros(rows, options.rank))
                self.register_buffer(f"down{number}", torch.zeros(options.rank, columns))

    def encode_frozen(self, view: View, class_tokens: tuple[int, ...]) -> Tensor:
        assert self.frozen is not None
        return self.frozen.encode(view.through(self.frozen).tokens, class_tokens=class_tokens).float()

    def end_epoch(self, epoch: int) -> None:
        if self.options.rank and (epoch + 1) % self.options.rank_every == 0:
            self.reduce()

    def finish_task(self, data: TaskData) -> None:
        if self.options.rank and not self._reduced:
            self.reduce()
        super().finish_task(data)

    def go_back(self, share: float, former: MovingMemory) -> None:
        super().go_back(share, former)
        if self.options.rank:
            self.reduce()

    @property
    def _changes(self) -> list[tuple[nn.Linear, Tensor, Tensor, Tensor]]:
        """Each layer, its weight in the frozen network, and the two factors of its change."""
        assert self.frozen is not None
        pairs = zip(linear_layers(self.vit), linear_layers(self.frozen), strict=True)
        return [(a, b.weight, getattr(self, f"up{n}"), getattr(self, f"down{n}")) for n, (a, b) in enumerate(pairs)]

    @property
    def _reduced(self) -> bool:
        return all(torch.equal(layer.weight, start + up @ down) for layer, start, up, down in self._changes)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the change of each weight matrix by its best approximation of the chosen rank: its projection onto
        the leading eigenvectors of its Gram matrix. All matrices have one side of the network's width, so one call
        finds the eigenvectors of all."""
        width, parts = self.vit.config.width, self._changes
        changes = [(layer.weight - start).double() for layer, start, _, _ in parts]
        tall = [change if change.shape[1] == width else change.T for change in changes]
        vectors = torch.linalg.eigh(torch.stack([change.T @ change for change in tall])).eigenvectors
        for (_, _, up, down), change, leading in zip(parts, tall, vectors[:, :, -self.options.rank :], strict=True):
            factors = change @ leading, leading.T
            first, second = factors if up.shape[0] == len(change) else (factors[1].T, factors[0].T)
            up.copy_(first)
            down.copy_(second)
        self.apply_changes()

    @torch.no_grad()
    def apply_changes(self) -> None:
        for layer, start, up, down in self._changes:
            layer.weight.copy_(start + up @ down)

    def loaded(self) -> None:
        super().loaded()
        if self.options.rank and self.task_head is None:
            self.apply_changes()

    def saved(self, name: str) -> bool:
        """Between tasks, a reduced model keeps no weight matrix and no embedding. In the middle of a task it is saved
        whole."""
        reduced = self.options.rank and self.task_head is None
        return super().saved(name) and not (reduced and NOT_KEPT.match(name))

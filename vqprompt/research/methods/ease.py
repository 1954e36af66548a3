"""EASE (Zhou et al., CVPR 2024): a subspace per task.

Every task learns its own adapters, and old ones stay. Each set of adapters gives a subspace, and a class has a mean in
every subspace. In subspaces that came after the class its images are missing, so the mean is synthesized: a mixture of
the means of classes that were seen there, weighted by how similar they are to the class in its own subspace. Scores are
cosines, summed over subspaces; a class's own subspace counts fully, the others a little.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import Losses, TaskData, TaskInfo, View
from vqprompt.research.methods.prompts import train_only
from vqprompt.research.methods.prototypes import TEMPERATURE, AdapterOptions, Adapters, CosineTraining


class EaseOptions(AdapterOptions):
    others: float = Field(0.1, ge=0, description="weight of all subspaces together that are not the class's own")
    temperature: float = Field(1.0, gt=0, description="of the similarities by which a missing mean is made of others")


class EASE(CosineTraining):
    title = "EASE"
    Options: ClassVar[Any] = EaseOptions
    prototypes: Tensor  # [C, T, D], the mean of each class in each subspace

    def __init__(self, vit: ViT, options: EaseOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.adapters = nn.ModuleList()
        self.register_buffer("prototypes", torch.zeros(0, 0, vit.config.width))

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        config, o = self.vit.config, self.options
        self.adapters.append(Adapters(config.depth, config.width, o.rank, o.adapter_scale).to(self.head.weight.device))
        train_only(self.adapters, task.number)

    def features(self, view: View) -> tuple[Tensor, Losses]:
        """In training, with the task's own adapters [B, D]; afterwards in all subspaces, joined [B, T·D]."""
        used = [self.adapters[self.task.number]] if view.labels is not None else self.adapters
        seen = [self.vit.encode(view.tokens, adapters=a.by_block()).float() for a in used]
        return torch.cat(seen, dim=1), {}

    @torch.no_grad()
    def finish_task(self, data: TaskData) -> None:
        subspaces = len(self.adapters)
        new = data.class_sums(subspaces * self.vit.config.width).means.float().unflatten(1, (subspaces, -1))
        self.prototypes = torch.cat([F.pad(self.prototypes, (0, 0, 0, 1)), new])
        self._synthesize()

    def _synthesize(self) -> None:
        """Fill in the means of classes in subspaces that came after them, from all classes whose images were seen
        there."""
        known, first = self.prototypes, [0, *accumulate(self.task_sizes)]
        for task in range(len(self.task_sizes)):
            old = known[first[task] : first[task + 1]]
            for later in range(task + 1, len(self.task_sizes)):
                seen = known[first[later] :]
                alike = F.normalize(old[:, task], dim=-1) @ F.normalize(seen[:, task], dim=-1).T
                old[:, later] = torch.softmax(alike / self.options.temperature, dim=-1) @ seen[:, later]

    def logits(self, view: View) -> Tensor:
        features = self.features(view)[0].unflatten(1, (len(self.adapters), -1))
        subspaces = self.prototypes.shape[1]
        known = features[:, :subspaces]  # in the middle of a task its subspace has no means yet
        cosines = torch.einsum("btd,ctd->bct", F.normalize(known, dim=-1), F.normalize(self.prototypes, dim=-1))
        own = torch.repeat_interleave(torch.tensor(self.task_sizes, device=features.device))[: len(self.prototypes)]
        weights = torch.where(F.one_hot(own, subspaces).bool(), 1.0, self.options.others / max(subspaces - 1, 1))
        return self.with_missing((cosines * weights).sum(-1) / TEMPERATURE)

"""SLCA, slow learner with classifier alignment (Zhang et al. 2023).

The whole network is tuned, the backbone a hundred times slower than the classifier, so that it drifts little; after
each task the classifier is aligned on pseudo-features from one full covariance per class. The next task continues
with the classifier from before the alignment.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import STATISTICS, Method, StatisticsOptions, TaskData, TaskInfo
from vqprompt.research.methods.finetuning import TuningOptions
from vqprompt.research.training.rebalancing import Rebalancing


class SLCAOptions(TuningOptions, StatisticsOptions):
    backbone_lr_scale: float = Field(0.01, gt=0, description="the backbone's rate, relative to the classifier's")
    statistics: bool = Field(True, description=STATISTICS)
    rebalancing: Rebalancing = Rebalancing(
        covariance="full", epochs=5, lr=0.01, optimizer="sgd", ratio=2, logit_norm=0.1, norm_by_task=True,
        steps_for="seen", mean_decay=0.1,
    )  # fmt: skip


class SLCA(Method):
    title = "SLCA"
    Options: ClassVar[Any] = SLCAOptions
    tunes_backbone = True
    classes_return = True
    unaligned: Tensor  # [C, D + 1], weights and biases as training left them

    def __init__(self, vit: ViT, options: StatisticsOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.register_buffer("unaligned", torch.zeros(0, self.feature_width + 1))

    @torch.no_grad()
    def start_task(self, task: TaskInfo) -> None:
        if len(self.unaligned):
            self.head.weight.copy_(self.unaligned[:, :-1])
            self.head.bias.copy_(self.unaligned[:, -1])
        super().start_task(task)

    def finish_task(self, data: TaskData) -> None:
        self.unaligned = torch.cat([self.head.weight, self.head.bias[:, None]], dim=1).detach()
        super().finish_task(data)

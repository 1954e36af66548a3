"""SLCA, slow learner with classifier alignment (Zhang et al. 2023).

The whole network is tuned, the backbone a hundred times slower than the classifier, so that it drifts little; after
each task the classifier is aligned on pseudo-features from one full covariance per class. The next task continues
with the classifier from before the alignment.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import Method, StatisticsOptions, TaskData, TaskInfo
from vqprompt.research.methods.finetuning import FineTuningOptions


class SLCA(Method):
    title = "SLCA"
    Options: ClassVar[Any] = FineTuningOptions
    tunes_backbone = True
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

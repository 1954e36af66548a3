"""SLDC (2025, arXiv 2511.09926): low-rank tuning task by task, features distilled, class Gaussians moved along.

The backbone learns through low-rank changes. Its features and their lengths are held to those from before the task. The
loss is half cross-entropy, half reverse cross-entropy. After a task a linear map from old to new features,
fitted on unit-length features and blended with the identity when images are few, moves the Gaussians of old classes;
the classifier is then trained on samples of them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.low_rank import add_low_rank, low_rank_changes
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.statistics.drift import Drift, Moving
from vqprompt.research.methods.base import STATISTICS, Losses, Method, StatisticsOptions, TaskData
from vqprompt.research.training.rebalancing import Rebalancing

RIDGE = 1e-4


class SLDCOptions(StatisticsOptions):
    rank: int = Field(4, ge=1, description="rank of the change of each weight matrix")
    backbone_lr_scale: float = Field(0.1, gt=0, description="the low-rank changes' rate, relative to the classifier's")
    symmetric: bool = Field(True, description="half cross-entropy, half reverse cross-entropy")
    norm_distillation: float = Field(0.1, ge=0, description="weight of the loss that keeps the features' lengths")
    statistics: bool = Field(True, description=STATISTICS)
    rebalancing: Rebalancing = Rebalancing(covariance="full", epochs=5, lr=0.01, optimizer="sgd", ratio=2)
    moving: Moving = Moving(how="linear")
    feature_distillation: float = Field(
        1.0, ge=0, description="weight of the loss that keeps features where they were before the task"
    )


class SLDC(Method):
    title = "SLDC"
    year = 2025
    summary = "low-rank tuning; class Gaussians moved by a linear map"
    Options: ClassVar[Any] = SLDCOptions
    training_defaults: ClassVar = {"lr": 1e-3, "batch_size": 16}
    tunes_backbone = True

    def __init__(self, vit: ViT, options: SLDCOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        add_low_rank(vit, options.rank)

    def prompting_parameters(self) -> list[nn.Parameter]:
        return [p for change in low_rank_changes(self.vit) for p in (change.up, change.down)]

    def parameter_groups(self) -> list[dict[str, Any]]:
        own = {"params": self.prompting_parameters(), "scale": self.options.backbone_lr_scale}
        return [{"params": list(self.head.parameters()), "scale": 1.0}, own]

    def saved(self, name: str) -> bool:
        return not name.startswith("vit.") or name.endswith((".up", ".down"))

    def keep_features(self, features: Tensor, before: Tensor) -> Losses:
        lengths = F.mse_loss(features.norm(dim=1), before.norm(dim=1))
        kept = super().keep_features(features, before)
        return {**kept, "norm distillation": self.options.norm_distillation * lengths}

    def drift(self, data: TaskData) -> Drift:
        assert data.features_before is not None
        return blended_map(data.features_before, data.features)


def blended_map(before: Tensor, after: Tensor) -> Drift:
    """x → x A with A = (XᵀX + 1e-4 I)⁻¹ XᵀY of unit-length rows, blended with the identity by exp(−n / d)."""
    x, y = (F.normalize(t.double(), dim=1) for t in (before, after))
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    fitted = torch.linalg.solve(x.T @ x + RIDGE * identity, x.T @ y)
    weight = math.exp(-len(x) / x.shape[1])
    slope = (1 - weight) * (fitted - identity)
    origin = torch.zeros_like(x[0])
    return Drift(origin, origin, slope)

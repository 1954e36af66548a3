"""FeCAM (Goswami et al., NeurIPS 2023): the nearest class mean, by a Mahalanobis distance with a covariance per class.

Features are scaled to unit length. The covariance of each class is shrunk, because images are fewer than dimensions,
and made a correlation matrix, so that the distances to classes with different variances can be compared. Nothing is
trained, or, as in LAMDA-PILOT, adapters in the first task.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.statistics.gaussians import FullGaussians
from vqprompt.research.methods.base import Losses, TaskData, View
from vqprompt.research.methods.prototypes import FirstTaskAdapters, OnceAdaptedOptions


class FeCAMOptions(OnceAdaptedOptions):
    adapt: bool = Field(False, description="learn adapters in the first task")
    variance_shrinkage: float = Field(1.0, ge=0, description="added to variances, in units of their mean")
    covariance_shrinkage: float = Field(0.0, ge=0, description="added to covariances, in units of their mean")


class FeCAM(FirstTaskAdapters):
    title = "FeCAM"
    Options: ClassVar[Any] = FeCAMOptions
    classifies_frozen = True
    prototypes: Tensor  # [C, D], mean features of each class
    precisions: Tensor  # [C, D, D], inverse correlations

    def __init__(self, vit: ViT, options: FeCAMOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.register_buffer("prototypes", torch.zeros(0, self.feature_width))
        self.register_buffer("precisions", torch.zeros(0, self.feature_width, self.feature_width))

    def prompting_parameters(self) -> list[nn.Parameter]:
        return super().prompting_parameters() if self.options.adapt else []

    def read(self, view: View) -> tuple[Tensor, Losses]:
        features, own = super().read(view)
        return F.normalize(features, dim=-1), own

    @torch.no_grad()
    def finish_task(self, data: TaskData) -> None:
        statistics = FullGaussians(self.feature_width).to(data.labels.device)
        statistics.add(data.features, data.labels - data.task.old_classes)
        o = self.options
        correlations = shrunk_correlations(statistics.spread.double(), o.variance_shrinkage, o.covariance_shrinkage)
        inverse = torch.linalg.pinv(correlations, hermitian=True).to(self.precisions)
        self.prototypes = torch.cat([self.prototypes, statistics.means[:, 0]])
        self.precisions = torch.cat([self.precisions, inverse])

    def logits(self, view: View) -> Tensor:
        away = self.features(view)[0] - self.prototypes[:, None]
        return self.with_missing(-(away @ self.precisions * away).sum(-1).T)


def shrunk_correlations(covariances: Tensor, variance_shrinkage: float, covariance_shrinkage: float) -> Tensor:
    """Correlation matrices of covariances [C, D, D] after the means of their diagonals and of the rest were added."""
    width = covariances.shape[-1]
    diagonal = torch.eye(width).to(covariances)
    variances = covariances.diagonal(dim1=1, dim2=2)
    rest = (covariances.sum((1, 2)) - variances.sum(1)) / max(width * (width - 1), 1)
    shrunk = covariances + variance_shrinkage * variances.mean(1)[:, None, None] * diagonal
    shrunk += covariance_shrinkage * rest[:, None, None] * (1 - diagonal)
    deviations = shrunk.diagonal(dim1=1, dim2=2).clamp(min=1e-12).sqrt()
    return shrunk / (deviations[:, :, None] * deviations[:, None])

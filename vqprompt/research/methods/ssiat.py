"""SSIAT (Tan et al., CVPR 2024): one set of adapters, tuned in every task without any constraint.

The classifier compares directions (cosines times a fixed factor) and learns each task's classes apart from the others.
Old means follow the drift of the new images that were near them. Then one classifier for all classes is trained on
samples of the classes' Gaussians. With `moving.how=linear` covariances follow as well: the idea of MACIL (ICML 2025).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import Head, Method, StatisticsOptions
from vqprompt.research.methods.prototypes import AdapterOptions, Adapters


class SSIATOptions(AdapterOptions, StatisticsOptions):
    sharpness: float = Field(20.0, gt=0, description="factor of the cosines")


class CosineHead(Head):
    """Cosines of features and rows, times a factor. The bias is not used."""

    def __init__(self, width: int, sharpness: float) -> None:
        super().__init__(width)
        self.sharpness = sharpness

    def forward(self, features: Tensor) -> Tensor:
        rows = F.normalize(self.weight, dim=-1).mul(self.sharpness)
        return F.linear(F.normalize(features.float(), dim=-1), rows)


class SSIAT(Method):
    title = "SSIAT"
    Options: ClassVar[Any] = SSIATOptions

    def __init__(self, vit: ViT, options: SSIATOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.head = CosineHead(self.feature_width, options.sharpness)
        self.adapters = Adapters(vit.config.depth, vit.config.width, options.rank, options.adapter_scale)

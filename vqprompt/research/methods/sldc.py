"""SLDC (2025, arXiv 2511.09926): low-rank tuning task by task, features distilled, class Gaussians moved along.

The backbone learns through low-rank changes. Its features and their lengths are held to those from before the task. The
loss is half cross-entropy, half reverse cross-entropy. After a task a weakly nonlinear map from old to new features, or
a linear one that is blended with the identity when images are few, moves the Gaussians of old classes. Then the
classifier is trained on samples of them. As in SLCA, the next task continues with the classifier from before that.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.low_rank import add_low_rank
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.device import seeded
from vqprompt.core.statistics.drift import Drift
from vqprompt.core.statistics.gaussians import ClassStatistics, FullGaussians
from vqprompt.research.methods.base import Losses, StatisticsOptions, TaskData
from vqprompt.research.methods.slca import SLCA

RIDGE = 1e-4
ADDED_LINEAR, ADDED_CURVED = 1e-2, 1e-3  # to variances, after a move


class SLDCOptions(StatisticsOptions):
    rank: int = Field(4, ge=1, description="rank of the change of each weight matrix")
    layers: list[Literal["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]] = Field(
        ["attn.qkv", "mlp.fc1", "mlp.fc2"], description="weight matrices that change, in every block"
    )
    principal: bool = Field(True, description="changes start from singular vectors of the weights, not at random")
    low_rank_scale: float = Field(0.8, gt=0, description="factor of the low-rank changes")
    backbone_lr_scale: float = Field(0.1, gt=0, description="the low-rank changes' rate, relative to the classifier's")
    norm_distillation: float = Field(0.1, ge=0, description="weight of the loss that keeps the features' lengths")
    weakly_nonlinear: bool = Field(True, description="Gaussians are moved by a weakly nonlinear map, not a linear one")
    map_steps: int = Field(5000, ge=1, description="training steps of the weakly nonlinear map")


class SLDC(SLCA):
    title = "SLDC"
    Options: ClassVar[Any] = SLDCOptions
    presets: ClassVar = {}
    backbone_parts = (".up", ".down")

    def __init__(self, vit: ViT, options: SLDCOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        kept = options.rebalancing
        if options.weakly_nonlinear and (kept.covariance, kept.centroids) != ("full", 1):
            raise UserError(
                f"rebalancing.covariance={kept.covariance}, rebalancing.centroids={kept.centroids}: weakly_nonlinear "
                "moves one full Gaussian per class; take full and 1, or weakly_nonlinear=false"
            )
        add_low_rank(vit, options.rank, options.layers, scale=options.low_rank_scale, principal=options.principal)

    def keep_features(self, features: Tensor, before: Tensor) -> Losses:
        lengths = F.mse_loss(features.norm(dim=1), before.norm(dim=1))
        kept = super().keep_features(features, before)
        return {**kept, "norm distillation": self.options.norm_distillation * lengths}

    def drift(self, data: TaskData) -> Drift:
        assert data.features_before is not None
        return blended_map(data.features_before, data.features)

    @torch.no_grad()
    def move_statistics(self, statistics: ClassStatistics, data: TaskData) -> None:
        curved = self.options.weakly_nonlinear
        if not curved:
            super().move_statistics(statistics, data)
        elif data.features_before is not None and isinstance(statistics, FullGaussians):
            mapping = fit_map(data.features_before, data.features, self.options.map_steps, data.seed)
            generator = torch.Generator(data.features.device).manual_seed(data.seed)
            for n, root in enumerate(statistics.roots()):  # class by class: samples of all take much memory
                white = torch.randn(10 * len(root), len(root), generator=generator, device=root.device)
                points = mapping(statistics.means[n] + white @ root.T)
                statistics.means[n], statistics.spread[n] = points.mean(0), torch.cov(points.T)
        if isinstance(statistics, FullGaussians):
            statistics.spread.diagonal(dim1=1, dim2=2).add_(ADDED_CURVED if curved else ADDED_LINEAR)


def blended_map(before: Tensor, after: Tensor) -> Drift:
    """x → x A with A = (XᵀX + 1e-4 I)⁻¹ XᵀY of unit-length rows, blended with the identity by exp(−n / d)."""
    x, y = (F.normalize(t.double(), dim=1) for t in (before, after))
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    fitted = torch.linalg.solve(x.T @ x + RIDGE * identity, x.T @ y)
    weight = math.exp(-len(x) / x.shape[1])
    slope = (1 - weight) * (fitted - identity)
    origin = torch.zeros_like(x[0])
    return Drift(origin, origin, slope)


class WeaklyNonlinearMap(nn.Module):
    """A mixture of the identity, a linear map and a small network, applied to directions. Lengths stay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.linear.weight)
        self.network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.mixture = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))  # before a softmax

    def forward(self, points: Tensor) -> Tensor:
        length, unit = points.norm(dim=1, keepdim=True), F.normalize(points, dim=1)
        same, linear, curved = self.mixture.softmax(0)
        moved: Tensor = length * (same * unit + linear * self.linear(unit) + curved * self.network(unit))
        return moved


def fit_map(before: Tensor, after: Tensor, steps: int, seed: int) -> WeaklyNonlinearMap:
    """Trained on the directions of the features [n, D] of the same images, before and after."""
    x, y = (F.normalize(t.float(), dim=1) for t in (before, after))
    with seeded(seed):
        mapping, batches = WeaklyNonlinearMap(x.shape[1]).to(x.device), torch.randint(len(x), (steps, 32))
    optimizer = torch.optim.Adam(mapping.parameters(), 1e-3, fused=x.is_cuda)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=5e-4)
    with torch.enable_grad():
        for rows in batches.to(x.device):
            optimizer.zero_grad()
            F.mse_loss(mapping(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return mapping.requires_grad_(False)

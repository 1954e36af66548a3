"""RanPAC (McDonnell et al., NeurIPS 2023): random features and ridge regression.

Features go through a fixed random layer with thousands of ReLU units, and a linear classifier on top is solved for from
two sums: the Gram matrix of the random features, and their product with one-hot labels. Sums do not forget. As in APER,
adapters learn only in the first task.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import TaskData, View
from vqprompt.research.methods.prototypes import FirstTaskAdapters, OnceAdaptedOptions


class RanPACOptions(OnceAdaptedOptions):
    projection: int = Field(10_000, ge=1, description="random features (M); the Gram matrix has M² numbers")


RIDGES = [10.0**e for e in range(-8, 9)]
HELD_OUT = 0.2  # fraction of the task's images that chooses the ridge; the others are fitted
FEWEST = 20  # images that may choose; a ridge that fits fewer by chance can spoil what is known of all classes


class RanPAC(FirstTaskAdapters):
    title = "RanPAC"
    Options: ClassVar[Any] = RanPACOptions
    classifies_frozen = True
    projection: Tensor  # [D, M]; not saved, because the seed gives it again
    gram: Tensor  # [M, M], sum of hᵀh
    products: Tensor  # [M, C], sum of hᵀy
    weight: Tensor  # [C, M], the solution
    chosen: Tensor  # [], which of the ridges was chosen last; −1: none yet

    def __init__(self, vit: ViT, options: RanPACOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.register_buffer("projection", torch.randn(self.feature_width, options.projection), persistent=False)
        self.register_buffer("gram", torch.zeros(options.projection, options.projection))
        self.register_buffer("products", torch.zeros(options.projection, 0))
        self.register_buffer("weight", torch.zeros(0, options.projection))
        self.register_buffer("chosen", torch.tensor(-1))

    def lift(self, features: Tensor) -> Tensor:
        """Features [B, D] to random features [B, M]."""
        return (features @ self.projection).relu()

    @torch.no_grad()
    def finish_task(self, data: TaskData) -> None:
        features, targets = data.features, F.one_hot(data.labels, data.task.all_classes).float()
        self.products = F.pad(self.products, (0, data.task.new_classes))
        count, known = int(HELD_OUT * len(features)), int(self.chosen) >= 0
        if not known or count >= max(FEWEST, len(data.classes)):
            self.chosen.fill_(self._choose_ridge(features, targets, data.seed))
        lifted = self.lift(features)
        self.gram, self.products = self.gram + lifted.T @ lifted, self.products + lifted.T @ targets
        lowest = torch.finfo(torch.float32).eps * float(self.gram.norm())  # less is lost in the rounding of the sums
        ridge = max(RIDGES[int(self.chosen)], lowest)
        self.weight = solve_ridge(self.gram.double(), self.products.double(), ridge).float().T

    def _choose_ridge(self, features: Tensor, targets: Tensor, seed: int) -> int:
        """Which ridge has the smallest squared error on a fifth of the task's images. As published, the other images
        of the task are fitted alone, without the sums of the tasks before."""
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).to(features.device)
        count = max(1, int(HELD_OUT * len(order)))
        held, kept = order[:count], order[count:]
        lifted, unseen = self.lift(features[kept]).double(), self.lift(features[held]).double()
        given, expected = targets[kept].double(), targets[held].double()
        if len(kept) < lifted.shape[1]:  # (HᵀH + rI)⁻¹ Hᵀ = Hᵀ (HHᵀ + rI)⁻¹, and this matrix is smaller
            gram, products, rows = lifted @ lifted.T, given, unseen @ lifted.T
        else:
            gram, products, rows = lifted.T @ lifted, lifted.T @ given, unseen
        errors = [float(F.mse_loss(rows @ solve_ridge(gram, products, ridge), expected)) for ridge in RIDGES]
        return errors.index(min(errors))

    def logits(self, view: View) -> Tensor:
        return self.with_missing(self.lift(self.features(view)[0]) @ self.weight.T)


def solve_ridge(gram: Tensor, products: Tensor, ridge: float) -> Tensor:
    """(G + ridge · I)⁻¹ Q."""
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), products)

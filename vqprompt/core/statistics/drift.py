"""How features moved while a task was learned, and where remembered features would be now.

Old classes have no images any more, but the task's own images have features from before and from after training. Their
change shows how the whole feature space moved, and the memory of old classes moves with it.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

TINY = 1e-12  # instead of zero, if all features were equal before


class Moving(BaseModel, extra="forbid"):
    """How the statistics of old classes follow the features."""

    how: Literal["none", "mean", "kernel", "linear"] = Field(
        "none", description="not at all, by the mean change, by the change of similar features, or by a linear map"
    )
    ridge: float = Field(1.0, gt=0, description="linear only: weight of the ridge, in units of the mean feature energy")
    bandwidth: float = Field(0.5, gt=0, description="kernel only: width, in units of the mean distance to the center")


class Drift:
    """Moves points: x → x + (x − center) B + shift. `matrix` is I + B, applied to differences; None: no change."""

    def __init__(self, center: Tensor, shift: Tensor, slope: Tensor | None = None) -> None:
        self.center, self.shift, self.slope = center, shift, slope

    @property
    def matrix(self) -> Tensor | None:
        return None if self.slope is None else self.slope + torch.eye(len(self.slope)).to(self.slope)

    def points(self, points: Tensor) -> Tensor:
        """Points [..., D] after the drift."""
        moved = points.to(self.shift)
        moved = moved + self.shift + (0.0 if self.slope is None else (moved - self.center) @ self.slope)
        return moved.to(points)


class KernelDrift(Drift):
    """Moves a point as its neighbours moved: the mean of their changes, weighted by a Gaussian of the distance."""

    def __init__(self, before: Tensor, change: Tensor, bandwidth: float) -> None:
        super().__init__(before.mean(0), change.mean(0))
        self.before, self.change = before, change
        self.width = bandwidth * (before - self.center).norm(dim=1).mean().clamp(min=TINY)

    def points(self, points: Tensor) -> Tensor:
        flat = points.to(self.before).flatten(0, -2)
        nearness = torch.softmax(-0.5 * (torch.cdist(flat, self.before) / self.width).square(), dim=1)
        return (flat + nearness @ self.change).view_as(points).to(points)


def fit_drift(before: Tensor, after: Tensor, moving: Moving) -> Drift:
    """The drift that features [n, D] of the same images, in the same order, show. Computed in double.

    linear: B minimizes |X B − (D − mean D)|² + ridge · mean(diag XᵀX) |B|², with X the centered features from before
    and D the changes.
    """
    old, change = before.double(), after.double() - before.double()
    center, shift = old.mean(0), change.mean(0)
    if moving.how == "kernel":
        return KernelDrift(old, change, moving.bandwidth)
    if moving.how == "mean":
        return Drift(center, shift)
    x = old - center
    gram = x.T @ x
    ridge = moving.ridge * gram.diagonal().mean().clamp(min=TINY) * torch.eye(len(gram)).to(gram)
    return Drift(center, shift, torch.linalg.solve(gram + ridge, x.T @ (change - shift)))

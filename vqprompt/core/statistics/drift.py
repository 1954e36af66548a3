"""How features moved while a task was learned, and where remembered features would be now.

Old classes have no images any more, but the task's own images have features from before and from after training. Their
change shows how the whole feature space moved, and the memory of old classes moves with it.

How far off such a move is can be measured: a class of the task that is left out of the fit is an old class, except that
its true move is known (`fit_by_left_out_classes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

TINY = 1e-12  # instead of zero, if all features were equal before
RIDGES = [10.0 ** (e / 2) for e in range(-2, 9)]  # to choose from; in units of an image's mean energy


class Moving(BaseModel, extra="forbid"):
    """How the statistics of old classes follow the features."""

    how: Literal["none", "mean", "kernel", "linear", "validated"] = Field(
        "none",
        description="not at all, by the mean change, by the change of similar features, by a linear map, or by one "
        "whose ridge and error are measured on classes left out of the fit",
    )
    ridge: float = Field(1.0, gt=0, description="linear only: weight of the ridge, in units of the mean feature energy")
    bandwidth: float = Field(0.5, gt=0, description="kernel only: width, in units of the mean distance to the center")


@dataclass(eq=False)
class Drift:
    """Moves points: x → x + (x − center) B + shift. `matrix` is I + B, applied to differences; None: no change.

    error, scatter: covariances [D, D] of what the moved mean of a class and a moved image are off by; None: not
    measured.
    """

    center: Tensor
    shift: Tensor
    slope: Tensor | None = None
    error: Tensor | None = None
    scatter: Tensor | None = None

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


def fit_drift(before: Tensor, after: Tensor, moving: Moving, labels: Tensor | None = None) -> Drift:
    """The drift that features [n, D] of the same images, in the same order, show. Computed in double.

    linear: B minimizes |X B − (D − mean D)|² + ridge · mean(diag XᵀX) |B|², with X the centered features from before
    and D the changes. labels: the images' classes [n], for validated.
    """
    old, change = before.double(), after.double() - before.double()
    center, shift = old.mean(0), change.mean(0)
    if moving.how in ("none", "mean"):
        return Drift(center, shift if moving.how == "mean" else torch.zeros_like(shift))
    if moving.how == "kernel":
        return KernelDrift(old, change, moving.bandwidth)
    if moving.how == "validated":
        if labels is None:
            raise ValueError("a validated drift needs the labels of the images")
        return fit_by_left_out_classes(old, change, labels)
    x = old - center
    gram = x.T @ x
    ridge = moving.ridge * gram.diagonal().mean().clamp(min=TINY) * torch.eye(len(gram)).to(gram)
    return Drift(center, shift, torch.linalg.solve(gram + ridge, x.T @ (change - shift)))


def fit_by_left_out_classes(old: Tensor, change: Tensor, labels: Tensor) -> Drift:
    """Ridge regression of the changes [n, D] on the features from before [n, D]. The ridge is the one that predicts the
    mean change of a class best when the class is left out of the fit, and `error` and `scatter` say how well that is.

    The prediction for a left-out class is exact and needs no second fit: with H the matrix that maps changes to fitted
    ones, the residuals of the rows g of a class become (I − H_gg)⁻¹ times those of the whole fit. Errors of means are
    few, one per class. So the error gets its size from them, and its shape from the residuals of all images.
    """
    center, shift = old.mean(0), change.mean(0)
    x, y = old - center, change - shift
    rows, held = _rows_by_class(labels)
    if len(rows) < 2:  # nothing shows how other classes moved, so they may be off by all of it
        return Drift(center, shift, None, torch.outer(shift, shift), torch.outer(shift, shift) + y.T @ y / len(y))
    u, s, v = _decompose(x)
    energy, spectrum = x.square().sum(1).mean().clamp(min=TINY), s.square()
    own, targets = torch.cat([u, u.new_zeros(1, len(s))])[rows], u.T @ y
    eye = torch.eye(rows.shape[1]).to(u)
    best, slope, error, scatter = torch.inf, None, None, None
    for ridge in (*RIDGES, torch.inf):
        kept = spectrum / (spectrum + ridge * energy) if ridge < torch.inf else torch.zeros_like(spectrum)
        residuals = torch.cat([y - u @ (kept[:, None] * targets), y.new_zeros(1, y.shape[1])])[rows]
        hat = (own * kept) @ own.mT + held[:, :, None] * held[:, None] / len(x)
        left_out = torch.linalg.solve(eye - hat, residuals)
        off = (left_out.sum(1) / held.sum(1, keepdim=True)).square().sum(1).mean()
        if off < best:
            best, slope = float(off), v @ ((kept / s)[:, None] * targets)
            images = left_out.flatten(0, 1)
            squares = images.T @ images
            error, scatter = squares * (off / images.square().sum().clamp(min=TINY)), squares / len(x)
    return Drift(center, shift, slope, error, scatter)


def _rows_by_class(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of each class [C, most images of a class], filled up with n, and where they are rows (1 or 0)."""
    groups = [torch.nonzero(labels == c)[:, 0] for c in labels.unique()]
    rows = torch.nn.utils.rnn.pad_sequence(groups, batch_first=True, padding_value=len(labels))
    return rows, (rows < len(labels)).double()


def _decompose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, s, V with x = U diag(s) Vᵀ, without singular values of zero, from the smaller Gram matrix of x [n, D]."""
    if len(x) > x.shape[1]:
        v, s, u = _decompose(x.T)
        return u, s, v
    values, u = torch.linalg.eigh(x @ x.T)
    nonzero = values > 1e-12 * values[-1].clamp(min=TINY)
    u, s = u[:, nonzero], values[nonzero].sqrt()
    return u, s, x.T @ (u / s)

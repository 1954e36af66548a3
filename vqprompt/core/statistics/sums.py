"""Class statistics as sums, for features that come in batches and are not kept: n, Σx and Σxxᵀ of each class.

Sums are in float64. Processes that saw different images can add theirs up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vqprompt.core.runtime.distributed import Ranks


class ClassSums:
    """Sums over the features of `classes` new classes, whose labels begin at `first`.

    counts: n [C]. totals: Σx [C, D]. Subclasses add `squares`: Σxxᵀ, as much of it as a kind of covariance needs.
    """

    def __init__(self, first: int, classes: int, width: int, device: torch.device) -> None:
        self.first = first
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.totals = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.squares = torch.zeros(self._shape(classes, width), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch of features [B, D] with their labels [B]."""
        present, member = (labels - self.first).unique(return_inverse=True)
        # products of matrices add up in the same order every time
        belongs, features = F.one_hot(member, len(present)).double().T, features.double()
        self.counts[present] += belongs.sum(1)
        self.totals[present] += belongs @ features
        self._add_squares(features, present, member, belongs)

    def reduce(self, ranks: Ranks) -> None:
        """Add up what all processes have."""
        self.counts, self.totals, self.squares = map(ranks.add_up, (self.counts, self.totals, self.squares))

    @property
    def means(self) -> Tensor:
        """[C, D], in float64."""
        if not self.counts.all():
            raise ValueError(f"class {self.first + int(self.counts.argmin())} has no features to take statistics of")
        return self.totals / self.counts[:, None]

    def _shape(self, classes: int, width: int) -> tuple[int, ...]:
        """Shape of `squares`. Here: there are none."""
        return (0,)

    def _add_squares(self, features: Tensor, present: Tensor, member: Tensor, belongs: Tensor) -> None:
        """present: classes in this batch, each once. member: the position of each feature's class in `present` [B].
        belongs: the same as a matrix [classes, B]."""


class DiagonalSums(ClassSums):
    """squares: Σx² of each class [C, D]."""

    def _shape(self, classes: int, width: int) -> tuple[int, ...]:
        return (classes, width)

    def _add_squares(self, features: Tensor, present: Tensor, member: Tensor, belongs: Tensor) -> None:
        self.squares[present] += belongs @ features.square()


class FullSums(ClassSums):
    """squares: Σxxᵀ of each class [C, D, D]."""

    def _shape(self, classes: int, width: int) -> tuple[int, ...]:
        return (classes, width, width)

    def _add_squares(self, features: Tensor, present: Tensor, member: Tensor, belongs: Tensor) -> None:
        for place, label in enumerate(present.tolist()):
            own = features[member == place]
            self.squares[label] += own.T @ own


class SharedSums(ClassSums):
    """squares: Σxxᵀ over all classes [D, D]."""

    def _shape(self, classes: int, width: int) -> tuple[int, ...]:
        return (width, width)

    def _add_squares(self, features: Tensor, present: Tensor, member: Tensor, belongs: Tensor) -> None:
        self.squares += features.T @ features

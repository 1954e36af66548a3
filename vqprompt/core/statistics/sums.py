"""Class statistics as sums, for features that come in batches and are not kept: n, Σx and Σxxᵀ of each class.

Sums are in float64. Processes that saw different images can add theirs up.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vqprompt.core.runtime.distributed import Ranks

Covariance = Literal["diagonal", "full", "shared"]


class ClassSums:
    """Sums over the features of some classes. labels: theirs, in order [C].

    counts: n [C]. totals: Σx [C, D]. squares: as much of Σxxᵀ as the kind of covariance needs: its diagonal per class
    [C, D], all of it per class [C, D, D], all of it over all classes [D, D]; None: nothing of it [0].
    """

    def __init__(self, kind: Covariance | None, labels: Tensor, width: int) -> None:
        self.kind, self.labels, classes, device = kind, labels, len(labels), labels.device
        shapes = {None: (0,), "diagonal": (classes, width), "full": (classes, width, width), "shared": (width, width)}
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.totals = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.squares = torch.zeros(shapes[kind], dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch of features [B, D] with their labels [B]."""
        present, member = torch.searchsorted(self.labels, labels).unique(return_inverse=True)
        # products of matrices add up in the same order every time
        belongs, features = F.one_hot(member, len(present)).double().T, features.double()
        self.counts[present] += belongs.sum(1)
        self.totals[present] += belongs @ features
        if self.kind == "diagonal":
            self.squares[present] += belongs @ features.square()
        elif self.kind == "shared":
            self.squares += features.T @ features
        elif self.kind == "full":
            for place, label in enumerate(present.tolist()):
                own = features[member == place]
                self.squares[label] += own.T @ own

    def reduce(self, ranks: Ranks) -> None:
        """Add up what all processes have."""
        self.counts, self.totals, self.squares = map(ranks.add_up, (self.counts, self.totals, self.squares))

    @property
    def means(self) -> Tensor:
        """[C, D], in float64."""
        if not self.counts.all():
            raise ValueError(f"class {int(self.labels[self.counts.argmin()])} has no features to take statistics of")
        return self.totals / self.counts[:, None]

"""A learner's answers about test images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers about the test images of several tasks, one after the other.

    truth, guesses: [n], positions of classes among all that were learned. probability: [n], of the guess. sizes: the
    number of images per task.
    """

    truth: Tensor
    guesses: Tensor
    probability: Tensor
    sizes: list[int]

    @property
    def right(self) -> Tensor:
        return self.guesses == self.truth

    def accuracies(self) -> list[float]:
        """Percent right on each task."""
        return [100 * int(part.sum()) / len(part) for part in self.right.split(self.sizes)]

    def worst(self, most: int) -> Tensor:
        """Positions of wrong answers, the most confident first."""
        wrong = torch.nonzero(~self.right).flatten()
        return wrong[self.probability[wrong].argsort(descending=True, stable=True)][:most]

"""A memory that moves along: what our two own methods share.

Training goes on in every task, so features go on moving, and what is remembered of old classes would become stale.
Three things prevent that. While a task is learned, its features are held to where they were before (distillation).
Afterwards the task's own images show how features moved, and the remembered means and the shared covariance move with
them (statistics/drift.py). And the classifier is solved for, not trained: a linear discriminant from the moved memory.

Each task has its own classifier, which trains the features and is then thrown away. What is remembered and
tested are richer features: the class tokens of the last two blocks, each scaled to one length, averaged over an image
and its mirror image.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.statistics import Moving
from vqprompt.research.methods.base import STATISTICS, Classifier, Losses, Method, StatisticsOptions, TaskInfo, View
from vqprompt.research.methods.sldc import symmetric_cross_entropy
from vqprompt.research.training.rebalancing import Rebalancing

TOKEN_LENGTH = 20.0  # about the length of a class token after the final norm, so that variances keep their size


class MovingOptions(StatisticsOptions):
    class_tokens: int = Field(2, ge=1, description="number of last blocks whose class tokens make up the features")
    mirror: bool = Field(True, description="average the features of an image and of its mirror image")
    symmetric: bool = Field(True, description="half cross-entropy, half reverse cross-entropy")
    statistics: bool = Field(True, description=STATISTICS)
    rebalancing: Rebalancing = Rebalancing(how="closed-form", covariance="shared", shrinkage=0.1)
    moving: Moving = Moving(how="linear")
    feature_distillation: float = Field(
        1.0, ge=0, description="weight of the loss that keeps features where they were before the task"
    )


class MovingMemory(Method):
    """A method whose features move and whose memory moves along. Subclasses define the features in `encode`."""

    year = 2026

    def __init__(self, vit: ViT, options: Any, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.task_head: nn.Linear | None = None  # for the new classes; exists while a task is learned

    @property
    def feature_width(self) -> int:
        return self.options.class_tokens * self.vit.config.width

    def encode(self, view: View, class_tokens: int = 1) -> tuple[Tensor, Losses]:
        """Class tokens of the last blocks [B, class_tokens · D], and the method's own losses."""
        raise NotImplementedError

    def classifiers(self) -> list[nn.Linear]:
        return [self.head, *([] if self.task_head is None else [self.task_head])]

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        self.task_head = Classifier(self.vit.config.width, task.new_classes)

    def end_task(self) -> None:
        super().end_task()
        self.task_head = None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The common classifier is solved for, so it does not train. The task's own classifier does."""
        own = [] if self.task_head is None else [{"params": list(self.task_head.parameters()), "scale": 1.0}]
        return [*own, *super().parameter_groups()[1:]]

    def losses(self, view: View) -> Losses:
        assert self.task_head is not None and view.labels is not None
        features, own = self.encode(view)
        logits, labels = self.task_head(features), view.labels - self.task.old_classes
        loss = symmetric_cross_entropy if self.options.symmetric else F.cross_entropy
        losses = {"task": loss(logits, labels), **own}
        if self.former is not None:
            with torch.no_grad():
                before = self.former.encode(view.through(self.former.vit))[0]  # type: ignore[operator]
            losses |= self.keep_features(features, before)
        return losses

    def features(self, view: View) -> tuple[Tensor, Losses]:
        features = self._scaled_tokens(view)
        return ((features + self._scaled_tokens(view.mirrored())) / 2 if self.options.mirror else features), {}

    def _scaled_tokens(self, view: View) -> Tensor:
        tokens = self.encode(view, self.options.class_tokens)[0].unflatten(1, (self.options.class_tokens, -1))
        return (TOKEN_LENGTH * F.normalize(tokens, dim=-1)).flatten(1)

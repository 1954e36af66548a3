"""A memory that moves along: what our two own methods share.

Training goes on in every task, so features go on moving, and what is remembered of old classes would become stale. This
prevents it, for any number of tasks:

- The less of all classes a task brings, the slower it learns (`plasticity`).
- While a task is learned, its features are held to where they were before (distillation).
- Afterwards the task's own images show how features moved, and the remembered means and the shared covariance move with
  them. What the move is off by is measured and widens the covariance (statistics/drift.py).
- The features of the frozen network, which never move, are beside the moved ones (`frozen_beside`). The classifier is
  solved for (linear discriminant), so it relies on them the more, the less certain the moved ones are.
- Training that would cost old classes more than it gains is undone, in part or as a whole (`guarded`).

Each task has its own classifier, which trains the features and is then thrown away.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.statistics import Drift, Moving
from vqprompt.research.methods.base import (
    STATISTICS,
    Classifier,
    Losses,
    Method,
    StatisticsOptions,
    TaskData,
    TaskInfo,
    View,
    scaled,
    symmetric_cross_entropy,
)
from vqprompt.research.training.rebalancing import Rebalancing, rebalance

SHARES = (1.0, 0.5, 0.25)  # how much of a task's training may be kept, tried in this order


class MovingOptions(StatisticsOptions):
    class_tokens: int = Field(2, ge=1, description="number of last blocks whose class tokens make up the features")
    scaled: bool = Field(True, description="scale each class token to one length")
    mirror: bool = Field(True, description="average the features of an image and of its mirror image; not in training")
    symmetric: bool = Field(True, description="half cross-entropy, half reverse cross-entropy")
    plasticity: float = Field(
        1.0, ge=0, description="rates are multiplied by the share of new classes among all, to this power"
    )
    frozen_beside: bool = Field(True, description="join the features of the frozen network to the moved ones")
    guarded: bool = Field(
        True, description="undo training, in part or as a whole, that would cost old classes more than it gains"
    )
    statistics: bool = Field(True, description=STATISTICS)
    rebalancing: Rebalancing = Rebalancing(how="closed-form", covariance="shared", shrinkage=0.1)
    moving: Moving = Moving(how="validated")
    feature_distillation: float = Field(
        1.0, ge=0, description="weight of the loss that keeps features where they were before the task"
    )


class MovingMemory(Method):
    """A method whose features move and whose memory moves along. Subclasses define the features in `encode`, and those
    of the frozen network in `encode_frozen`."""

    year = 2026
    before: ClassVar = {"plasticity": 0.0, "frozen_beside": False, "guarded": False}
    kept: Tensor  # [tasks], which share of its training each task kept

    def __init__(self, vit: ViT, options: Any, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.task_head: nn.Linear | None = None  # for the new classes; exists while a task is learned
        self.trained = not options.guarded  # whether features are other than the frozen network's
        if options.guarded:
            self.register_buffer("kept", torch.zeros(0))

    @property
    def feature_width(self) -> int:
        return super().feature_width * (2 if self.options.frozen_beside else 1)

    def encode_frozen(self, view: View, class_tokens: int) -> Tensor:
        """Class tokens of the frozen network [B, class_tokens · D]."""
        return self.vit.encode(view.tokens, class_tokens=class_tokens).float()

    def read(self, view: View) -> tuple[Tensor, Losses]:
        features, own = super().read(view)
        if self.options.frozen_beside:
            frozen = self.encode_frozen(view, self.class_tokens)
            frozen = scaled(frozen, self.class_tokens) if self.options.scaled else frozen
            features = torch.cat([features, frozen], dim=1)
        return features, own

    def classifiers(self) -> list[nn.Linear]:
        return [self.head, *([] if self.task_head is None else [self.task_head])]

    # ------------------------------------------------------------------ train

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        if task.number and self.options.guarded and self.former is None:
            self.former = self.frozen_copy()
        self.task_head = Classifier(self.vit.config.width, task.new_classes)
        self.trained = self.trained or task.new_classes > 1

    def end_task(self) -> None:
        super().end_task()
        self.task_head = None

    def loaded(self) -> None:
        if self.options.guarded:
            before = bool(self.kept.any())
            self.trained = before or (self.task_head is not None and self.task_head.out_features > 1)
            if isinstance(self.former, MovingMemory):
                self.former.trained = before

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The common classifier is solved for, so it does not train. The task's own classifier does. A single class has
        nothing to be told apart from: then nothing trains."""
        if self.task_head is not None and self.task_head.out_features < 2:
            return []
        own = [] if self.task_head is None else [{"params": list(self.task_head.parameters()), "scale": 1.0}]
        new = (self.task.new_classes / max(self.task.all_classes, 1)) ** self.options.plasticity
        return [*own, *({**group, "scale": group["scale"] * new} for group in super().parameter_groups()[1:])]

    def losses(self, view: View) -> Losses:
        assert self.task_head is not None and view.labels is not None
        features, own = self.encode(view)
        logits, labels = self.task_head(features), view.labels - self.task.old_classes
        loss = symmetric_cross_entropy if self.options.symmetric else F.cross_entropy
        losses = {"task": loss(logits, labels), **own}
        if self.former is not None and self.options.feature_distillation:
            with torch.no_grad():
                before = self.former.encode(view.through(self.former.vit))[0]
            losses |= self.keep_features(features, before)
        return losses

    # ------------------------------------------------------------------ keep what pays

    @torch.no_grad()
    def finish_task(self, data: TaskData) -> None:
        assert self.task_head is not None
        share = 1.0 if self.task_head.out_features > 1 else 0.0
        if self.options.guarded and self._solved and share and data.features_before is not None:
            share = self.keep_what_pays(data)
        else:
            super().finish_task(data)
        if self.options.guarded:
            self.kept = torch.cat([self.kept, torch.full((1,), share).to(self.kept)])

    def keep_what_pays(self, data: TaskData) -> float:
        """Keep the largest share of the task's training that promises at least the accuracy, over all classes, that
        there would be without it; and remember the new classes. Returns the share."""
        assert data.features_before is not None and isinstance(self.former, MovingMemory)
        stay = Outcome(self, data, data.features_before, None)
        learned = {name: p.detach().clone() for name, p in self.named_parameters() if self._learns(name, p)}
        for share in (*SHARES, 0.0):
            if share < 1:
                self._go_back(learned, share, data)
            outcome = Outcome(self, data, data.statistics_features.whole, self.drift(data)) if share else stay
            if outcome.accuracy >= stay.accuracy:
                break
        self.statistics = outcome.statistics
        self.head.load_state_dict(outcome.classifier.state_dict())
        self.trained = share > 0 or self.former.trained
        return share

    def _learns(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and name.partition(".")[0] not in ("head", "task_head", "former", "frozen")

    def _go_back(self, learned: dict[str, Tensor], share: float, data: TaskData) -> None:
        """Give the parameters this share of what they learned in the task."""
        assert self.former is not None
        for name, after in learned.items():
            self.get_parameter(name).copy_(torch.lerp(self.former.get_parameter(name), after, share))
        data.network_changed()

    def notes(self) -> list[str]:
        if not self.options.guarded:
            return []
        undone = [f"{n + 1} ({share:.0%})" for n, share in enumerate(self.kept.tolist()) if share < 1]
        return [f"tasks of which only a part of the training was kept: {', '.join(undone)}"] if undone else []


class Outcome:
    """The memory after a task, if it moves by this drift and the new classes have these features [n, D], and what it
    promises.

    accuracy: the chance that a draw from a class is told from every other class, mean over the classes. Two Gaussians
    with one covariance, the doubt about their means included, are told apart with chance Φ(distance / 2).
    """

    def __init__(self, method: MovingMemory, data: TaskData, features: Tensor, drift: Drift | None) -> None:
        assert method.statistics is not None
        self.statistics = copy.deepcopy(method.statistics)
        if drift is not None:
            self.statistics.move(drift)
        self.statistics.add(features, data.labels)
        means = self.statistics.class_means()
        self.classifier = nn.utils.skip_init(nn.Linear, means.shape[1], len(means), device=means.device)
        settings = method.options.rebalancing
        rebalance(self.classifier, self.statistics, data.task.old_classes, data.batch_size, settings, data.seed)
        products = means.double() @ self.classifier.weight.double().T
        own = products.diagonal()
        distance = (own[:, None] + own - products - products.T).clamp(min=0).sqrt()
        told = torch.special.log_ndtr(distance / 2).fill_diagonal_(0.0)
        self.accuracy = float(told.sum(1).exp().mean())

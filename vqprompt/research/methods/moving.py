"""A memory that moves along: what our two own methods share.

Training goes on in every task, so features go on moving, and what is remembered of old classes would become stale. This
prevents it, for any number of tasks:

- The less of all classes a task brings, the slower it learns (`plasticity`). Of a class that comes back, the share of
  its images that is new counts.
- While a task is learned, its features can be held to where they were before (distillation).
- Afterwards the task's own images show how features moved, and the remembered means and the shared covariance move with
  them. What the move is off by is measured and widens the covariance (statistics/drift.py).
- Training is kept only as far as the memory of old classes bears it (`most_doubt`).
- The features of the frozen network, which never move, can be beside the moved ones (`frozen_beside`). Images that are
  not yet trained on tell which features recognize them best. Those are used, so training that does not pay is not.

Each task has its own classifier, which trains the features and is then thrown away.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.images import Images
from vqprompt.core.statistics.drift import Drift
from vqprompt.core.statistics.gaussians import SharedGaussians
from vqprompt.research.methods.base import Classifier, Losses, Method, StatisticsOptions, TaskData, TaskInfo, View
from vqprompt.research.training.rebalancing import precision_of, solve, symmetric_cross_entropy

ALONE = 0.1  # shrinkage of the moved or the frozen features, if they are used alone
LEAST = 0.1  # a smaller share of a task's training is not worth keeping


class MovingOptions(StatisticsOptions):
    plasticity: float = Field(
        1.0,
        ge=0,
        description="rates are multiplied by the share of all classes that is new to this task, to this power",
    )
    fewest_classes: int = Field(
        1,
        ge=1,
        description="plasticity counts at least this many classes in all, so that small first tasks are slow, too",
    )
    frozen_beside: bool = Field(False, description="join the features of the frozen network to the moved ones")
    fall_back: bool = Field(
        True,
        description="with frozen_beside: of all, the moved and the frozen features, use those that recognize new "
        "images best",
    )
    most_doubt: float = Field(
        1.0,
        ge=0,
        description="how much doubt moves may bring to old means, relative to that of having few images of a class; "
        "training that would bring more is undone, in part or as a whole; 0: no limit",
    )


class MovingMemory(Method):
    """A method whose features move and whose memory moves along. Subclasses define the features in `encode`, and those
    of the frozen network in `encode_frozen`."""

    classes_return = True
    kept: Tensor  # [tasks], which share of its training each task kept
    recognized: Tensor  # [3], images that each readout recognized before they were trained on

    def __init__(self, vit: ViT, options: Any, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.task_head: nn.Linear | None = None  # for the task's classes; exists while it is learned
        self.returned = 0.0  # sum over classes that came back: the share of their images that this task brings
        self.trained = not options.most_doubt  # whether features are other than the frozen network's
        if options.most_doubt:
            self.register_buffer("kept", torch.zeros(0))
        self.watching = options.frozen_beside and options.fall_back
        if self.watching:
            self.register_buffer("recognized", torch.zeros(3))

    @property
    def feature_width(self) -> int:
        return super().feature_width * (2 if self.options.frozen_beside else 1)

    def encode_frozen(self, view: View, class_tokens: tuple[int, ...]) -> Tensor:
        """Class tokens of the frozen network after these blocks, in this order [B, blocks · D]."""
        return self.vit.encode(view.tokens, class_tokens=class_tokens).float()

    def features(self, view: View) -> tuple[Tensor, Losses]:
        features, own = super().features(view)
        if self.options.frozen_beside:
            frozen = self.frozen_features(view) if view.known_frozen is None else view.known_frozen
            features = torch.cat([features, frozen], dim=1)
        return features, own

    def frozen_features(self, view: View) -> Tensor:
        views = [view, view.mirrored()] if self.mirror and view.labels is None else [view]
        parts = [self.scaled(self.encode_frozen(own, self.token_blocks)) for own in views]
        return parts[0] if len(parts) == 1 else (parts[0] + parts[1]) / 2

    def classifiers(self) -> list[nn.Linear]:
        return [self.head, *([] if self.task_head is None else [self.task_head])]

    # ------------------------------------------------------------------ train

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        if task.number and self.options.most_doubt and self.former is None:
            self.former = self.frozen_copy()
        self.task_head = Classifier(self.vit.config.width, len(task.returning) + task.new_classes)
        self.trained = self.trained or self.task_head.out_features > 1

    def training_images(self, data: TaskData) -> tuple[Images, Tensor]:
        if data.task.returning and self.statistics is not None:  # here, because a resumed task needs it as well
            places = list(data.task.returning)
            counts = torch.bincount(data.labels)[places]
            self.returned = float((counts / (counts + self.statistics.seen[places] + 1)).sum())
        return super().training_images(data)

    def prepare_training(self, data: TaskData) -> None:
        if data.features_before is not None and self.watching and isinstance(self.statistics, SharedGaussians):
            self.recognized += self.recognizes(self.statistics, data.features_before.double(), data.labels)

    def end_task(self) -> None:
        super().end_task()
        self.task_head, self.returned = None, 0.0

    def loaded(self) -> None:
        if self.options.most_doubt:
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
        learned_now = self.task.new_classes + self.returned
        share = learned_now / max(self.task.all_classes, self.options.fewest_classes)
        slow = share**self.options.plasticity
        return [*own, *({**group, "scale": group["scale"] * slow} for group in super().parameter_groups()[1:])]

    def losses(self, view: View) -> Losses:
        assert self.task_head is not None and view.labels is not None
        features, own = self.encode(view)
        places = (~self.absent).cumsum(0) - 1  # of the task's classes in its own classifier
        logits, labels = self.task_head(features), places[view.labels]
        loss = symmetric_cross_entropy if self.options.symmetric else F.cross_entropy
        losses = {"task": loss(logits, labels), **own}
        if self.former is not None and self.options.feature_distillation:
            with torch.no_grad():
                before = self.former.encode(view.through(self.former.vit))[0]
            losses |= self.keep_features(features, before)
        return losses

    # ------------------------------------------------------------------ keep what the memory bears

    @torch.no_grad()
    def finish_task(self, data: TaskData) -> None:
        assert self.task_head is not None
        share = 1.0 if self.task_head.out_features > 1 else 0.0
        drift = self.drift(data) if share and data.features_before is not None else None
        if drift is not None and self.options.most_doubt:
            share = self.bearable(drift)
            if share < 1:
                assert isinstance(self.former, MovingMemory)
                self.go_back(share, self.former)
                data.network_changed()
                drift = self.drift(data) if share else None
        if self.statistics is not None:
            if drift is not None:
                self.statistics.move(drift)
            self.remember(self.statistics, self.head, self.options.rebalancing, data.statistics_features, data)
            if self.watching and isinstance(self.statistics, SharedGaussians) and (best := self.recognized.argmax()):
                part, shrinkage = self.readouts[best]
                solve(self.head, self.statistics, shrinkage, part)
        if self.options.most_doubt:
            self.kept = torch.cat([self.kept, torch.full((1,), share).to(self.kept)])

    @property
    def readouts(self) -> list[tuple[slice, float]]:
        """What a classifier can be solved from, and the shrinkage: all features, the moved and the frozen ones."""
        half = self.feature_width // 2
        return [(slice(None), self.options.rebalancing.shrinkage), (slice(half), ALONE), (slice(half, None), ALONE)]

    @torch.no_grad()
    def recognizes(self, statistics: SharedGaussians, features: Tensor, labels: Tensor) -> Tensor:
        """How many images of a task [n, D], which nothing was trained on, each readout recognizes among all classes. An
        image of a new class is left out of its mean, which is then taken to be in doubt as an old class's is."""
        old, covariance = statistics.class_means().double(), statistics.class_covariance().double()
        doubt = getattr(statistics, "doubt", torch.zeros_like(covariance)).double() / len(old)
        new, counts = labels >= len(old), torch.bincount(labels)[labels].double()
        left_out = torch.where(new, (counts / (counts - 1).clamp(min=1)).square(), 1.0)
        added = torch.arange(len(old), self.head.out_features, device=labels.device)
        belongs = (labels == added[:, None]).to(features)
        means = torch.cat([old, belongs @ features / belongs.sum(1, keepdim=True)])
        right = []
        for part, shrinkage in self.readouts:
            precision = precision_of(covariance[part, part], shrinkage)
            root = torch.linalg.cholesky(precision)
            distances = torch.cdist(features[:, part] @ root, means[:, part] @ root).square()
            own = distances.gather(1, labels[:, None]) * left_out[:, None]
            distances.scatter_(1, labels[:, None], own + (new * (precision * doubt[part, part]).sum())[:, None])
            right.append((distances.argmin(1) == labels).sum())
        return torch.stack(right)

    def bearable(self, drift: Drift) -> float:
        """The share of a task's training, 0 to 1, that the memory of old classes bears.

        A mean of n images is in doubt by Σ / n anyway. All moves together may bring `most_doubt` times as much, on
        average over the classes: with 1, a class is then remembered as if by half its images. Doubt is measured as the
        classifier weighs it, by Σ⁻¹. An error grows with the square of the training that is kept.
        """
        statistics = self.statistics
        if not isinstance(statistics, SharedGaussians) or drift.error is None:
            return 1.0
        covariance, classes = statistics.shared_covariance().double(), len(statistics.means)
        precision = precision_of(covariance, self.options.rebalancing.shrinkage)
        noise, doubt, added = (
            float((precision * part.double()).sum())
            for part in (covariance / statistics.images_per_class, statistics.doubt / classes, drift.error)
        )
        share = (max(self.options.most_doubt * noise - doubt, 0.0) / added) ** 0.5 if added > 0 else 1.0
        return min(share, 1.0) if share >= LEAST else 0.0

    @torch.no_grad()
    def go_back(self, share: float, former: MovingMemory) -> None:
        """Keep only this share of what the parameters learned in the task. former: this method before the task."""
        before = dict(former.named_parameters())
        learned = {id(p) for group in super().parameter_groups()[1:] for p in group["params"]}
        for name, parameter in self.named_parameters():
            if id(parameter) in learned:
                parameter.copy_(torch.lerp(before[name].to(parameter), parameter, share))
        self.trained = share > 0 or former.trained

    def notes(self) -> list[str]:
        if not self.options.most_doubt:
            return []
        undone = [f"{n + 1} ({share:.0%})" for n, share in enumerate(self.kept.tolist()) if share < 1]
        notes = [f"tasks of which only a part of the training was kept: {', '.join(undone)}"] if undone else []
        if self.watching:
            counts = dict(zip(("all", "moved", "frozen"), self.recognized.int().tolist(), strict=True))
            notes.append(f"images that features recognized before they were trained on: {counts}")
        return notes

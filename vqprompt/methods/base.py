"""What every method shares. A method overrides only what is particular to it.

Life of a method: `start_task` (grow, freeze, initialize) → `prepare_training` (with a look at the images) → the
loop calls `losses` on views of the task's images and steps the parameters of `parameter_groups` → `finish_task`
(statistics, merging) → `end_task` (let go of what only training needs) → `logits` at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from vqprompt.backbones.vit import ViT
from vqprompt.data.images import Images
from vqprompt.methods.task import Finish, TaskInfo
from vqprompt.statistics.gaussians import ClassStatistics
from vqprompt.statistics.rebalance import Rebalancing, rebalance
from vqprompt.training.optim import Losses
from vqprompt.training.view import View


class Options(BaseModel, extra="forbid"):
    """A method's own settings. Every field has a default and a description: `vqprompt methods NAME` shows them."""

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults_of_groups(cls, given: Any) -> Any:
        """Of a group such as `rebalancing` some settings may be given; the others stay as this method has them."""
        if not isinstance(given, dict):
            return given
        return given | {
            name: field.default.model_dump() | given[name]
            for name, field in cls.model_fields.items()
            if isinstance(field.default, BaseModel) and isinstance(given.get(name), dict)
        }


STATISTICS = "rebalance the classifier from class statistics after each task"


class StatisticsOptions(Options):
    """Of methods that may keep class statistics."""

    statistics: bool = Field(False, description=STATISTICS)
    rebalancing: Rebalancing = Rebalancing()


CLOSED_FORM = {"statistics": True, "rebalancing": {"how": "closed-form", "covariance": "shared"}}  # a preset


class Head(nn.Linear):
    """The linear classifier. It grows; what it has learned stays in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 0)

    def reset_parameters(self) -> None:
        pass  # it starts without rows

    @torch.no_grad()
    def grow(self, classes: int) -> None:
        new = nn.Linear(self.in_features, classes - self.out_features).to(self.weight)
        self.weight = nn.Parameter(torch.cat([self.weight, new.weight]))
        self.bias = nn.Parameter(torch.cat([self.bias, new.bias]))
        self.out_features = classes


class Method(nn.Module):
    title: ClassVar[str]
    year: ClassVar[int]
    summary: ClassVar[str]
    Options: ClassVar[type[Options]] = Options
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # named settings: run settings and options together
    training_defaults: ClassVar[dict[str, Any]] = {}  # run settings that differ from the common ones
    tunes_backbone: ClassVar[bool] = False
    uses_query: ClassVar[bool] = False  # known queries are computed once and passed in
    prompts_stay: ClassVar[bool] = False  # as tokens: every block sees a sequence of another length
    masks_old_logits: ClassVar[bool] = True
    joint: ClassVar[bool] = False  # learns all classes at once: an upper bound, not a continual learner

    def __init__(self, vit: ViT, options: BaseModel, tasks: int) -> None:
        """tasks: how many are planned; a method that divides a pool among tasks needs to know."""
        super().__init__()
        self.options: Any = options
        self.vit = vit
        self.planned_tasks = tasks
        self.head = Head(vit.config.width)
        self.statistics: ClassStatistics | None = None
        self.task = TaskInfo(-1, 0, 0)
        self.task_sizes: list[int] = []  # classes of each task so far
        if isinstance(options, StatisticsOptions) and options.statistics:
            self.keep_statistics(options.rebalancing)

    # ------------------------------------------------------------------ what a method may override

    def start_task(self, task: TaskInfo) -> None:
        self.task = task
        self.task_sizes.append(task.new_classes)
        self.head.grow(task.all_classes)

    def prepare_training(self, queries: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Once, before the first epoch: the task's images are at hand, as clean features without prompts [n, D] and
        labels [n]."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups for the optimizer; `scale` multiplies the learning rate. None: there is nothing to train."""
        own = [p for p in self.prompting_parameters() if p.requires_grad]
        if not own and not self.tunes_backbone and self._solved:
            return []  # a classifier that will be solved for need not be trained first
        groups: list[dict[str, Any]] = [{"params": list(self.head.parameters()), "scale": 1.0}]
        if own:
            groups.append({"params": own, "scale": getattr(self.options, "prompt_lr_scale", 1.0)})
        if self.tunes_backbone:
            scale, decay = (getattr(self.options, key, 1.0) for key in ("backbone_lr_scale", "layer_decay"))
            layers = self.vit.layers() if decay < 1 else [list(self.vit.parameters())]  # one group is faster than many
            groups += [{"params": layer, "scale": scale * decay**n} for n, layer in enumerate(layers)]
        return groups

    def features(self, view: View) -> tuple[Tensor, Losses]:
        """Class-token features [B, D] and the method's own loss terms (ignored outside training)."""
        return self.vit.encode(view.tokens).float(), {}

    def losses(self, view: View) -> Losses:
        features, own = self.features(view)
        return {"task": self.task_loss(self.head(features), view.labels), **own}

    def task_loss(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """Cross-entropy. Masked, it sees the new classes alone: −inf for the old ones, so no gradient reaches them."""
        if labels is None:
            raise RuntimeError("a loss needs labels, and only views in training have them")
        if self.masks_old_logits:
            return F.cross_entropy(logits[:, self.task.old_classes :], labels - self.task.old_classes)
        return F.cross_entropy(logits, labels)

    def logits(self, view: View) -> Tensor:
        return self.head(self.features(view)[0])

    def training_images(self, images: Images, labels: Tensor) -> tuple[Images, Tensor]:
        """The images and head positions to train on: the task's own; a method that rehearses adds its exemplars."""
        return images, labels

    def exemplar_count(self) -> int:
        """Old images that are kept, for methods that rehearse."""
        return 0

    def finish_task(self, finish: Finish) -> None:
        """After the last epoch; no images are at hand any more once it returns. A method that keeps statistics takes
        them now, and puts its classifier right with them."""
        if self.statistics is not None:
            self.remember_and_rebalance(finish, self.options.rebalancing)

    def end_task(self) -> None:
        """Let go of what only a task's training needs (a teacher, say), so that no checkpoint between tasks holds it.
        Follows `finish_task`, and `start_task` when a checkpoint is loaded and a learned task is passed over."""

    def choices(self, query: Tensor) -> Tensor | None:
        """Which prompt each image gets in each prompted block [B, M], for methods that choose; the report shows it."""
        return None

    @property
    def choosable(self) -> int:
        """How many prompts a block has to choose from, for methods that choose."""
        return 0

    def bytes_per_class(self) -> int:
        """What is kept of each class learned, besides its row in a classifier."""
        return sum(m.bytes_per_class for m in self.modules() if isinstance(m, ClassStatistics))

    # ------------------------------------------------------------------ shared services

    def classifiers(self) -> list[nn.Linear]:
        """What learns but does not prompt: the head, and any other classifier of the method's."""
        return [self.head]

    def own_modules(self) -> Iterable[tuple[str, nn.Module]]:
        others = [self.vit, self.statistics, *self.classifiers()]
        return ((name, m) for name, m in self.named_children() if not any(m is other for other in others))

    def prompting_parameters(self) -> list[nn.Parameter]:
        """The method's own parameters: not the backbone's, not a classifier's."""
        return [*self.parameters(recurse=False), *(p for _, module in self.own_modules() for p in module.parameters())]

    def parameter_counts(self) -> dict[str, int]:
        return {
            "prompting": sum(p.numel() for p in self.prompting_parameters()),
            "classifier": sum(p.numel() for classifier in self.classifiers() for p in classifier.parameters()),
            "backbone": sum(p.numel() for p in self.vit.parameters()),
            "trainable": sum(p.numel() for group in self.parameter_groups() for p in group["params"]),
        }

    @property
    def _solved(self) -> bool:
        return self.statistics is not None and self.options.rebalancing.how == "closed-form"

    def keep_statistics(self, settings: Rebalancing) -> None:
        self.statistics = ClassStatistics(self.vit.config.width, settings.covariance, settings.centroids)

    def remember_and_rebalance(self, finish: Finish, settings: Rebalancing) -> None:
        """Add the new classes' statistics; from the second task on, put the classifier right with all of them."""
        if self.statistics is None:
            raise RuntimeError("this method keeps no statistics")
        features, labels = finish.features()
        self.statistics.add(features, labels)
        if finish.task.old_classes or settings.how == "closed-form":
            rebalance(
                self.head, self.statistics, finish.task.old_classes, finish.batch_size, settings, finish.seed,
                self.task_sizes,
            )  # fmt: skip

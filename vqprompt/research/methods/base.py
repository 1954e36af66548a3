"""What every method shares. A method overrides only what is particular to it.

Life of a task: `check_task` (refuse what cannot be learned) → `start_task` (grow, freeze, initialize) →
`prepare_training` (the task's images are available) → the loop calls `losses` on views of the images and steps the
parameters of `parameter_groups` → `finish_task` (statistics, merging) → `end_task` (drop what only training needs) →
`logits` at any time. When a checkpoint is loaded, only `grow` is called for the tasks learned before.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from vqprompt.core.backbones.vit import Placement, Prompts, ViT
from vqprompt.core.data.images import Images
from vqprompt.core.errors import UserError
from vqprompt.core.statistics.drift import Drift, Moving, fit_drift
from vqprompt.core.statistics.gaussians import KINDS, ClassStatistics
from vqprompt.core.statistics.sums import ClassSums
from vqprompt.research.methods.options import Options, PromptOptions, ReadoutOptions, StatisticsOptions, with_defaults
from vqprompt.research.methods.prompts import check_blocks
from vqprompt.research.methods.recipes import FACTS
from vqprompt.research.methods.task import TaskData, TaskFeatures, TaskInfo
from vqprompt.research.training.optim import Losses
from vqprompt.research.training.rebalancing import Rebalancing, rebalance, symmetric_cross_entropy
from vqprompt.research.training.view import View

__all__ = [
    "Classifier", "Head", "Losses", "Method", "Options", "PromptOptions", "ReadoutOptions", "StatisticsOptions",
    "TaskData", "TaskInfo", "View",
]  # fmt: skip
TOKEN_LENGTH = 20.0  # about the length of a class token after the final norm, so that variances keep their size


class Classifier(nn.Linear):
    """A linear layer that computes in full precision, also where a backbone that learns computes in bf16."""

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.float())


class Head(Classifier):
    """The linear classifier. When it grows, existing rows keep their values."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 0)

    def reset_parameters(self) -> None:
        """Nothing: it starts without rows."""

    @torch.no_grad()
    def grow(self, classes: int) -> None:
        new = nn.Linear(self.in_features, classes - self.out_features).to(self.weight)
        self.weight = nn.Parameter(torch.cat([self.weight, new.weight]))
        self.bias = nn.Parameter(torch.cat([self.bias, new.bias]))
        self.out_features = classes


OWN: dict[str, type[Method]] = {}  # the methods of this package, by title


class Method(nn.Module):
    title: ClassVar[str]
    year: ClassVar[int]
    summary: ClassVar[str]
    Options: ClassVar[type[Options]] = Options
    option_defaults: ClassVar[dict[str, Any]] = {}  # options whose defaults differ from those that `Options` declares
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # named settings: run settings and options together
    training_defaults: ClassVar[dict[str, Any]] = {}  # run settings that differ from the common ones
    # Where a search looks: run settings or options with their (low, high). The scale is logarithmic if low > 0 and
    # high / low >= 10, and settings that are whole numbers stay whole.
    search_space: ClassVar[dict[str, tuple[float, float]]] = {"lr": (1e-4, 3e-1)}
    tunes_backbone: ClassVar[bool] = False
    backbone_parts: ClassVar[tuple[str, ...]] = ()  # names of parameters that it adds to a backbone that stays frozen
    uses_query: bool = False  # uses `View.query`; queries that are known already are passed in
    choosable: int = 0  # number of prompts per block that `choices` chooses from
    uses_frozen: bool = False  # uses `frozen_features` of clean images; those that are known already are passed in
    classifies_frozen: ClassVar[bool] = False  # classifies the backbone's features as they are, unless `adapt` is on
    prompts_stay: ClassVar[bool] = False  # prompts are tokens that stay: the sequence gets longer from block to block
    masks_old_logits: ClassVar[bool] = True
    joint: ClassVar[bool] = False  # learns all classes at once: an upper bound, not a continual learner
    classes_return: ClassVar[bool] = False  # learns streams in which a class comes back (core/data/stream.py)
    only_for_learning: ClassVar[tuple[str, ...]] = ("statistics", "former")  # attributes that are not needed to predict

    def __init_subclass__(cls) -> None:
        """Facts about methods of this package are in methods.toml, and their presets in recipes.toml."""
        super().__init_subclass__()
        title = str(cls.__dict__.get("title", ""))
        if cls.__module__.startswith(f"{__package__}.") and title in FACTS:
            OWN[title] = cls
            for key, value in FACTS[title].items():
                setattr(cls, key, value)
        if "option_defaults" in cls.__dict__:
            cls.Options = with_defaults(cls.Options, cls.option_defaults)

    def __init__(self, vit: ViT, options: BaseModel, tasks: int) -> None:
        """tasks: how many are planned; a method that divides a pool among tasks needs to know."""
        super().__init__()
        self.options: Any = options
        self.vit = vit
        self.class_tokens: int = getattr(options, "class_tokens", 1)
        self.token_blocks = tuple(range(-1, -1 - self.class_tokens, -1))  # this order is in run folders
        self.mirror: bool = getattr(options, "mirror", False)
        if self.class_tokens > vit.config.depth:
            raise UserError(
                f"class_tokens={self.class_tokens}: the backbone has {vit.config.depth} blocks with one class token "
                f"each; give 1 to {vit.config.depth}"
            )
        if (blocks := getattr(options, "blocks", None)) is not None:
            check_blocks(blocks, vit.config.depth)
        vit.raw_queries = False  # whatever the method wanted that had this network before
        self.adapters: Any = None  # beside the backbone's blocks, if a method has some
        if self.classifies_frozen:
            self.uses_query = not (self.mirror or getattr(options, "adapt", False)) and self.class_tokens == 1
        self.planned_tasks = tasks
        self.head = Head(self.feature_width)
        self.statistics = self.new_statistics(getattr(options, "rebalancing", None))
        self.frozen: ViT | None = None  # the backbone as it was, for methods that tune it and need it too
        self.former: Method | None = None  # this method before the task, while features are distilled from it
        self.task = TaskInfo(-1, 0, 0)
        self.task_sizes: list[int] = []  # classes that each task so far was the first to have
        self.absent = torch.zeros(0, dtype=torch.bool)  # [C], classes that the open task has no images of

    # ------------------------------------------------------------------ what a method may override

    @property
    def feature_width(self) -> int:
        """Number of dimensions of the features, for the classifier and the statistics."""
        return self.class_tokens * self.vit.config.width

    def check_task(self, task: TaskInfo) -> None:
        """Raise a UserError if this task cannot be learned. Nothing has changed yet."""

    def grow(self, task: TaskInfo) -> None:
        """Make room for a task, and decide which parts learn in it. Called when a task starts, and for every task of a
        checkpoint that is loaded, so it must not depend on what was learned before."""
        self.task = task
        if task.new_classes:  # not if all classes came back
            self.task_sizes.append(task.new_classes)
            self.head.grow(task.all_classes)
        self.absent = torch.arange(task.all_classes, device=self.head.weight.device) < task.old_classes
        self.absent[list(task.returning)] = False

    def start_task(self, task: TaskInfo) -> None:
        if task.number and getattr(self.options, "feature_distillation", 0):
            self.former = self.frozen_copy()
        self.grow(task)

    def prepare_training(self, data: TaskData) -> None:
        """Once, before the first epoch."""

    @property
    def needs_features_before(self) -> bool:
        """Whether `finish_task` compares the task's features with those from before `start_task`."""
        moves = getattr(self.options, "moving", Moving()).how != "none"
        return moves and self.statistics is not None and len(self.statistics.means) > 0

    @property
    def solves_classifier(self) -> bool:
        """Whether the classifier is solved for after training, so that it is useless to train it."""
        return self.statistics is not None and bool(self.options.rebalancing.how == "closed-form")

    def trains_in(self, task: int) -> bool:
        """Whether anything is trained in the task with this number."""
        learning = (p.requires_grad for p in self.prompting_parameters())
        return self.tunes_backbone or not self.solves_classifier or any(learning)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups for the optimizer; `scale` multiplies the learning rate. An empty list: there is nothing to train."""
        if not self.trains_in(self.task.number):
            return []
        own = [p for p in self.prompting_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": list(self.head.parameters()), "scale": 1.0}]
        if own:
            rate = "backbone_lr_scale" if self.backbone_parts else "prompt_lr_scale"
            groups.append({"params": own, "scale": getattr(self.options, rate, 1.0)})
        if self.tunes_backbone and not self.backbone_parts:
            scale, decay = (getattr(self.options, key, 1.0) for key in ("backbone_lr_scale", "layer_decay"))
            layers = self.vit.layers() if decay < 1 else [list(self.vit.parameters())]  # one group is faster than many
            learning = ([p for p in layer if p.requires_grad] for layer in layers)
            groups += [{"params": layer, "scale": scale * decay**n} for n, layer in enumerate(learning) if layer]
        return groups

    def encode(self, view: View, class_tokens: tuple[int, ...] = (-1,)) -> tuple[Tensor, Losses]:
        """Class tokens after these blocks, in this order [B, blocks · D], and the method's own loss terms."""
        if self.classifies_frozen and self.uses_query:
            return view.query, {}
        adapts = self.adapters is not None and getattr(self.options, "adapt", True)
        adapters = self.adapters.by_block() if adapts else None
        placement: Placement = "tokens" if self.prompts_stay else getattr(self.options, "placement", "after")
        prompts, own = self.prompts_of(view)
        features = self.vit.encode(view.tokens, prompts, placement, adapters=adapters, class_tokens=class_tokens)
        return features.float(), own

    def prompts_of(self, view: View) -> tuple[Prompts | None, Losses]:
        """The prompts of each block that has some, and the method's own loss terms."""
        return None, {}

    def by_block(self, prompt: Tensor) -> dict[int, Tensor]:
        """The prompts [B, M, L_p, D] of the M blocks that get one, by block."""
        return dict(zip(self.options.blocks, prompt.unbind(1), strict=True))

    def features(self, view: View) -> tuple[Tensor, Losses]:
        """What is classified and remembered [B, D], and the method's own loss terms (ignored outside training)."""
        features, own = self.read(view)
        if self.mirror and view.labels is None:
            features = (features + self.read(view.mirrored())[0]) / 2
        return features, own

    def frozen_features(self, view: View) -> Tensor:
        """What the frozen backbone contributes to `features`, for methods that say `uses_frozen`."""
        raise NotImplementedError

    def read(self, view: View) -> tuple[Tensor, Losses]:
        """`features` of the images as they are."""
        tokens, own = self.encode(view, self.token_blocks)
        return self.scaled(tokens), own

    def scaled(self, tokens: Tensor) -> Tensor:
        """Class tokens [B, blocks · D]; each has the same length, if the option `scaled` says so."""
        if not getattr(self.options, "scaled", False):
            return tokens
        return (TOKEN_LENGTH * F.normalize(tokens.unflatten(1, (self.class_tokens, -1)), dim=-1)).flatten(1)

    def losses(self, view: View) -> Losses:
        features, own = self.features(view)
        losses = {"task": self.task_loss(self.head(features), view.labels), **own}
        if self.former is not None:
            with torch.no_grad():
                before = self.former.read(view.through(self.former.vit))[0]
            losses |= self.keep_features(features, before)
        return losses

    def task_loss(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """Cross-entropy. With `masks_old_logits`, only over the task's classes, so no gradient reaches the others."""
        if labels is None:
            raise RuntimeError("a loss needs labels, and only views in training have them")
        loss = symmetric_cross_entropy if getattr(self.options, "symmetric", False) else F.cross_entropy
        if self.masks_old_logits and self.task.returning:
            return loss(logits.masked_fill(self.absent, -torch.inf), labels)
        if self.masks_old_logits:
            return loss(logits[:, self.task.old_classes :], labels - self.task.old_classes)
        return loss(logits, labels)

    def logits(self, view: View) -> Tensor:
        return self.head(self.features(view)[0])

    def with_missing(self, scores: Tensor) -> Tensor:
        """Scores [B, C] of all classes: −∞ for those that have none, which is in the middle of their task."""
        return F.pad(scores, (0, self.head.out_features - scores.shape[1]), value=-torch.inf)

    def training_images(self, data: TaskData) -> tuple[Images, Tensor]:
        """The images to train on and their positions in the head. A method that rehearses adds its exemplars."""
        return data.images, data.labels

    def exemplar_count(self) -> int:
        """How many old images are kept, for methods that rehearse."""
        return 0

    def end_epoch(self, epoch: int) -> None:
        """After each epoch. It may depend only on what a checkpoint holds, so that a resumed task does the same."""

    def finish_task(self, data: TaskData) -> None:
        """After the last epoch. It is the last chance to read the task's images. A method that keeps statistics takes
        them now, and corrects its classifier with them."""
        if self.statistics is not None:
            if data.features_before is not None:
                self.move_statistics(self.statistics, data)
            self.remember(self.statistics, self.head, self.options.rebalancing, data.statistics_features, data)

    def move_statistics(self, statistics: ClassStatistics, data: TaskData) -> None:
        """Move the statistics of old classes to where their features would be now."""
        statistics.move(self.drift(data))

    def drift(self, data: TaskData) -> Drift:
        """How features moved while the task was learned."""
        assert data.features_before is not None
        return fit_drift(data.features_before, data.features, self.options.moving, data.labels)

    def end_task(self) -> None:
        """Drop what only a task's training needs (a teacher, for example), so that no checkpoint between tasks holds
        it."""
        self.former = None

    def saved(self, name: str) -> bool:
        """Whether a tensor of the state dict goes into a checkpoint. Those of a frozen backbone do not."""
        if self.backbone_parts and name.startswith("vit."):
            return any(part in name for part in self.backbone_parts)
        frozen = ("frozen.", "former.frozen.", *(() if self.tunes_backbone else ("vit.", "former.vit.")))
        return not name.startswith(frozen)

    def loaded(self) -> None:
        """Called after a checkpoint was loaded, to restore what is not saved itself."""

    def choices(self, query: Tensor) -> Tensor | None:
        """Which prompt each image gets in each prompted block [B, M], for methods that choose. The report shows it."""
        return None

    def kept_bytes(self) -> int:
        """Bytes carried from task to task: prompts, classifiers, statistics with the matrices that classes share,
        exemplars, a backbone if it is tuned. A frozen backbone does not count."""
        return sum(tensor.nbytes for name, tensor in self.state_dict().items() if self.saved(name))

    def notes(self) -> list[str]:
        """What the result of a run should mention."""
        return []

    # ------------------------------------------------------------------ shared services

    def classifiers(self) -> list[nn.Linear]:
        """The head, and other classifiers if the method has some. They do not count as prompting parameters."""
        return [self.head]

    def prompting_parameters(self) -> list[nn.Parameter]:
        """The method's own parameters, without those of the backbone and of classifiers."""
        others = [self.vit, self.frozen, *self.classifiers(), *(getattr(self, name) for name in self.only_for_learning)]
        own = [module for module in self.children() if not any(module is other for other in others)]
        added = (p for name, p in self.vit.named_parameters() if any(part in name for part in self.backbone_parts))
        return [*self.parameters(recurse=False), *(p for module in own for p in module.parameters()), *added]

    def parameter_counts(self) -> dict[str, int]:
        return {
            "prompting": sum(p.numel() for p in self.prompting_parameters()),
            "classifier": sum(p.numel() for classifier in self.classifiers() for p in classifier.parameters()),
            "backbone": sum(p.numel() for p in self.vit.parameters()),
            "trainable": sum(p.numel() for group in self.parameter_groups() for p in group["params"]),
        }

    def new_statistics(self, settings: Rebalancing | None) -> ClassStatistics | None:
        """Empty statistics for these settings. None if the method has no such settings, or if they are turned off."""
        if settings is None or not getattr(self.options, "statistics", True):
            return None
        # a classifier that is solved for needs the means of whole classes
        weights = "size" if settings.how == "closed-form" else settings.centroid_weights
        doubts = getattr(self.options, "moving", Moving()).how == "validated"
        kind = KINDS[settings.covariance]
        return kind(self.feature_width, settings.centroids, settings.variance, weights, doubts)

    def remember(
        self, statistics: ClassStatistics, classifier: nn.Linear, settings: Rebalancing, features: TaskFeatures,
        data: TaskData,
    ) -> None:  # fmt: skip
        """Add statistics of the task's classes; those of classes that come back are updated. From the second task on,
        correct a classifier with those of all classes."""
        if not data.task.returning and (statistics.centroids > 1 or features.few(statistics.width)):
            statistics.add(features.whole, data.labels)
        else:
            statistics.add_sums(features.add_up(ClassSums(statistics.kind, data.classes, statistics.width)))
        old_classes = data.task.old_classes
        if old_classes or settings.how == "closed-form":
            rebalance(classifier, statistics, old_classes, data.batch_size, settings, data.seed, self.task_sizes)

    def keep_features(self, features: Tensor, before: Tensor) -> Losses:
        return {"feature distillation": self.options.feature_distillation * F.mse_loss(features, before)}

    def frozen_copy(self) -> Method:
        """A copy of this method as it is now, for features and logits only. A frozen backbone is shared, not copied.

        Use it under `no_grad`. Its parameters keep `requires_grad`: PyTorch multiplies matrices in another way where it
        is set, and the copy has to agree with the original to the bit.
        """
        vit = self.vit.frozen_copy().requires_grad_(True) if self.tunes_backbone else self.vit
        left_out = {id(getattr(self, name)): None for name in self.only_for_learning}
        return copy.deepcopy(self, {id(self.vit): vit, id(self.frozen): self.frozen} | left_out).eval()

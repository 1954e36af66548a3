"""Classifiers made of class means: SimpleCIL and APER (Zhou et al. 2023, "Revisiting class-incremental learning with
pre-trained models").

SimpleCIL trains nothing: a class is the mean of its frozen features, and an image belongs to the class whose mean has
the highest cosine. APER first adapts the network to the first task, with an adapter in every block, then freezes it;
its features are the frozen ones joined with the adapted ones. Nothing moves after the first task, so no mean becomes
stale.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import Adapter, ViT
from vqprompt.research.methods.base import Losses, Method, Options, ReadoutOptions, TaskData, TaskInfo, View

TEMPERATURE = 0.1  # turns cosines into scores; it changes percentages, not answers


class SimpleCIL(Method):
    title = "SimpleCIL"
    classifies_frozen = True
    joined: ClassVar[int] = 1  # class tokens that make up the features
    prototypes: Tensor  # [C, D], sums of the features of each class; a cosine with them is one with the mean

    def __init__(self, vit: ViT, options: Options, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.register_buffer("prototypes", torch.zeros(0, self.joined * vit.config.width))

    def trains_in(self, task: int) -> bool:
        return False

    def finish_task(self, data: TaskData) -> None:
        sums = data.class_sums(self.prototypes.shape[1])
        self.prototypes = F.pad(self.prototypes, (0, 0, 0, data.task.new_classes))
        self.prototypes[sums.labels] += sums.totals.to(self.prototypes)

    def logits(self, view: View) -> Tensor:
        features = self.features(view)[0]
        cosines = F.normalize(features, dim=-1) @ F.normalize(self.prototypes, dim=-1).T
        return self.with_missing(cosines / TEMPERATURE)


class AdapterOptions(Options):
    rank: int = Field(64, ge=1, description="hidden units of the adapter in each block")
    adapter_scale: float = Field(0.1, gt=0, description="factor of the adapter's output")
    prompt_lr_scale: float = Field(1.0, gt=0, description="the adapters' rate, relative to the classifier's")


class Adapters(nn.Module):
    """One bottleneck per block, beside its MLP. The second layer starts at zero, so the network starts unchanged."""

    def __init__(self, blocks: int, width: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(blocks, rank, width))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        self.down_bias = nn.Parameter(torch.zeros(blocks, rank))
        self.up = nn.Parameter(torch.zeros(blocks, width, rank))
        self.up_bias = nn.Parameter(torch.zeros(blocks, width))

    def by_block(self) -> list[Adapter]:
        up, up_bias = self.scale * self.up, self.scale * self.up_bias
        return list(zip(self.down, self.down_bias, up, up_bias, strict=True))


class CosineTraining(Method):
    """For methods that train adapters with a cosine classifier: scores are sharpness · cos(features, row of the head),
    and the sharpness is learned."""

    training_defaults: ClassVar = {"lr": 0.01, "optimizer": "sgd", "weight_decay": 5e-4, "batch_size": 48}
    search_space: ClassVar = {"lr": (5e-3, 2.0)}

    def __init__(self, vit: ViT, options: BaseModel, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.sharpness = nn.Parameter(torch.ones(()))

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        nn.init.ones_(self.sharpness)

    def losses(self, view: View) -> Losses:
        features, own = self.features(view)
        cosines = F.normalize(features, dim=-1) @ F.normalize(self.head.weight, dim=-1).T
        return {"task": self.task_loss(self.sharpness * cosines, view.labels), **own}


class FirstTaskAdapters(CosineTraining):
    """For methods whose adapters learn in the first task and then stay."""

    def __init__(self, vit: ViT, options: Any, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.adapters = Adapters(vit.config.depth, vit.config.width, options.rank, options.adapter_scale)

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        self.adapters.requires_grad_(task.number == 0)

    def trains_in(self, task: int) -> bool:
        return task == 0 and bool(getattr(self.options, "adapt", True))


class OnceAdaptedOptions(AdapterOptions, ReadoutOptions):
    adapt: bool = Field(True, description="learn adapters in the first task")


class APER(FirstTaskAdapters, SimpleCIL):
    title = "APER"
    Options: ClassVar[Any] = AdapterOptions
    classifies_frozen, uses_query = False, True
    joined = 2

    def features(self, view: View) -> tuple[Tensor, Losses]:
        """In training the adapted features; afterwards both, joined."""
        adapted, _ = self.encode(view)
        return (adapted if view.labels is not None else torch.cat([view.query, adapted], dim=1)), {}

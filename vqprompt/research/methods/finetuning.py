"""Fine-tuning of the whole network: task by task (FT), with old logits masked (FT++), on all classes at once (Joint);
and the frozen linear probe."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import Losses, Method, StatisticsOptions
from vqprompt.research.methods.base import Options as BaseOptions
from vqprompt.research.methods.recipes import PRESETS
from vqprompt.research.training.view import View


class LinearProbe(Method):
    title = "Linear"
    year = 2022
    summary = "a linear classifier on frozen features, old logits masked"
    Options: ClassVar[Any] = StatisticsOptions  # with statistics=True it shows what statistics add
    presets = PRESETS["linear"]
    classes_return = True
    uses_query = True

    def __init__(self, vit: ViT, options: StatisticsOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.uses_query = not self.mirror and self.class_tokens == 1  # type: ignore[misc]

    def encode(self, view: View, class_tokens: int = 1) -> tuple[Tensor, Losses]:
        return (view.query, {}) if self.uses_query else super().encode(view, class_tokens)


class TuningOptions(BaseOptions):
    backbone_lr_scale: float = Field(1.0, gt=0, description="the backbone's rate, relative to the classifier's")
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="a block's rate, relative to the next block's; below 1, the first blocks learn slowly",
    )


class FineTuningOptions(TuningOptions, StatisticsOptions):
    """For methods that tune the backbone and can keep class statistics."""


class FT(Method):
    title = "FT"
    year = 1989
    summary = "plain fine-tuning, task by task: what forgetting looks like"
    Options: ClassVar[Any] = FineTuningOptions
    training_defaults: ClassVar = {"lr": 5e-5}
    tunes_backbone = True
    classes_return = True
    masks_old_logits = False


class FTPlusPlus(FT):
    title = "FT++"
    year = 2023
    summary = "fine-tuning that does not train the logits of old classes"
    masks_old_logits = True


class Joint(FT):
    title = "Joint"
    year = 1989
    summary = "fine-tuning on all classes at once: an upper bound"
    joint = True

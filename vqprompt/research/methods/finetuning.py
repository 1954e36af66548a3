"""Fine-tuning of the whole network: task by task (FT), with old logits masked (FT++), on all classes at once (Joint);
and the frozen linear probe."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from vqprompt.research.methods.base import Method, StatisticsOptions
from vqprompt.research.methods.base import Options as BaseOptions
from vqprompt.research.methods.recipes import PRESETS


class LinearProbe(Method):
    title = "Linear"
    year = 2022
    summary = "a linear classifier on frozen features, old logits masked"
    Options: ClassVar[Any] = StatisticsOptions  # with statistics=True it shows what statistics add
    presets = PRESETS["linear"]
    frozen_features = True


class TuningOptions(BaseOptions):
    backbone_lr_scale: float = Field(1.0, gt=0, description="the backbone's rate, relative to the classifier's")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="a block's rate, relative to the next block's; below 1, the first learn slowly"
    )


class FineTuningOptions(TuningOptions, StatisticsOptions):
    """For methods that tune the backbone and can keep class statistics."""


class FT(Method):
    title = "FT"
    year = 1989
    summary = "plain fine-tuning, task by task: what forgetting looks like"
    Options: ClassVar[Any] = FineTuningOptions
    training_defaults: ClassVar = {"lr": 5e-5}
    search_space: ClassVar = {"lr": (1e-6, 1e-2), "layer_decay": (0.5, 1.0)}
    tunes_backbone = True
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

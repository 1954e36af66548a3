"""Fine-tuning of the whole network: task by task (FT), with old logits masked (FT++), on all classes at once (Joint);
and the frozen linear probe."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from vqprompt.research.methods.base import Method, Options, StatisticsOptions


class LinearProbe(Method):
    title = "Linear"
    Options: ClassVar[Any] = StatisticsOptions  # with statistics=True it shows what statistics add
    classifies_frozen = True


class TuningOptions(Options):
    backbone_lr_scale: float = Field(1.0, gt=0, description="the backbone's rate, relative to the classifier's")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="a block's rate, relative to the next block's; below 1, the first learn slowly"
    )


class FineTuningOptions(TuningOptions, StatisticsOptions):
    """For methods that tune the backbone and can keep class statistics."""


class FT(Method):
    title = "FT"
    Options: ClassVar[Any] = FineTuningOptions
    tunes_backbone = True
    masks_old_logits = False

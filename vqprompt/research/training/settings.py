"""Settings of the training loop, the same for all methods."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, Field

from vqprompt.core.data.decode import STORED_MARGIN

Augment = Literal["crop", "crop-color", "window", "flip", "none"]
Normalize = Literal["backbone", "none", "imagenet"]
ScheduleName = Literal["cosine", "constant", "steps", "epoch-cosine", "annealing", "released", "coda"]
OptimizerName = Literal["adamw", "sgd"]


class Training(BaseModel, extra="forbid"):
    """Settings of the training loop."""

    epochs: int = Field(20, ge=1)
    batch_size: int = Field(128, ge=1)
    batches_per_epoch: int = Field(
        0, ge=0, description="about this many at least: tasks with few images get smaller batches, by powers of two"
    )
    lr: float = Field(0.0025, gt=0, description="the classifier's peak rate")
    min_lr: float = Field(1e-6, ge=0, description="where the cosine ends")
    weight_decay: float = Field(0.0, ge=0)
    optimizer: OptimizerName = "adamw"
    schedule: ScheduleName = Field(
        "cosine",
        description="cosine per step; constant; steps at `milestones`; cosine per epoch; VQ-Prompt's and CODA's own",
    )
    milestones: list[float] = Field([], description="steps only: shares of the epochs after which the rate drops")
    gamma: float = Field(0.1, gt=0, le=1, description="steps only: factor of the rate at each milestone")
    hold: int = Field(0, ge=0, description="released only: steps at min_lr, after a first step at the full rate")
    nominal_steps: int = Field(
        0, ge=0, description="released only: steps per epoch that it assumes; 0: the real number"
    )
    clip: float = Field(0.0, ge=0, description="largest norm of the gradient; 0: not clipped")
    normalize: Normalize = Field(
        "backbone", description="as the backbone's card says; none: pixels in [0, 1] as they are; or ImageNet's"
    )
    augment: Augment = Field(
        "crop",
        description="random resized crop and flip, the same with random colors, a window of 3/4 and flip, flip, none",
    )
    crop_area: float = Field(0.08, gt=0, le=1, description="smallest share of an image that a random crop covers")
    statistics_views: Literal["clean", "augmented"] = Field(
        "clean", description="class statistics are taken of clean images, or of one augmented view of each"
    )
    stored: float = Field(
        STORED_MARGIN,
        ge=1,
        le=8,
        description="images are stored at this multiple of the size; a larger one gives sharper crops",
    )
    test_crop: float = Field(
        0.875, ge=0, le=1, description="central test crop, as a share of the short side; 0: whole image"
    )

    def batch_for(self, images: int) -> int:
        """The batch size for a task with so many images. Powers of two, so that few sizes are compiled."""
        wanted = images / self.batches_per_epoch if self.batches_per_epoch else self.batch_size
        smaller = 2 ** round(math.log2(max(wanted, 1)))
        return self.batch_size if wanted >= self.batch_size else min(smaller, self.batch_size)

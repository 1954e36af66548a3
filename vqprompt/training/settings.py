"""Settings of the training loop, the same for all methods."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Augment = Literal["crop", "flip", "none"]
OptimizerName = Literal["adamw", "sgd"]


class Training(BaseModel, extra="forbid"):
    """Settings of the training loop."""

    epochs: int = Field(20, ge=1)
    batch_size: int = Field(128, ge=1)
    lr: float = Field(0.0025, gt=0, description="the classifier's peak rate")
    min_lr: float = Field(1e-6, ge=0, description="where the cosine ends")
    weight_decay: float = Field(0.0, ge=0)
    optimizer: OptimizerName = "adamw"
    augment: Augment = Field("crop", description="random resized crop and flip, flip only, or none")
    test_crop: float = Field(0.875, ge=0, le=1, description="side of the central test crop; 0: whole image, squashed")

"""LwF, learning without forgetting (Li & Hoiem 2017): the old network teaches the new one.

The whole network is tuned on the new classes. A frozen copy, made when the task began, is the teacher: on the same
(new) images, the logits of old classes are held to those of the copy. No old image is kept.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vqprompt.research.methods.base import Losses, Method, TaskInfo, View
from vqprompt.research.methods.finetuning import TuningOptions


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of softened scores [B, C]: cross-entropy with the target, less a constant."""
    ours, theirs = (F.log_softmax(z.float() / temperature, dim=-1) for z in (logits, target))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


class LwFOptions(TuningOptions):
    temperature: float = Field(2.0, gt=0, description="softens both sides of the distillation")
    distillation_weight: float = Field(3.0, ge=0, description="weight of the distillation; the cross-entropy has 1")


class LwF(Method):
    title = "LwF"
    Options: ClassVar[Any] = LwFOptions
    tunes_backbone = True

    def start_task(self, task: TaskInfo) -> None:
        if task.old_classes:
            self.former = self.frozen_copy()
        super().start_task(task)

    def losses(self, view: View) -> Losses:
        logits = self.logits(view)
        losses = {"task": self.task_loss(logits, view.labels)}
        if self.former is not None:
            losses["distillation"] = self.options.distillation_weight * self.distillation(logits, view)
        return losses

    def distillation(self, logits: Tensor, view: View) -> Tensor:
        """From the network before the task."""
        assert self.former is not None
        with torch.no_grad():
            target = self.former.logits(view.through(self.former.vit))
        return distillation(logits[:, : target.shape[1]], target, self.options.temperature)

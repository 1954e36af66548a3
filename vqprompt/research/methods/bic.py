"""BiC, bias correction (Wu et al. 2019): rehearsal and distillation, then two numbers undo the bias to new classes.

A memory of fixed size holds images of all classes learned, the same number of each. Stage 1 tunes the network on it and
on the new images, distilled from the network before the task. Stage 2 fits α, β on a small balanced set that was kept
out of stage 1: the logits of the new classes become α z + β. Every task keeps its pair.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.errors import UserError
from vqprompt.research.methods.base import Losses, TaskData, TaskInfo, View
from vqprompt.research.methods.finetuning import TuningOptions
from vqprompt.research.methods.lwf import LwF


class BiCOptions(TuningOptions):
    exemplars: int = Field(2000, ge=1, description="images kept in total, divided equally among the classes")
    selection: Literal["herding", "random"] = Field("herding", description="which images of a class are kept")
    held_out: float = Field(0.1, gt=0, lt=1, description="share of the exemplars that fits the correction")
    temperature: float = Field(2.0, gt=0, description="softens both sides of the distillation")
    correction_decay: float = Field(0.01, ge=0, description="pull of the correction towards none (α=1, β=0)")


class BiC(LwF):
    title = "BiC"
    Options: ClassVar[Any] = BiCOptions
    masks_old_logits = False
    only_for_learning = (*LwF.only_for_learning, "memory", "held_out")
    correction: Tensor  # [2, C], α and β of each class: the same for all classes of a task

    def __init__(self, vit: ViT, options: BiCOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.memory = Exemplars()
        self.register_buffer("correction", torch.zeros(2, 0))
        self.held_out: tuple[Images, Tensor] | None = None

    def check_task(self, task: TaskInfo) -> None:
        if self.options.exemplars < task.all_classes:
            kept = f"exemplars={self.options.exemplars}"
            raise UserError(f"{kept} cannot hold one image of each of {task.all_classes} classes; allow more")

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        identity = self.correction.new_tensor([[1.0], [0.0]]).expand(2, task.new_classes)
        self.correction = torch.cat([self.correction, identity], dim=1)

    def end_task(self) -> None:
        super().end_task()
        self.held_out = None

    def exemplar_count(self) -> int:
        return len(self.memory)

    # ------------------------------------------------------------------ stage 1: rehearse

    def training_images(self, data: TaskData) -> tuple[Images, Tensor]:
        images, labels = data.images, data.labels
        if not len(self.memory):
            return images, labels
        old, old_labels = self.memory.images(), self.memory.labels
        counts = torch.bincount(torch.cat([old_labels, labels]).cpu())
        each = max(1, int(self.options.held_out * counts[: self.task.old_classes].min()))
        each = min(each, int(counts.min()) - 1)  # every class keeps at least one image to learn from
        parts = [(group, known, *split(known, each)) for group, known in ((old, old_labels), (images, labels))]
        shown = Images.concatenate([group.take(keep) for group, _, keep, _ in parts])
        if each:
            held = Images.concatenate([group.take(out) for group, _, _, out in parts])
            self.held_out = held, torch.cat([known[out.to(known.device)] for _, known, _, out in parts])
        return shown, torch.cat([known[keep.to(known.device)] for _, known, keep, _ in parts])

    def losses(self, view: View) -> Losses:
        logits = self.logits(view)
        task = self.task_loss(logits, view.labels)
        if self.former is None:
            return {"task": task}
        old = self.task.old_classes / self.task.all_classes  # λ: more old classes, more distillation
        return {"task": (1 - old) * task, "distillation": old * self.distillation(logits, view)}

    def logits(self, view: View) -> Tensor:
        alpha, beta = self.correction
        return super().logits(view) * alpha + beta

    # ------------------------------------------------------------------ stage 2: correct, then remember

    def finish_task(self, data: TaskData) -> None:
        task = data.task
        if self.held_out is not None:
            images, labels = self.held_out
            self.correction[:, task.old_classes :] = fit_correction(
                data.logits(images), labels, task.old_classes, self.options.correction_decay
            )[:, None]
        features, labels = data.features, data.labels
        quota = self.options.exemplars // task.all_classes
        chosen = []
        for label in range(task.old_classes, task.all_classes):
            own = torch.nonzero(labels == label)[:, 0]
            if self.options.selection == "herding":
                order = herd(features[own], quota)
            else:
                order = torch.randperm(len(own), generator=torch.Generator().manual_seed(data.seed + label))[:quota]
            chosen.append(own[order.to(own.device)].cpu())
        index = torch.cat(chosen)
        pixels = data.images.read(index, features.device)
        self.memory.update(quota, pixels, data.images.aspect[index], labels[index.to(labels.device)])


class Exemplars(nn.Module):
    """Kept images, class by class, the most representative first. As buffers, they are saved with the method."""

    pixels: Tensor  # uint8 [n, C, S, S]
    aspect: Tensor  # [n]
    labels: Tensor  # [n], positions in the head

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pixels", torch.zeros(0, dtype=torch.uint8))
        self.register_buffer("aspect", torch.zeros(0))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.labels)

    def update(self, quota: int, pixels: Tensor, aspect: Tensor, labels: Tensor) -> None:
        """Cut every class down to `quota` images and take in new ones, already chosen."""
        first = torch.searchsorted(self.labels, self.labels)  # of each image's class; labels are in order
        keep = torch.arange(len(self), device=first.device) - first < quota
        self.pixels = torch.cat([self.pixels[keep], pixels])
        self.aspect = torch.cat([self.aspect[keep], aspect.to(self.aspect)])
        self.labels = torch.cat([self.labels[keep], labels.to(self.labels)])

    def images(self) -> Images:
        store = Store(self.pixels.cpu().numpy(), self.aspect.cpu().numpy(), fingerprint="")
        return Images(store, np.arange(len(self)), self.labels.cpu().numpy())


def split(labels: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Positions to keep, and `each` of every class to hold out: random, but repeatable, so a task can be resumed."""
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(len(labels)))
    out = [order[labels[order] == label][:each] for label in labels.unique()]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[torch.cat(out)] = True
    return torch.nonzero(~held)[:, 0], torch.nonzero(held)[:, 0]


def herd(features: Tensor, count: int) -> Tensor:
    """Choose features [n, D] one by one, so that their mean stays closest to the class's mean (iCaRL's herding)."""
    features = F.normalize(features.float(), dim=-1)
    mean, total = features.mean(0), torch.zeros_like(features[0])
    taken, chosen = torch.zeros(len(features), device=features.device), []
    for number in range(1, min(count, len(features)) + 1):
        distance = (mean - (total + features) / number).norm(dim=-1) + taken
        best = distance.argmin()
        taken[best] = torch.inf
        total = total + features[best]
        chosen.append(best)
    return torch.stack(chosen) if chosen else torch.zeros(0, dtype=torch.long, device=features.device)


def fit_correction(logits: Tensor, labels: Tensor, old_classes: int, decay: float) -> Tensor:
    """The α, β for the new classes' logits that serve a balanced set [n, C] best.

    The loss is convex in two numbers, so it is solved and not trained for epochs. decay: pulls towards no correction.
    Without it the numbers would grow without bound if a small set is classified without a mistake.
    """
    logits, identity = logits.double(), torch.tensor([1.0, 0.0], dtype=torch.double, device=logits.device)
    pair = identity.clone().requires_grad_()
    solver = torch.optim.LBFGS([pair], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        corrected = torch.cat([logits[:, :old_classes], logits[:, old_classes:] * pair[0] + pair[1]], dim=1)
        value = F.cross_entropy(corrected, labels) + decay / 2 * (pair - identity).square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    return pair.detach().float()

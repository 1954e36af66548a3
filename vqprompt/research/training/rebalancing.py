"""The classifier, corrected from class statistics after each task (paper, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from vqprompt.core.statistics.discriminant import shrunk, solve_discriminant
from vqprompt.core.statistics.gaussians import JITTER, CentroidWeights, ClassStatistics, Variance
from vqprompt.core.statistics.sums import Covariance
from vqprompt.research.training.cuda_graph import GraphedStep
from vqprompt.research.training.optim import Inputs, Losses, cosine_decay, make_optimizer, set_rates
from vqprompt.research.training.settings import OptimizerName


class Rebalancing(BaseModel, extra="forbid"):
    """How the classifier is corrected after a task."""

    how: Literal["train", "closed-form"] = Field(
        "train", description="train the classifier on pseudo-features, or solve for it (linear discriminant)"
    )
    covariance: Covariance = Field("diagonal", description="diagonal as in the paper, full per class, or one shared")
    centroids: int = Field(1, ge=1, description="Gaussians per class")
    centroid_weights: CentroidWeights = Field(
        "size", description="draw in proportion to a centroid's images, or equally from all with more than one image"
    )
    variance: Variance = Field("sample", description="squared residuals divided by n - 1, or by n (population)")
    epochs: int = Field(10, ge=0, description="epochs over freshly drawn pseudo-features")
    lr: float = Field(1e-3, gt=0, description="learning rate; 1e-5 in the released code")
    schedule: Literal["epochs", "released"] = Field(
        "epochs",
        description="cosine to min_lr per epoch; released: per step to 1e-6, after a first step at ten times lr",
    )
    min_lr: float = Field(0.0, ge=0, description="where the cosine per epoch ends")
    optimizer: OptimizerName = Field("adamw", description="AdamW, or SGD with momentum 0.9")
    weight_decay: float = Field(5e-4, ge=0, description="of the classifier")
    ratio: int = Field(4, ge=1, description="pseudo-features per class and epoch, in batches")
    samples: int = Field(
        0, ge=0, description="pseudo-features per class, drawn once for all epochs of 320 steps (SLDC); 0: by ratio"
    )
    symmetric: bool = Field(False, description="half cross-entropy, half reverse cross-entropy")
    steps_for: Literal["old", "seen"] = Field(
        "old", description="one step per epoch for each old class, or for each class seen"
    )
    steps: int = Field(
        200, ge=1, description="most steps per epoch; without a limit, twice the classes take four times as long"
    )
    logit_norm: float = Field(0.0, ge=0, description="temperature of logit normalization; 0: none")
    norm_by_task: bool = Field(False, description="divide by the mean of the tasks' norms, not by the norm of all")
    mean_decay: float = Field(0.0, ge=0, lt=1, description="shrink the means of older tasks by up to this fraction")
    shrinkage: float = Field(0.1, ge=0, le=1, description="closed-form only: weight of the identity in the covariance")


SAMPLE_STEPS = 320  # per epoch, over samples that are drawn once
TOGETHER = 10  # most steps that a recording consists of


def normalized_cross_entropy(
    logits: Tensor, labels: Tensor, temperature: float, task_sizes: Sequence[int] | None = None, symmetric: bool = False
) -> Tensor:
    """Cross-entropy of logits divided by their own norm and a temperature (Wei et al. 2022); 0: plain.

    task_sizes: take the norm of each task's logits, and the mean of these norms (SLCA).
    """
    if temperature:
        parts = logits.split(list(task_sizes or [logits.shape[-1]]), dim=-1)
        norm = torch.stack([part.norm(dim=-1, keepdim=True) for part in parts]).mean(0)
        logits = logits / ((norm + 1e-7) * temperature)
    return symmetric_cross_entropy(logits, labels) if symmetric else F.cross_entropy(logits, labels)


def symmetric_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """½ cross-entropy + ½ reverse cross-entropy (Wang et al. 2019); the one-hot target is clamped at 1e-4, so that its
    logarithm is finite."""
    wrong = 1 - F.softmax(logits, dim=1).gather(1, labels[:, None])[:, 0]  # probability where the target is clamped
    return 0.5 * F.cross_entropy(logits, labels) - 0.5 * math.log(1e-4) * wrong.mean()


def rebalance(
    head: nn.Linear, statistics: ClassStatistics, old_classes: int, batch_size: int, settings: Rebalancing, seed: int,
    task_sizes: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Correct the classifier, using only the statistics.

    Each epoch draws `batch_size * ratio` pseudo-features per class and shuffles them. It takes one step for every OLD
    class (or every class, by `steps_for`), each with that many features, but at most `steps` steps. If this limit
    applies, only as many features are drawn as these steps need, of classes chosen at random. This saves time and
    memory for features that no step would use. With `samples`, the same features serve all epochs.

    task_sizes: classes of each task so far, for `norm_by_task` and `mean_decay`.
    """
    if (settings.norm_by_task or settings.mean_decay) and not task_sizes:
        raise ValueError("norm_by_task and mean_decay need the sizes of the tasks")
    if settings.how == "closed-form":
        solve(head, statistics, settings.shrinkage)
        return
    device = head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = make_optimizer(
        [{"params": list(head.parameters())}], settings.optimizer, settings.lr, settings.weight_decay
    )

    def take_steps(inputs: Inputs) -> Losses:
        for rows in inputs["rows"]:
            features, labels = (inputs[name][rows] for name in ("features", "labels"))
            if plain:
                fill_gradient(head, features, one_hot[labels])
            else:
                optimizer.zero_grad(set_to_none=True)
                sizes = task_sizes if settings.norm_by_task else None
                logits = head(features)
                normalized_cross_entropy(logits, labels, settings.logit_norm, sizes, settings.symmetric).backward()
            optimizer.step()
        return {}

    plain = device.type == "cuda" and not settings.logit_norm and not settings.symmetric
    at_once = TOGETHER if device.type == "cuda" and settings.schedule == "epochs" else 1
    one_hot = torch.eye(head.out_features, device=device)
    step = GraphedStep(take_steps, device)  # recorded, because there are thousands of tiny steps
    count, scales, roots = batch_size * settings.ratio, None, statistics.roots()
    if settings.mean_decay and task_sizes:
        ages = torch.cat([torch.full((size,), t) for t, size in enumerate(reversed(task_sizes))]).flip(0)
        scales = (1 - settings.mean_decay * ages / len(task_sizes)).to(device)
    classes = old_classes if settings.steps_for == "old" else len(statistics.means)
    steps = min(classes, settings.steps)
    limited = settings.steps < classes and (roots is None or len(roots) == 1)
    fixed = statistics.sample(settings.samples, generator, scales, roots) if settings.samples else None
    if fixed is not None:
        count, steps = max(1, len(fixed[1]) // SAMPLE_STEPS), SAMPLE_STEPS
    for epoch in range(settings.epochs):
        set_rates(optimizer, cosine_decay(settings.lr, settings.min_lr, epoch, settings.epochs))
        if fixed is None and limited:
            some = torch.randint(len(statistics.means), (count * steps,), device=device, generator=generator)
            features, labels = statistics.sample(1, generator, scales, roots, some)
            order = torch.arange(len(labels), device=device)  # their classes are already in random order
        else:
            features, labels = fixed or statistics.sample(count, generator, scales, roots)
            order = torch.randperm(len(labels), device=device, generator=generator)
        batches = order[: count * steps].view(-1, count)
        together = max(size for size in range(1, at_once + 1) if len(batches) % size == 0)
        for number, rows in enumerate(batches.view(-1, together, count), start=epoch * steps):
            if settings.schedule == "released":
                set_rates(optimizer, released_rate(settings.lr, number, steps * settings.epochs))
            step({"features": features, "labels": labels, "rows": rows})
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def fill_gradient(head: nn.Linear, features: Tensor, targets: Tensor) -> None:
    """The gradient of the plain cross-entropy, with half as many kernels as autograd. targets: one-hot [B, C]."""
    excess = F.softmax(head(features), dim=1).sub_(targets)
    head.weight.grad = torch.addmm(head.weight, excess.T, features, beta=0, alpha=1 / len(features))
    head.bias.grad = excess.mean(0)


def released_rate(lr: float, step: int, steps: int) -> float:
    """VQ-Prompt's published rate: its scheduler starts from lr, but the first step still has ten times that."""
    return 10 * lr if step == 0 else cosine_decay(lr, 1e-6, step - 1, steps)


@torch.no_grad()
def solve(head: nn.Linear, statistics: ClassStatistics, shrinkage: float, part: slice = slice(None)) -> None:
    """Linear discriminant with one covariance for all classes. part: of the features; the others do not count."""
    covariance, means = statistics.class_covariance()[part, part].double(), statistics.class_means()[:, part].double()
    if covariance.is_cuda:
        weights = means @ precision_of(covariance, shrinkage, JITTER)
        bias = -0.5 * (means * weights).sum(1)
    else:
        wanted = shrunk(covariance.numpy(), shrinkage) + JITTER * np.eye(len(covariance))
        weights, bias = map(torch.from_numpy, solve_discriminant(wanted, means.numpy()))
    head.weight.zero_()
    head.weight[:, part] = weights.to(head.weight)
    head.bias.copy_(bias)


def precision_of(covariance: Tensor, shrinkage: float, jitter: float = 0.0) -> Tensor:
    """The inverse of a covariance [D, D], shrunk as a classifier shrinks it. Computed where the covariance is."""
    identity = torch.eye(len(covariance)).to(covariance)
    level = covariance.diagonal().mean()
    mixed = torch.lerp(covariance, level * identity, shrinkage) + jitter * identity
    return torch.linalg.inv(mixed) if level > 0 else identity

"""What is remembered of a class instead of its images: Gaussians of its features, and the classifier's rebalancing
from them (paper, section 4.3). Any method can use it.

Covariances: `diagonal` (the paper), `full` (one matrix a class), `shared` (one matrix for all, kept incrementally).
With several centroids a class, each has its own mean (and variance), found by k-means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from vqprompt.optim import Inputs, Losses, OptimizerName, Recorded, cosine, make_optimizer, set_rates

Covariance = Literal["diagonal", "full", "shared"]
JITTER = 1e-4  # added to every variance, as in the released code


class Rebalancing(BaseModel, extra="forbid"):
    """How the classifier is put right after a task."""

    how: Literal["train", "closed-form"] = Field(
        "train", description="train the classifier on pseudo-features, or solve for it (linear discriminant)"
    )
    covariance: Covariance = Field("diagonal", description="diagonal as in the paper, full per class, or one shared")
    centroids: int = Field(1, ge=1, description="Gaussians a class")
    epochs: int = Field(10, ge=0, description="epochs over freshly drawn pseudo-features")
    lr: float = Field(1e-3, gt=0, description="learning rate, cosine to zero; 1e-5 in the released code")
    optimizer: OptimizerName = Field("adamw", description="AdamW, or SGD with momentum 0.9")
    weight_decay: float = Field(5e-4, ge=0, description="of the classifier")
    ratio: int = Field(4, ge=1, description="pseudo-features a class and epoch, in batches")
    steps: int = Field(
        200, ge=1, description="at most so many steps an epoch: beyond, time would grow with the square of the classes"
    )
    logit_norm: float = Field(0.0, ge=0, description="temperature of logit normalization; 0: none")
    norm_by_task: bool = Field(False, description="divide by the mean of the tasks' norms, not by the norm of all")
    mean_decay: float = Field(0.0, ge=0, lt=1, description="shrink the means of older tasks by up to this fraction")
    shrinkage: float = Field(0.1, ge=0, le=1, description="closed-form only: weight of the identity in the covariance")


class ClassStatistics(nn.Module):
    """Gaussians of the classes learned so far, class by class in head order. Buffers, so they save themselves."""

    means: Tensor  # [C, k, D]
    shares: Tensor  # [C, k], how much of the class each centroid holds
    spread: Tensor  # diagonal: variances [C, k, D]; full: [C, D, D]; shared: scatter [D, D]
    seen: Tensor  # [1], images behind the shared scatter

    def __init__(self, width: int, covariance: Covariance = "diagonal", centroids: int = 1) -> None:
        super().__init__()
        self.covariance, self.centroids = covariance, centroids
        empty = {"diagonal": (0, centroids, width), "full": (0, width, width), "shared": (width, width)}[covariance]
        self.register_buffer("means", torch.zeros(0, centroids, width))
        self.register_buffer("shares", torch.zeros(0, centroids))
        self.register_buffer("spread", torch.zeros(empty))
        self.register_buffer("seen", torch.zeros(1))

    @property
    def bytes_per_class(self) -> int:
        """Memory kept for each learned class (the shared matrix is counted once, not here)."""
        growing = [self.means, self.shares] + ([] if self.covariance == "shared" else [self.spread])
        return sum(t[0].numel() * t.element_size() for t in growing) if len(self.means) else 0

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Take in the features [n, D] of new classes; labels run on from the classes already here."""
        start, counts = len(self.means), torch.bincount(labels).tolist()
        if 0 in counts[start:]:
            raise ValueError(f"class {counts.index(0, start)} has no features to take statistics of")
        means, shares, spread = [self.means], [self.shares], [self.spread]  # joined once, not class by class
        for own in features.float()[labels.argsort(stable=True)].split(counts)[start:]:
            member = self._assign(own)
            belongs = F.one_hot(member, self.centroids).to(own).T  # a product adds up in the same order every time
            held = belongs.sum(1)
            mean = belongs @ own / held.clamp(min=1)[:, None]
            rest = own - mean[member]
            means.append(mean[None])
            shares.append((held / held.sum())[None])
            if self.covariance == "diagonal":
                spread.append((belongs @ rest.square() / (held - 1).clamp(min=1)[:, None] + JITTER)[None])
            elif self.covariance == "full":
                spread.append((rest.T @ rest / max(len(own) - 1, 1))[None])
            else:
                spread[0] = spread[0] + rest.T @ rest
                self.seen = self.seen + max(len(own) - self.centroids, 0)
        self.means, self.shares, self.spread = torch.cat(means), torch.cat(shares), torch.cat(spread)

    def _assign(self, own: Tensor) -> Tensor:
        """Which centroid each feature of a class belongs to."""
        if self.centroids == 1 or len(own) <= self.centroids:
            return torch.arange(len(own), device=own.device) % self.centroids
        from sklearn.cluster import KMeans

        found = KMeans(self.centroids, n_init=1, random_state=0).fit_predict(own.cpu().numpy())
        return torch.as_tensor(found, dtype=torch.long, device=own.device)

    def class_means(self) -> Tensor:
        """Of whole classes [C, D]."""
        return (self.means * self.shares[..., None]).sum(1)

    def class_covariance(self) -> Tensor:
        """One for all whole classes [D, D]: within the centroids, and that of the centroids themselves."""
        apart = (self.means - self.class_means()[:, None]) * self.shares[..., None].sqrt()
        between = torch.einsum("ckd,cke->de", apart, apart) / len(apart)
        return self.shared_covariance() + (between.diag().diag() if self.covariance == "diagonal" else between)

    def shared_covariance(self) -> Tensor:
        """One covariance for all classes [D, D], about each centroid."""
        if self.covariance == "shared":
            return self.spread / self.seen.clamp(min=1)
        if self.covariance == "full":
            return self.spread.mean(0)
        return torch.diag((self.spread * self.shares[..., None]).sum(1).mean(0))

    def roots(self) -> Tensor | None:
        """What turns white noise into each class's noise, where covariances are matrices [C or 1, D, D]."""
        if self.covariance == "diagonal":
            return None
        return _root(self.spread if self.covariance == "full" else self.shared_covariance()[None])

    def sample(
        self, count: int, generator: torch.Generator, scales: Tensor | None = None, roots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`count` pseudo-features of every class: [C * count, D] and their labels.

        scales: of each class's mean [C]. roots: as `roots()` gave them, for who samples often.
        """
        classes, centroids, width = self.means.shape
        labels = torch.arange(classes, device=self.means.device)
        if centroids == 1:
            where: tuple[Tensor, ...] = (labels,)
        else:
            member = torch.multinomial(self.shares, count, replacement=True, generator=generator)
            where = (labels[:, None], member)
        drawn = torch.randn(classes, count, width, device=self.means.device, generator=generator)
        roots = self.roots() if roots is None else roots
        if roots is None:  # in place, for there is nothing larger here
            drawn *= self.spread[where].sqrt()
        else:
            drawn = drawn @ roots.mT
        means = self.means[where]
        drawn += means if scales is None else means * scales[:, None, None]
        return drawn.flatten(0, 1), labels.repeat_interleave(count)


def _root(matrix: Tensor) -> Tensor:
    """A factor A with A Aᵀ = matrix + jitter; in double, because few images give a nearly singular covariance."""
    jitter = JITTER * torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
    return torch.linalg.cholesky(matrix.double() + jitter).float()


def normalized_cross_entropy(
    logits: Tensor, labels: Tensor, temperature: float, task_sizes: Sequence[int] | None = None
) -> Tensor:
    """Cross-entropy of logits divided by their own norm and a temperature (Wei et al. 2022); 0: plain.

    task_sizes: take the norm of each task's logits, and the mean of these norms (SLCA).
    """
    if temperature:
        parts = logits.split(list(task_sizes or [logits.shape[-1]]), dim=-1)
        norm = torch.stack([part.norm(dim=-1, keepdim=True) for part in parts]).mean(0)
        logits = logits / ((norm + 1e-7) * temperature)
    return F.cross_entropy(logits, labels)


def rebalance(
    head: nn.Linear,
    statistics: ClassStatistics,
    old_classes: int,
    batch_size: int,
    settings: Rebalancing,
    seed: int,
    task_sizes: Sequence[int] | None = None,
) -> None:
    """Put the classifier right from the statistics alone. Each epoch draws `batch_size * ratio` pseudo-features a
    class, shuffles them, and takes one step of that many for every OLD class, up to `steps`.

    task_sizes: classes of each task so far, for `norm_by_task` and `mean_decay`.
    """
    if (settings.norm_by_task or settings.mean_decay) and not task_sizes:
        raise ValueError("norm_by_task and mean_decay need the sizes of the tasks")
    if settings.how == "closed-form":
        _solve(head, statistics, settings.shrinkage)
        return
    device = head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = make_optimizer(
        [{"params": list(head.parameters())}], settings.optimizer, settings.lr, settings.weight_decay
    )

    def take_step(inputs: Inputs) -> Losses:
        optimizer.zero_grad(set_to_none=True)
        sizes = task_sizes if settings.norm_by_task else None
        normalized_cross_entropy(head(inputs["features"]), inputs["labels"], settings.logit_norm, sizes).backward()
        optimizer.step()
        return {}

    step = Recorded(take_step, device)  # there are thousands of tiny ones
    count, scales, roots = batch_size * settings.ratio, None, statistics.roots()
    if settings.mean_decay and task_sizes:
        ages = torch.cat([torch.full((size,), t) for t, size in enumerate(reversed(task_sizes))]).flip(0)
        scales = (1 - settings.mean_decay * ages / len(task_sizes)).to(device)
    for epoch in range(settings.epochs):
        set_rates(optimizer, cosine(settings.lr, 0.0, epoch, settings.epochs))
        features, labels = statistics.sample(count, generator, scales, roots)
        order = torch.randperm(len(labels), device=device, generator=generator)
        for chunk in order.split(count)[: min(old_classes, settings.steps)]:
            step({"features": features[chunk], "labels": labels[chunk]})
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def _solve(head: nn.Linear, statistics: ClassStatistics, shrinkage: float) -> None:
    """Linear discriminant: W = Σ⁻¹ μ, b = −½ μᵀ Σ⁻¹ μ, with one covariance for all classes."""
    covariance = statistics.class_covariance().double()
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    covariance = (1 - shrinkage) * covariance + (shrinkage * covariance.diagonal().mean() + JITTER) * identity
    means = statistics.class_means().double()
    weight = torch.linalg.solve(covariance, means.T).T
    head.weight.copy_(weight)
    head.bias.copy_(-0.5 * (weight * means).sum(1))

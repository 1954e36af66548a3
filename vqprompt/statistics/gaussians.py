"""What is remembered of a class instead of its images: Gaussians of its features, and the classifier's rebalancing
from them (paper, section 4.3). Any method can use it.

Covariances: `diagonal` (the paper), `full` (one matrix a class), `shared` (one matrix for all, kept incrementally).
With several centroids a class, each has its own mean (and variance), found by k-means.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Covariance = Literal["diagonal", "full", "shared"]
JITTER = 1e-4  # added to every variance, as in the released code


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

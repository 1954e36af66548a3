"""What is remembered of a class instead of its images: Gaussians of its features. Any method can use them.

One class per kind of covariance: `DiagonalGaussians` (the paper), `FullGaussians` (one matrix per class) and
`SharedGaussians` (one matrix for all classes, kept as a sum). With several centroids per class, each has its own mean
(and variance); k-means finds them. When a method's features move, what is remembered moves too (drift.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqprompt.core.errors import UserError
from vqprompt.core.statistics.drift import Drift
from vqprompt.core.statistics.sums import ClassSums, Covariance

Variance = Literal["sample", "population"]
"""Divide the squared residuals by n − 1, or by n."""
CentroidWeights = Literal["size", "equal"]
"""How often pseudo-features come from a centroid: in proportion to its images, or equally often from all that have more
than one image (HiDe-Prompt and VQ-Prompt as published)."""
JITTER = 1e-4  # added to every variance, as in the released code


class ClassStatistics(nn.Module, ABC):
    """Gaussians of the classes learned so far, in the order of the head. As buffers, they are saved with the method."""

    kind: ClassVar[Covariance]
    means: Tensor  # [C, k, D]
    shares: Tensor  # [C, k], how often pseudo-features come from each centroid; 1 in all
    spread: Tensor  # the covariance, in the form that each kind describes
    seen: Tensor  # [C], degrees of freedom of each class's scatter
    doubt: Tensor  # [D, D], sum over classes: covariance of what moves left their means off by; only if measured

    def __init__(
        self,
        width: int,
        centroids: int = 1,
        variance: Variance = "sample",
        weights: CentroidWeights = "size",
        doubts: bool = False,
    ) -> None:
        super().__init__()
        self.centroids, self.variance, self.weights = centroids, variance, weights
        empty = {"diagonal": (0, centroids, width), "full": (0, width, width), "shared": (width, width)}
        self.register_buffer("means", torch.zeros(0, centroids, width))
        self.register_buffer("shares", torch.zeros(0, centroids))
        self.register_buffer("spread", torch.zeros(empty[self.kind]))
        self.register_buffer("seen", torch.zeros(0))
        if doubts:
            self.register_buffer("doubt", torch.zeros(width, width))

    # ------------------------------------------------------------------ what a kind of covariance defines

    @abstractmethod
    def _add_spread(self, residuals: Tensor, belongs: Tensor, sizes: Tensor) -> Tensor | None:
        """Add one class: residuals from the centroids [n, D], membership [k, n], images per centroid [k]. Returns the
        class's row of `spread`, if this kind has one row per class."""

    @abstractmethod
    def _add_squares(self, sums: ClassSums) -> Tensor | None:
        """Add all classes of `sums`. Returns their rows of `spread`, if this kind has one row per class."""

    @abstractmethod
    def _squares(self, known: Tensor, totals: Tensor, counts: Tensor) -> Tensor:
        """What `_add_squares` started from, for classes that are here already [c]; the inverse of it."""

    @abstractmethod
    def shared_covariance(self) -> Tensor:
        """One covariance for all classes [D, D], about each centroid."""

    def _moved_spread(self, matrix: Tensor) -> Tensor:
        """The covariance of points that were multiplied by a matrix. Here: for matrices."""
        return _moved(self.spread, matrix)

    def roots(self) -> Tensor | None:
        """Matrices that turn white noise into each class's noise [C or 1, D, D]; None for diagonal covariances."""
        return None

    # ------------------------------------------------------------------ what all kinds share

    @property
    def width(self) -> int:
        return self.means.shape[-1]

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add new classes by their features [n, D]; their labels continue those of the classes already here."""
        start, counts = len(self.means), torch.bincount(labels).tolist()
        if 0 in counts[start:]:
            raise ValueError(f"class {counts.index(0, start)} has no features to take statistics of")
        means, shares, rows = [self.means], [self.shares], []  # joined once, not class by class
        degrees = torch.tensor(counts[start:]).to(self.seen) - self.centroids
        self.seen = torch.cat([self.seen, degrees.clamp(min=0)])
        for own in features.float()[labels.argsort(stable=True)].split(counts)[start:]:
            member = self._assign(own)
            belongs = F.one_hot(member, self.centroids).to(own).T  # a product adds up in the same order every time
            sizes = belongs.sum(1)
            mean = belongs @ own / sizes.clamp(min=1)[:, None]
            row = self._add_spread(own - mean[member], belongs, sizes)
            means.append(mean[None])
            shares.append(self._shares(sizes)[None])
            rows += [] if row is None else [row[None]]
        self.means, self.shares = torch.cat(means), torch.cat(shares)
        if rows:
            self.spread = torch.cat([self.spread, *rows])

    @torch.no_grad()
    def add_sums(self, sums: ClassSums) -> None:
        """Add classes by their sums, whose labels continue those here, or more images of classes already here. The
        result is that of `add` with all images at once, up to rounding. Not for several centroids per class: k-means
        needs the features themselves."""
        if self.centroids > 1:
            raise ValueError("several centroids per class cannot be computed from sums")
        known = sums.labels[sums.labels < len(self.means)]
        if len(known):
            counts = self.seen[known].double() + 1
            totals = self.means[known, 0].double() * counts[:, None]
            sums.counts[: len(known)] += counts
            if hasattr(self, "doubt"):  # only the old images' part of a mean is in doubt
                kept = torch.ones_like(self.seen).index_put((known,), (counts / sums.counts[: len(known)]).float())
                self.doubt = self.doubt * kept.square().mean()
            sums.totals[: len(known)] += totals
            before = self._squares(known, totals, counts)
            sums.squares[: len(before)] += before
        rows, ones = self._add_squares(sums), torch.ones(len(sums.labels), 1, device=known.device)
        self.means, self.shares, self.seen = (
            _written(old, known, new)
            for old, new in ((self.means, sums.means[:, None]), (self.shares, ones), (self.seen, sums.counts - 1))
        )
        if rows is not None:
            self.spread = _written(self.spread, known, rows)

    def _shares(self, sizes: Tensor) -> Tensor:
        """Weights of a class's centroids, from the number of images of each [k]."""
        if self.weights == "equal":
            several = sizes > 1 if bool((sizes > 1).any()) else sizes > 0  # a class must keep at least one centroid
            return several / several.sum()
        return sizes / sizes.sum()

    def _degrees(self, sizes: Tensor) -> Tensor:
        """The divisor of the squared residuals."""
        return (sizes - int(self.variance == "sample")).clamp(min=1)

    def _assign(self, own: Tensor) -> Tensor:
        """Which centroid each feature of a class belongs to."""
        if self.centroids == 1 or len(own) <= self.centroids:
            return torch.arange(len(own), device=own.device) % self.centroids
        from sklearn.cluster import KMeans

        member = KMeans(self.centroids, n_init=1, random_state=0).fit_predict(own.cpu().numpy())
        return torch.as_tensor(member, dtype=torch.long, device=own.device)

    @torch.no_grad()
    def move(self, drift: Drift) -> None:
        """Move means and covariances to where the features of these classes would be now. If the drift's error was
        measured, the means are in doubt by that much more."""
        if len(self.means):
            self.means = drift.points(self.means)
            if drift.matrix is not None:
                self.spread = self._moved_spread(drift.matrix.to(self.spread))
            if drift.error is not None and hasattr(self, "doubt"):
                doubt = self.doubt if drift.matrix is None else _moved(self.doubt, drift.matrix)
                self.doubt = doubt + len(self.means) * drift.error.to(doubt)

    def class_means(self) -> Tensor:
        """Means of whole classes [C, D], over their centroids."""
        return (self.means * self.shares[..., None]).sum(1)

    def class_covariance(self) -> Tensor:
        """One covariance for all classes [D, D]: within centroids, plus between the centroids of a class, plus the mean
        doubt about where the classes are."""
        apart = (self.means - self.class_means()[:, None]) * self.shares[..., None].sqrt()
        between = torch.einsum("ckd,cke->de", apart, apart) / len(apart)
        within = self.shared_covariance() + (between.diag().diag() if self.kind == "diagonal" else between)
        return within + self.doubt / len(apart) if hasattr(self, "doubt") else within

    def sample(
        self,
        count: int,
        generator: torch.Generator,
        scales: Tensor | None = None,
        roots: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`count` pseudo-features of every class: [C * count, D] and their labels.

        scales: factors of the classes' means [C]. roots: as `roots()` returned them, for callers that sample often.
        labels: classes to draw from instead of all. Not with full covariances: a matrix would be copied for each.
        """
        device = self.means.device
        labels = torch.arange(len(self.means), device=device) if labels is None else labels
        where: tuple[Tensor, ...] = (labels,)
        if self.centroids > 1:
            member = torch.multinomial(self.shares[labels], count, replacement=count > 1, generator=generator)
            where = (labels[:, None], member)
        white = torch.randn(len(labels), count, self.width, device=device, generator=generator)
        roots = self.roots() if roots is None else roots
        # diagonal: in place, because this is the largest tensor here
        drawn = white.mul_(self.spread[where].sqrt()) if roots is None else white @ roots.mT
        means = self.means[where]
        drawn += means if scales is None else means * scales[labels, None, None]
        return drawn.flatten(0, 1), labels.repeat_interleave(count)


class DiagonalGaussians(ClassStatistics):
    """Variances of each centroid: spread [C, k, D]."""

    kind = "diagonal"

    def _add_spread(self, residuals: Tensor, belongs: Tensor, sizes: Tensor) -> Tensor:
        return belongs @ residuals.square() / self._degrees(sizes)[:, None] + JITTER

    def _add_squares(self, sums: ClassSums) -> Tensor:
        scatter = (sums.squares - sums.means.square() * sums.counts[:, None]).clamp(min=0)
        return (scatter / self._degrees(sums.counts)[:, None] + JITTER)[:, None]

    def _squares(self, known: Tensor, totals: Tensor, counts: Tensor) -> Tensor:
        scatter = (self.spread[known, 0].double() - JITTER) * self._degrees(counts)[:, None]
        return scatter + totals.square() / counts[:, None]

    def shared_covariance(self) -> Tensor:
        return torch.diag((self.spread * self.shares[..., None]).sum(1).mean(0))

    def _moved_spread(self, matrix: Tensor) -> Tensor:
        return self.spread @ matrix.square()  # the diagonal of Aᵀ diag(v) A


class FullGaussians(ClassStatistics):
    """One covariance matrix per class: spread [C, D, D]."""

    kind = "full"

    def _add_spread(self, residuals: Tensor, belongs: Tensor, sizes: Tensor) -> Tensor:
        return residuals.T @ residuals / max(len(residuals) - int(self.variance == "sample"), 1)

    def _add_squares(self, sums: ClassSums) -> Tensor:
        scatter = torch.baddbmm(sums.squares, sums.totals[:, :, None], sums.means[:, None], alpha=-1)
        return scatter / self._degrees(sums.counts)[:, None, None]

    def _squares(self, known: Tensor, totals: Tensor, counts: Tensor) -> Tensor:
        scatter = self.spread[known].double() * self._degrees(counts)[:, None, None]
        return scatter + totals[:, :, None] * totals[:, None] / counts[:, None, None]

    def shared_covariance(self) -> Tensor:
        return self.spread.mean(0)

    def roots(self) -> Tensor:
        return _root(self.spread)


class SharedGaussians(ClassStatistics):
    """One scatter matrix for all classes: spread [D, D], a sum over all images. Divided by `seen`: the covariance."""

    kind = "shared"

    def _add_spread(self, residuals: Tensor, belongs: Tensor, sizes: Tensor) -> None:
        self.spread = self.spread + residuals.T @ residuals

    def _add_squares(self, sums: ClassSums) -> None:
        self.spread = (self.spread + (sums.squares - sums.totals.T @ sums.means)).to(self.spread)

    def _squares(self, known: Tensor, totals: Tensor, counts: Tensor) -> Tensor:
        return totals.T @ (totals / counts[:, None])  # their scatter is in `spread` already

    def shared_covariance(self) -> Tensor:
        return self.spread / self.seen.sum().clamp(min=1)

    @property
    def images_per_class(self) -> float:
        return float(self.seen.sum()) / max(len(self.means), 1) + self.centroids

    def roots(self) -> Tensor:
        return _root(self.shared_covariance()[None])


def _written(rows: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """Rows with the first new ones at these places, and the others appended."""
    rows, new = rows.clone(), new.to(rows)
    rows[places] = new[: len(places)]
    return torch.cat([rows, new[len(places) :]])


KINDS: dict[Covariance, type[ClassStatistics]] = {
    kind.kind: kind for kind in (DiagonalGaussians, FullGaussians, SharedGaussians)
}


def _moved(covariance: Tensor, matrix: Tensor) -> Tensor:
    """Covariances [..., D, D] of points that were multiplied by a matrix."""
    matrix = matrix.to(covariance)
    return matrix.T @ covariance @ matrix


def _root(matrix: Tensor) -> Tensor:
    """A factor A with A Aᵀ = matrix + jitter; in double, because few images give a nearly singular covariance."""
    identity = torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
    for jitter in (JITTER, 10 * JITTER, 100 * JITTER):  # after a drift, a covariance may need more of it
        factor, failed = torch.linalg.cholesky_ex(matrix.double() + jitter * identity)
        if not failed.any():
            return factor.float()
    raise UserError(
        "the covariances of some classes are not finite or not positive; use more images or a lower learning rate"
    )

"""The linear discriminant with one covariance for all classes: solved from sums, not trained.

What is notable about this implementation:
- Leaving out one image at a time is exact and cheap. The mean of a group and the common covariance without an image
  follow from those with it by a rank-one update (the formula of Sherman and Morrison), so all images together cost
  little more than one solve.
- All of it is computed in the basis in which the covariance is diagonal, where any shrinkage is a division.
- A class with several modes has a mean for each of them; its score is the log of the average of exp(score of a mode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FAIRNESS = 0.5  # to groups of few images (see `Basis.discriminant`); at 1, their noisy means would win too often
TEMPERATURES = (0.05, 1000.0)


def shrunk(covariance: Array, shrinkage: float) -> Array:
    """The covariance [D, D], mixed with a multiple of the unit matrix that has the same average variance."""
    identity = np.eye(len(covariance))
    level = np.trace(covariance) / len(covariance)
    if level <= 0:  # all images alike
        return identity
    return (1 - shrinkage) * covariance + (shrinkage * level) * identity


def solve_discriminant(covariance: Array, means: Array) -> tuple[Array, Array]:
    """W = μ Σ⁻¹ [C, D] and b = −½ μᵀ Σ⁻¹ μ [C], so that W x + b ranks classes by their distance from x."""
    from scipy.linalg import LinAlgError, cho_factor, cho_solve, lstsq

    try:
        weights = cho_solve(cho_factor(covariance, lower=True), means.T).T
    except LinAlgError:
        weights = lstsq(covariance, means.T)[0].T
    return weights, -0.5 * (means * weights).sum(1)


def join_modes(scores: Array, owners: Array) -> Array:
    """Scores of modes [n, M] to scores of classes [n, C]: log of the average of exp. owners: [M], ascending."""
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    if len(starts) == len(owners):
        return scores
    best = np.maximum.reduceat(scores, starts, axis=1)
    counts = np.diff(starts, append=len(owners))
    with np.errstate(invalid="ignore"):  # a class none of whose modes has an image
        shares = np.add.reduceat(np.exp(scores - np.repeat(best, counts, axis=1)), starts, axis=1)
    return np.where(np.isfinite(best), best + np.log(np.maximum(shares, 1e-30) / counts), best)


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Scores of classes: `features @ weights.T + bias` per mode, then joined per class (see `join_modes`).

    weights: [M, D]. bias: [M]. owners: [M], the class of each mode, ascending.
    """

    weights: Array
    bias: Array
    owners: Array

    def scores(self, features: Array) -> Array:
        """Features [n, D] to scores [n, classes]."""
        return join_modes(features.astype(self.weights.dtype, copy=False) @ self.weights.T + self.bias, self.owners)


@dataclass(frozen=True, eq=False)
class Groups:
    """Sums over groups of images (the modes of all classes): what a discriminant is solved from.

    owners: [M], the class of each group. sums, counts: [M, D], [M], over the images that means are computed from.
    kept_sums, kept_counts: over the images that the covariance is computed from. gram: [D, D], the sum of their outer
    products.
    """

    owners: Array
    sums: Array
    counts: Array
    kept_sums: Array
    kept_counts: Array
    gram: Array

    @classmethod
    def of(cls, features: Array, labels: Array, classes: int) -> Groups:
        """One group per class. features: [n, D]. labels: [n], from 0 to classes - 1."""
        sums = np.zeros((classes, features.shape[1]))
        np.add.at(sums, labels, features)
        counts = np.bincount(labels, minlength=classes)
        return cls(np.arange(classes), sums, counts, sums, counts, features.T @ features)

    def covariance(self) -> Array:
        """Within the groups [D, D]; the unit matrix where no group has two images."""
        if not self.freedom:
            return np.eye(len(self.gram))
        roots = self.kept_sums / np.sqrt(np.maximum(self.kept_counts, 1))[:, None]
        return (self.gram - roots.T @ roots) / self.freedom

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the covariance: all images, less one per group."""
        return int(np.maximum(self.kept_counts - 1, 0).sum())

    @property
    def means(self) -> Array:
        return self.sums / np.maximum(self.counts, 1)[:, None]


@dataclass(frozen=True, eq=False)
class Basis:
    """The directions in which the covariance within groups is diagonal, and its variances there. freedom: its degrees
    of freedom."""

    vectors: Array
    variances: Array
    freedom: int

    @classmethod
    def of(cls, groups: Groups) -> Basis:
        variances, vectors = np.linalg.eigh(groups.covariance())
        return cls(vectors, np.maximum(variances, 0), groups.freedom)

    def shrunk(self, shrinkage: float) -> Array:
        """Variances mixed with their average [D]."""
        level = self.variances.mean()
        if level <= 0:  # all images alike
            return np.ones(len(self.variances))
        return (1 - shrinkage) * self.variances + shrinkage * level

    def whitening(self, shrinkage: float) -> Array:
        """A matrix [D, D]. Features multiplied by it have variance 1 within a group, in every direction."""
        return self.vectors / np.sqrt(np.maximum(self.shrunk(shrinkage), 1e-12))

    def discriminant(self, groups: Groups, shrinkage: float, distance: float = 0.0) -> Discriminant:
        """distance: the average squared distance of images from the mean of their group.

        The mean of few images has an error of distance / count, and is that much further from everything. For that
        reason alone, a class of five images would lose to a class of a hundred. Half of it is given back (`FAIRNESS`).
        """
        means = groups.means @ self.vectors
        scaled = means / self.shrunk(shrinkage)
        bias = -0.5 * (scaled * means).sum(1) + 0.5 * FAIRNESS * distance / np.maximum(groups.counts, 1)
        return Discriminant((scaled @ self.vectors.T).astype(np.float32), bias.astype(np.float32), groups.owners)


# ---------------------------------------------------------------------------------------------- leave one out


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What classifiers answer about images that they have not learned.

    scores: [n, groups]. distance: the average squared distance of images from the mean of their group (see
    `Basis.discriminant`). norms: [n], xᵀ Σ⁻¹ x, with Σ without x.
    """

    scores: Array
    distance: float
    norms: Array


class LeaveOneOut:
    """Each image under a classifier that has not learned it, for any shrinkage.

    With r = x - mean, the covariance without x is the covariance with x minus a multiple of r rᵀ, so the formula of
    Sherman and Morrison gives its inverse. The level that it is shrunk to stays that of all images.

    features: [n, D], of images that are in the groups. own: [n], the group of each. compared: which groups are scored;
    all by default. precision: of what is computed per image; single is enough to choose a shrinkage.
    """

    def __init__(
        self,
        groups: Groups,
        basis: Basis,
        features: Array,
        own: Array,
        compared: Array | None = None,
        precision: type[np.floating[Any]] = np.float64,
    ) -> None:
        self.basis, self.precision = basis, precision
        compared = np.arange(len(groups.owners)) if compared is None else compared
        column = np.full(len(groups.owners), -1)
        column[compared] = np.arange(len(compared))
        self.own = column[own]
        self.counts, self.own_counts, self.kept = groups.counts[compared], groups.counts[own], groups.kept_counts[own]
        x = features @ basis.vectors
        offsets = x - (groups.kept_sums[own] / self.kept[:, None]) @ basis.vectors
        self.means = groups.means[compared] @ basis.vectors
        others = np.maximum(self.own_counts - 1, 1)[:, None]
        without = (self.means[self.own] * self.own_counts[:, None] - x) / others  # the mean of its group without it
        self.x32, self.means32 = x.astype(np.float32), self.means.astype(np.float32)
        self.x, self.offsets, self.without = (a.astype(precision) for a in (x, offsets, without))

    def at(self, shrinkage: float) -> LeftOut:
        freedom = max(self.basis.freedom - 1, 1)
        variances = (self.basis.shrunk(shrinkage) * (max(self.basis.freedom, 1) / freedom)).astype(self.precision)
        share = (1 - shrinkage) * self.kept / np.maximum(self.kept - 1, 1) / freedom  # of r rᵀ in the covariance
        q = self.offsets / variances
        far = (q * self.offsets).sum(1)
        growth = share / np.maximum(1 - share * far, 1e-9)
        along = (q * self.x).sum(1)
        scaled = self.means / variances
        # the two large products, [n, M], in single precision; what they decide does not need more
        crossed = (q.astype(np.float32) @ self.means32.T).astype(np.float64)
        scores = (self.x32 @ scaled.astype(np.float32).T).astype(np.float64) + (growth * along)[:, None] * crossed
        scores -= 0.5 * ((scaled * self.means).sum(1) + growth[:, None] * crossed**2)
        # the distance of images from the mean of their group without them, less the error of that mean
        outside = ((far + growth * far**2) * self.kept / np.maximum(self.kept - 1, 1))[self.kept > 1]
        distance = float(outside.mean()) if len(outside) else 0.0
        scores += 0.5 * FAIRNESS * distance / np.maximum(self.counts, 1)
        # its own group, whose mean is computed without it; the credit makes up for the mean's having one image less
        count = self.own_counts
        credit = 0.5 * distance * (FAIRNESS / count + 1 / np.maximum(count - 1, 1) - 1 / count)
        solved = self.without / variances + (growth * (q * self.without).sum(1))[:, None] * q
        mine = (solved * (self.x - 0.5 * self.without)).sum(1) + credit
        scores[np.arange(len(count)), self.own] = np.where(count > 1, mine, -np.inf)
        norms = (self.x**2 / variances).sum(1) + growth * along**2
        return LeftOut(scores, distance, norms)


# ---------------------------------------------------------------------------------------------- probabilities


def probabilities(scores: Array, temperature: float) -> Array:
    """Scores [n, C] to probabilities."""
    scaled = scores.astype(np.float64) / temperature
    shares: Array = np.exp(scaled - scaled.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def brier(shares: Array, classes: Array) -> float:
    """Average squared error of the probabilities (Brier score). A few confident mistakes do not dominate it."""
    hits = shares[np.arange(len(classes)), classes]
    return float(((shares**2).sum(1) - 2 * hits + 1).mean())


def best_temperature(scores: Array, classes: Array, wrong: float = 0.0, precision: float = 1e-3) -> float:
    """The temperature that makes the true classes most likely. wrong: the share of classes that are wrong themselves;
    otherwise a few wrong labels would lower every probability. precision: of the temperature's logarithm."""
    from scipy.optimize import minimize_scalar

    scores = (scores - scores.max(1, keepdims=True)).astype(np.float32)
    own = scores[np.arange(len(classes)), classes]

    def loss(log_temperature: float) -> float:
        cold = np.float32(np.exp(-log_temperature))
        log_share = own * cold - np.log(np.exp(scores * cold).sum(1))
        if not wrong:
            return -float(log_share.mean())
        return -float(np.log((1 - wrong) * np.exp(log_share) + wrong / scores.shape[1]).mean())

    found = minimize_scalar(loss, bounds=tuple(np.log(TEMPERATURES)), method="bounded", options={"xatol": precision})
    return float(np.exp(found.x))

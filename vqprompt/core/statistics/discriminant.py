"""The linear discriminant with one covariance for all classes: solved from sums, not trained.

What is notable about this implementation:
- It needs few images: the covariance is shrunk towards its diagonal, the means of small classes towards the center.
- All of it is computed in the basis in which the covariance is diagonal, where any shrinkage is a division.
- A class with several modes has a mean for each of them; its score is the log of the average of exp(score of a mode).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PRIOR = 4  # images that the average variance counts as, when a dimension's own is estimated
LEAST_RATIO = 0.02  # how far means differ at least, as a share of the spread within groups
STANDS_OUT = 2.0  # M means vary along the line 1 + this / √M times as much as in the next direction, or more
ALONE = 0.49  # a mean with this share of the variance along a line makes it alone: it is one class, not a kind
TEMPERATURES = (0.05, 1e5)


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
        return join_modes(self.scores_of_modes(features), self.owners)

    def scores_of_modes(self, features: Array) -> Array:
        """Features [n, D] to scores [n, M]."""
        return features.astype(self.weights.dtype, copy=False) @ self.weights.T + self.bias


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
class Means:
    """Means of groups, and where they probably are: nearer to the center of all, the fewer images they come from.

    The mean of n images is off by 1/n of the spread within a group. If true means differ by `ratio` of this spread, the
    best estimate keeps n·ratio / (n·ratio + 1) of an offset from the center (James and Stein). Without this, a class of
    few images is too far away from everything, also from its own images.

    Where classes are of two kinds, such as photographs and drawings, the center of all is like neither, and a small
    class would be moved towards the other kind. So means are moved towards a line through the center instead, along
    which they differ most: each stays at its place on the line. There is none if one class alone would make it.

    means: [M, D]. center: [D]. counts: [M]. distance: the average squared distance of images from the true mean of
    their group; 0 if it is not known, then nothing is shrunk. line: [2, D], the line's direction, and what an offset is
    multiplied by to find its place along the line; 0 without a line.
    """

    means: Array
    center: Array
    counts: Array
    ratio: float
    distance: float
    line: Array

    @classmethod
    def of(cls, means: Array, counts: Array, variances: Array, distance: float) -> Means:
        """means: [M, D], in a basis where the covariance within groups is diagonal. variances: [D]."""
        present = counts > 0
        center, ratio = means[present].mean(0), np.inf
        if distance > 0 and present.sum() > 1:
            between = float(((means[present] - center) ** 2).sum(0) @ (1 / variances)) / (present.sum() - 1)
            ratio = max(between / distance - (1 / counts[present]).mean(), LEAST_RATIO)
        found = cls(means, center, counts, ratio, distance, np.zeros((2, len(center))))
        if distance <= 0:
            return found
        spread = np.sqrt(np.maximum(variances, 1e-12))
        direction, times, largest = principal_direction((found.shrunk[present] - center) / spread)
        if largest < ALONE and times > 1 + STANDS_OUT / np.sqrt(present.sum()):
            return replace(found, line=np.stack([direction * spread, direction / spread]))
        return found

    def reliance(self, counts: Array) -> Array:
        """The share of its offset that the mean of so many images keeps."""
        return 1 / (1 + 1 / (np.maximum(counts, 1) * self.ratio))

    def bonus(self, counts: Array) -> Array:
        """What is added to the scores of groups of so many images, because images are further away from a mean that is
        less certain: their distance grows by its variance, but only the logarithm makes them less likely."""
        variance = self.reliance(counts) / np.maximum(counts, 1)  # of the mean, as a share of that within a group
        return 0.5 * self.distance * (variance - np.log1p(variance))

    @property
    def shrunk(self) -> Array:
        return self.moved(self.means, self.counts, self.center)

    def moved(self, means: Array, counts: Array, center: Array) -> Array:
        """Where means [n, D] of so many images [n] probably are. center: of all, [D] or [n, D]."""
        offsets, kept = means - center, self.reliance(counts)[:, None]
        return center + kept * offsets + (1 - kept) * np.outer(offsets @ self.line[1], self.line[0])


def principal_direction(rows: Array) -> tuple[Array, float, float]:
    """The direction [D] in which rows [n, D] vary most, how many times as much as in the next one, and the largest
    share of one row in it. By orthogonal iteration, which is much faster than to find all directions."""
    offsets = rows - rows.mean(0)
    block = np.random.default_rng(0).normal(size=(rows.shape[1], 4))
    for _ in range(10):
        block = np.linalg.qr(offsets.T @ (offsets @ block))[0]
    variances, turn = np.linalg.eigh((block.T @ offsets.T) @ (offsets @ block))
    direction, most = block @ turn[:, -1], max(float(variances[-1]), 1e-12)
    return direction, most / max(float(variances[-2]), 1e-12), float(((offsets @ direction) ** 2).max()) / most


@dataclass(frozen=True, eq=False)
class Basis:
    """Coordinates in which the covariance within groups is diagonal, whatever its shrinkage.

    vectors: [D, D], features are multiplied by it. variances: [D], without shrinkage; 1 on average. freedom: degrees of
    freedom of the covariance.

    The covariance is shrunk towards its own diagonal, not towards a multiple of the unit matrix, because features vary
    much more in some dimensions than in others.
    """

    vectors: Array
    variances: Array
    freedom: int

    @classmethod
    def of(cls, groups: Groups) -> Basis:
        covariance, freedom = groups.covariance(), groups.freedom
        diagonal, level = np.diag(covariance), np.trace(covariance) / len(covariance)
        if level <= 0:  # all images alike
            return cls(np.eye(len(covariance)), np.ones(len(covariance)), freedom)
        # a variance from few images is unreliable itself, so it is mixed with the average one
        scale = np.sqrt((freedom * diagonal + PRIOR * level) / (freedom + PRIOR))
        variances, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
        return cls(vectors / scale[:, None], np.maximum(variances, 0), freedom)

    def shrunk(self, shrinkage: float) -> Array:
        """Variances [D] of the covariance, mixed with its diagonal."""
        return (1 - shrinkage) * self.variances + shrinkage

    def whitening(self, shrinkage: float) -> Array:
        """A matrix [D, D]. Features multiplied by it have variance 1 within a group, in every direction."""
        return self.vectors / np.sqrt(np.maximum(self.shrunk(shrinkage), 1e-12))

    def discriminant(self, means: Means, shrinkage: float, owners: Array) -> Discriminant:
        """means: of groups. owners: the class of each group."""
        scaled = means.shrunk / self.shrunk(shrinkage)
        bias = means.bonus(means.counts) - 0.5 * (scaled * means.shrunk).sum(1)
        return Discriminant((scaled @ self.vectors.T).astype(np.float32), bias.astype(np.float32), owners)


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


def best_temperature(
    scores: Array, classes: Array, weights: Array | None = None, wrong: float = 0.0, precision: float = 1e-3
) -> float:
    """The temperature that makes the true classes most likely.

    As if one image more had been taken for its strongest rival: otherwise ten right answers out of ten would make every
    further one certain. weights: of the images [n]. wrong: the share of classes that are wrong themselves; otherwise a
    few wrong labels would lower every probability. precision: of the temperature's logarithm.
    """
    weights = np.full(len(scores), 1 / len(scores)) if weights is None else weights / weights.sum()
    one_more = float((weights**2).sum())  # 1 / n, if all weights are the same
    scores = (scores - scores.max(1, keepdims=True)).astype(np.float32)
    rows = np.arange(len(classes))
    own, others = scores[rows, classes], scores.copy()
    others[rows, classes] = -np.inf
    rival = others.max(1)

    def loss(log_temperature: float) -> float:
        cold = np.float32(np.exp(-log_temperature))
        total = np.log(np.exp(scores * cold).sum(1))
        log_share = own * cold - total
        if wrong:
            log_share = np.log((1 - wrong) * np.exp(log_share) + wrong / scores.shape[1])
        return -float(weights @ (log_share + one_more * (rival * cold - total)))

    coldest, hottest = np.log(TEMPERATURES)
    return float(np.exp(_lowest(loss, coldest, hottest, precision)))


def _lowest(loss: Callable[[float], float], low: float, high: float, precision: float) -> float:
    """Where a function with one valley is lowest: golden-section search. (SciPy, which has it, is large to install.)"""
    golden = (5**0.5 - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 2 * precision:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = loss(right)
    return (low + high) / 2

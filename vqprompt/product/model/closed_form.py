"""From sums to a classifier: a linear discriminant with one covariance for all classes, solved, not trained.

What is notable about this implementation:
- Shrinkage and temperature are chosen, and accuracy is measured, by leaving out one image at a time. The class mean and
  the common covariance without an image follow from those with it by a rank-one update, so all images together cost
  little more than one solve. No image is read again, and the finished classifier learns from all of them.
- All of it is computed in the basis in which the covariance is diagonal, where any shrinkage is a division.
- What is searched and tested is bounded (`SEARCHED`, `TESTED`, `COMPARED`), so that one more class costs little more
  with many classes than with few. All choices depend only on what is remembered, not on the order of teaching.
- A class with several modes has a mean for each of them; its score is the log of the average of exp(score of a mode).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vqprompt.product.model.records import STEP, ClassRecord

# Accuracy is measured on TESTED images, spread evenly over the classes. With many classes it is measured on fewer, so
# that images times classes stays below COMPARED, but on one of each class, or of TESTED classes where there are more.
TESTED = 2000
COMPARED = 400_000
SEARCHED = 128  # classes that take part in choosing the shrinkage, with at most 5 × 128 images in all
FAIRNESS = 0.5  # to classes of few images (see `Basis.discriminant`); at 1, their noisy means would win too often
SHRINKAGES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Scores of classes: `features @ weights.T + bias` per mode, then joined per class (see `of_classes`).

    weights: [M, D]. bias: [M]. owners: [M], the class of each mode, ascending.
    """

    weights: np.ndarray
    bias: np.ndarray
    owners: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Features [n, D] to scores [n, classes]."""
        return of_classes(features.astype(self.weights.dtype, copy=False) @ self.weights.T + self.bias, self.owners)


def of_classes(scores: np.ndarray, owners: np.ndarray) -> np.ndarray:
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
class Groups:
    """Sums over the modes of all classes: what a classifier is solved from.

    owners: [M]. sums, counts: [M, D], [M], over the images that means are computed from. kept_sums, kept_counts: over
    the images that the covariance is computed from. gram: [D, D], the sum of their outer products.
    """

    owners: np.ndarray
    sums: np.ndarray
    counts: np.ndarray
    kept_sums: np.ndarray
    kept_counts: np.ndarray
    gram: np.ndarray

    @classmethod
    def of(cls, records: Sequence[ClassRecord], gram: np.ndarray) -> Groups:
        """gram: in fixed point, see `gram_of`."""
        owners, sums, counts, kept_sums, kept_counts = [], [], [], [], []
        for number, record in enumerate(records):
            last = int(record.modes.max(initial=0))
            for mode in range(last + 1):
                rows = record.kept[record.modes == mode] if last else record.kept
                kept_sums.append(rows.sum(0, dtype=np.int64))
                kept_counts.append(len(rows))
                sums.append(kept_sums[-1] if last else record.total)
                counts.append(len(rows) if last else record.count)
                owners.append(number)
        return cls(
            np.array(owners), np.array(sums) * STEP, np.array(counts), np.array(kept_sums) * STEP,
            np.array(kept_counts), gram * STEP**2,
        )  # fmt: skip

    def covariance(self) -> np.ndarray:
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
    def means(self) -> np.ndarray:
        return self.sums / np.maximum(self.counts, 1)[:, None]


@dataclass(frozen=True, eq=False)
class Basis:
    """The directions in which the covariance within groups is diagonal, and its variances there. freedom: its degrees
    of freedom."""

    vectors: np.ndarray
    variances: np.ndarray
    freedom: int

    @classmethod
    def of(cls, groups: Groups) -> Basis:
        variances, vectors = np.linalg.eigh(groups.covariance())
        return cls(vectors, np.maximum(variances, 0), groups.freedom)

    def shrunk(self, shrinkage: float) -> np.ndarray:
        """Variances mixed with their average [D]."""
        level = self.variances.mean()
        if level <= 0:  # all images alike
            return np.ones(len(self.variances))
        return (1 - shrinkage) * self.variances + shrinkage * level

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
class Trials:
    """Images to test with. features: [n, D]. names: uint64 [n]. classes: [n]. groups: [n], the mode of the class."""

    features: np.ndarray
    names: np.ndarray
    classes: np.ndarray
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, records: Sequence[ClassRecord], chosen: Sequence[int], most: int | None = None) -> Trials:
        """The first kept images of the chosen classes, equally many of each; none of a class with a single image. Of
        images that a network was trained on, none if the class has others."""
        most = min(TESTED, COMPARED // max(len(chosen), 1)) if most is None else most
        each = max(1, most // max(len(chosen), 1))
        starts = np.cumsum([0, *(int(r.modes.max(initial=0)) + 1 for r in records)])
        parts = []
        for c in chosen:
            r = records[c]
            rows = np.flatnonzero(r.unseen) if r.unseen.any() else np.arange(len(r.kept))
            rows = rows[:each] if r.count > 1 else rows[:0]  # a mode always has others: at least SMALLEST images
            parts.append((r.kept[rows], r.ids[rows], np.full(len(rows), c), starts[c] + r.modes[rows]))
        kept, names, classes, groups = (np.concatenate(p) for p in zip(*parts, strict=True))
        return cls(kept * STEP, names, classes, groups)


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What classifiers answer about images that they have not learned.

    scores: [n, groups]. distance: the average squared distance of images from the mean of their group (see
    `Basis.discriminant`). norms: [n], xᵀ Σ⁻¹ x, with Σ without x.
    """

    scores: np.ndarray
    distance: float
    norms: np.ndarray


class LeaveOneOut:
    """Each trial image under a classifier that has not learned it, for any shrinkage.

    With r = x - mean, the covariance without x is the covariance with x minus a multiple of r rᵀ, so the formula of
    Sherman and Morrison gives its inverse. compared: which groups are scored; all by default. precision: of what is
    computed per image; single is enough to choose a shrinkage.
    """

    def __init__(
        self,
        groups: Groups,
        basis: Basis,
        trials: Trials,
        compared: np.ndarray | None = None,
        precision: type[np.floating] = np.float64,
    ) -> None:
        self.basis, self.own = basis, trials.groups
        every = np.arange(len(groups.owners))
        self.compared = every if compared is None else compared
        self.column = np.full(len(every), -1)
        self.column[self.compared] = np.arange(len(self.compared))
        self.counts, self.kept = groups.counts, groups.kept_counts[trials.groups]
        kept_means = groups.kept_sums[self.own] / self.kept[:, None]
        self.x = trials.features @ basis.vectors
        self.offsets = self.x - kept_means @ basis.vectors
        self.means = groups.means[self.compared] @ basis.vectors
        self.x32, self.means32 = self.x.astype(np.float32), self.means.astype(np.float32)
        own_counts = groups.counts[self.own]
        self.without = (self.means[self.column[self.own]] * own_counts[:, None] - self.x) / np.maximum(
            own_counts - 1, 1
        )[:, None]  # the mean of its group without it
        self.x, self.offsets, self.without = (a.astype(precision) for a in (self.x, self.offsets, self.without))
        self.precision = precision

    def at(self, shrinkage: float) -> LeftOut:
        freedom = max(self.basis.freedom - 1, 1)
        variances = (self.basis.shrunk(shrinkage) * (max(self.basis.freedom, 1) / freedom)).astype(self.precision)
        share = (1 - shrinkage) * self.kept / np.maximum(self.kept - 1, 1) / freedom  # of r rᵀ in the covariance
        q = self.offsets / variances
        far = (q * self.offsets).sum(1)
        growth = share / np.maximum(1 - share * far, 1e-9)
        along = (q * self.x).sum(1)
        scaled = self.means / variances
        # the two large products, [n, G], in single precision; what they decide does not need more
        crossed = (q.astype(np.float32) @ self.means32.T).astype(np.float64)
        scores = (self.x32 @ scaled.astype(np.float32).T).astype(np.float64) + (growth * along)[:, None] * crossed
        scores -= 0.5 * ((scaled * self.means).sum(1) + growth[:, None] * crossed**2)
        # the distance of images from the mean of their group without them, less the error of that mean
        outside = ((far + growth * far**2) * self.kept / np.maximum(self.kept - 1, 1))[self.kept > 1]
        distance = float(outside.mean()) if len(outside) else 0.0
        scores += 0.5 * FAIRNESS * distance / np.maximum(self.counts[self.compared], 1)
        # its own group, whose mean is computed without it; the credit makes up for the mean's having one image less
        count = self.counts[self.own]
        credit = 0.5 * distance * (FAIRNESS / count + 1 / np.maximum(count - 1, 1) - 1 / count)
        solved = self.without / variances + (growth * (q * self.without).sum(1))[:, None] * q
        mine = (solved * (self.x - 0.5 * self.without)).sum(1) + credit
        scores[np.arange(len(count)), self.column[self.own]] = np.where(count > 1, mine, -np.inf)
        norms = (self.x**2 / variances).sum(1) + growth * along**2
        return LeftOut(scores, distance, norms)


def spread_evenly(count: int, most: int) -> list[int]:
    """All numbers below `count`, or `most` of them at equal distances."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()


def choose_shrinkage(records: Sequence[ClassRecord], groups: Groups, basis: Basis) -> float:
    """The shrinkage under which images that were left out are recognized best."""
    chosen = spread_evenly(len(records), SEARCHED)
    trials = Trials.of(records, chosen, SEARCHED * 5)
    if len(chosen) < 2 or not len(trials) or groups.kept_counts.max() < 2:
        return 0.5  # nothing to choose by
    place = np.full(len(records), -1)
    place[chosen] = np.arange(len(chosen))
    compared = np.flatnonzero(place[groups.owners] >= 0)
    owners, classes = place[groups.owners[compared]], place[trials.classes]
    left_out = LeaveOneOut(groups, basis, trials, compared, np.float32)
    losses = np.full(len(SHRINKAGES), np.inf)

    def best_with(places: Sequence[int]) -> int:
        """The best of all that were tried, after trying these."""
        for i in places:
            scores = of_classes(left_out.at(SHRINKAGES[i]).scores, owners)
            losses[i] = brier(scores, classes, best_temperature(scores, classes, 9, np.float32))
        return int(np.argmin(losses))

    best = best_with(range(1, len(SHRINKAGES), 2))  # every other one, then the neighbours of the best
    return SHRINKAGES[best_with([i for i in (best - 1, best + 1) if i < len(SHRINKAGES)])]


def log_likelihood(scores: np.ndarray, classes: np.ndarray, temperature: float) -> float:
    """Average log-probability of the true classes; the largest score of each row is 0."""
    scaled = scores / scores.dtype.type(temperature)
    return float((scaled[np.arange(len(classes)), classes] - np.log(np.exp(scaled).sum(1))).mean())


def brier(scores: np.ndarray, classes: np.ndarray, temperature: float) -> float:
    """Average squared error of the probabilities (Brier score). A few confident mistakes do not dominate it."""
    shares = probabilities(scores, temperature)
    shares[np.arange(len(classes)), classes] -= 1
    return float((shares**2).sum(1).mean())


def probabilities(scores: np.ndarray, temperature: float) -> np.ndarray:
    scaled = scores.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def best_temperature(
    scores: np.ndarray, classes: np.ndarray, rounds: int = 20, precision: type[np.floating] = np.float64
) -> float:
    """The temperature that makes the true classes most likely. Golden section on its logarithm."""
    scores = (scores - scores.max(1, keepdims=True)).astype(precision)
    low, high, ratio = np.log(0.05), np.log(1000.0), (5**0.5 - 1) / 2

    def loss(t: float) -> float:
        return -log_likelihood(scores, classes, float(np.exp(t)))

    a, b = high - ratio * (high - low), low + ratio * (high - low)
    loss_a, loss_b = loss(a), loss(b)
    for _ in range(rounds):
        if loss_a < loss_b:
            high, b, loss_b = b, a, loss_a
            a = high - ratio * (high - low)
            loss_a = loss(a)
        else:
            low, a, loss_a = a, b, loss_b
            b = low + ratio * (high - low)
            loss_b = loss(b)
    return float(np.exp((low + high) / 2))

"""From sums to a classifier: a linear discriminant with one covariance for all classes, solved, not trained.

What is notable about this implementation:
- Shrinkage and temperature are chosen, and accuracy is measured, by leaving out one image at a time: its class mean and
  the common covariance without it follow from those with it by a rank-one update, so all images cost little more than
  one solve. No image is read again, and the finished classifier learns from all of them.
- What is searched and tested is bounded (`SEARCHED`, `TESTED`), so that one more class costs the same at any number of
  classes. All choices depend on what is remembered alone, not on the order in which it came.
- A class with several modes has a mean for each of them; its score is the log of the average of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from vqprompt.model.records import STEP, ClassRecord

TESTED = 4000  # images that are classified to measure accuracy; spread evenly over the classes
SEARCHED = 200  # classes that take part in choosing the shrinkage
SHRINKAGES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Scores of classes: `features @ weights.T + bias` per mode, then the log of the average over a class's modes.

    weights: [M, D]. bias: [M]. owners: [M], the class of each mode, ascending.
    """

    weights: np.ndarray
    bias: np.ndarray
    owners: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Features [n, D] to scores [n, classes]."""
        return of_classes(features.astype(self.weights.dtype, copy=False) @ self.weights.T + self.bias, self.owners)


def of_classes(scores: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Scores of modes [n, M] to scores of classes [n, C]. owners: [M], ascending."""
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

    def take(self, chosen: np.ndarray) -> Groups:
        """Some groups alone; the covariance stays that of all."""
        return Groups(
            self.owners[chosen], self.sums[chosen], self.counts[chosen], self.kept_sums, self.kept_counts, self.gram
        )

    def covariance(self) -> np.ndarray:
        """Within the groups [D, D]; the unit matrix where no group has two images."""
        freedom = int(np.maximum(self.kept_counts - 1, 0).sum())
        if not freedom:
            return np.eye(len(self.gram))
        roots = self.kept_sums / np.sqrt(np.maximum(self.kept_counts, 1))[:, None]
        return (self.gram - roots.T @ roots) / freedom

    def discriminant(self, shrinkage: float, distance: float = 0.0) -> Discriminant:
        """distance: the average squared distance of images from the mean of their group.

        The mean of few images is itself off by distance / count, and lies that much further from everything. Without a
        correction, a class of five images would lose to one of a hundred for that reason alone.
        """
        factor = cho_factor(shrunk(self.covariance(), shrinkage), lower=True)
        means = self.sums / np.maximum(self.counts, 1)[:, None]
        weights = cho_solve(factor, means.T).T
        bias = -0.5 * (weights * means).sum(1) + 0.5 * distance / np.maximum(self.counts, 1)
        return Discriminant(weights.astype(np.float32), bias.astype(np.float32), self.owners)


def shrunk(covariance: np.ndarray, shrinkage: float) -> np.ndarray:
    """A mixture with the unit matrix of the same average variance."""
    level = np.trace(covariance) / len(covariance)
    if level <= 0:  # all images alike
        return np.eye(len(covariance))
    return (1 - shrinkage) * covariance + (shrinkage * level) * np.eye(len(covariance))


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
    def of(cls, records: Sequence[ClassRecord], chosen: Sequence[int], most: int = TESTED) -> Trials:
        """The first kept images of the chosen classes, equally many of each; none of a class with a single image."""
        each = max(1, most // max(len(chosen), 1))
        starts = np.cumsum([0, *(int(r.modes.max(initial=0)) + 1 for r in records)])
        parts = []
        for c in chosen:
            r = records[c]
            n = min(each, len(r.kept)) if r.count > 1 else 0  # modes have at least SMALLEST images
            parts.append((r.kept[:n], r.names[:n], np.full(n, c), starts[c] + r.modes[:n]))
        kept, names, classes, groups = (np.concatenate(p) for p in zip(*parts, strict=True))
        return cls(kept * STEP, names, classes, groups)


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What classifiers that have not learned an image say about it.

    scores: [n, groups]. distance: the average squared distance of images from the mean of their group (see
    `Groups.discriminant`). norms: [n], xᵀ Σ⁻¹ x without x.
    """

    scores: np.ndarray
    distance: float
    norms: np.ndarray


def leave_one_out(
    groups: Groups, trials: Trials, shrinkage: float, compared: np.ndarray | None = None, want_norms: bool = False
) -> LeftOut:
    """Each trial image under a classifier that has not learned it.

    With r = x - mean, the covariance without x is the one with it less a multiple of r rᵀ, so its inverse is known by
    Sherman and Morrison's formula. compared: which groups are scored; all of them by default.
    """
    part = groups if compared is None else groups.take(compared)
    freedom = max(int(np.maximum(groups.kept_counts - 1, 0).sum()), 1)
    solid = shrunk(groups.covariance() * (freedom / max(freedom - 1, 1)), shrinkage)
    x, own = trials.features, trials.groups
    kept = groups.kept_counts[own]
    offsets = x - groups.kept_sums[own] / kept[:, None]
    share = (1 - shrinkage) * kept / np.maximum(kept - 1, 1) / max(freedom - 1, 1)  # of r rᵀ in the covariance
    factor = cho_factor(solid, lower=True)
    means = part.sums / np.maximum(part.counts, 1)[:, None]
    solved_means = cho_solve(factor, means.T).T  # [G, D]
    q = cho_solve(factor, offsets.T).T  # [n, D]
    growth = share / np.maximum(1 - share * (q * offsets).sum(1), 1e-6)
    along = (q * x).sum(1)  # [n]
    crossed = q @ means.T  # [n, G]
    scores = x @ solved_means.T + (growth * along)[:, None] * crossed
    scores -= 0.5 * ((solved_means * means).sum(1) + growth[:, None] * crossed**2)
    # how far images lie from the mean of their group when it has not learned them: squared, and without the mean's error
    far = (q * offsets).sum(1)
    far = (far + growth * far**2) * kept / np.maximum(kept - 1, 1)
    distance = float(far[kept > 1].mean()) if (kept > 1).any() else 0.0
    scores += 0.5 * distance / np.maximum(part.counts, 1)
    # the image's own group, whose mean loses it too
    counts = groups.counts[own]
    without = (groups.sums[own] - x) / np.maximum(counts - 1, 1)[:, None]
    solved = cho_solve(factor, without.T).T + (growth * (q * without).sum(1))[:, None] * q
    mine = (solved * x).sum(1) - 0.5 * (solved * without).sum(1) + 0.5 * distance / np.maximum(counts - 1, 1)
    column = np.full(len(groups.owners), -1)
    column[np.arange(len(groups.owners)) if compared is None else compared] = np.arange(len(part.owners))
    scores[np.arange(len(x)), column[own]] = np.where(counts > 1, mine, -np.inf)
    norms = (x * cho_solve(factor, x.T).T).sum(1) + growth * along**2 if want_norms else np.zeros(len(x))
    return LeftOut(scores.astype(np.float32), distance, norms)


def choose_shrinkage(records: Sequence[ClassRecord], groups: Groups) -> float:
    """The shrinkage under which most images that were left out are recognized, or nearly so."""
    chosen = np.unique(np.linspace(0, len(records) - 1, min(len(records), SEARCHED)).astype(int))
    trials = Trials.of(records, chosen, SEARCHED * 10)
    if len(chosen) < 2 or not len(trials) or groups.kept_counts.max() < 2:
        return 0.5  # nothing to choose by
    place = np.full(len(records), -1)
    place[chosen] = np.arange(len(chosen))
    compared = np.flatnonzero(place[groups.owners] >= 0)
    owners = place[groups.owners[compared]]
    losses = []
    for shrinkage in SHRINKAGES:
        scores = of_classes(leave_one_out(groups, trials, shrinkage, compared).scores, owners)
        losses.append(brier(scores, place[trials.classes], best_temperature(scores, place[trials.classes])))
    return SHRINKAGES[int(np.argmin(losses))]


def log_likelihood(scores: np.ndarray, classes: np.ndarray, temperature: float) -> float:
    """Average log-probability of the true classes."""
    scaled = scores / temperature
    top = scaled.max(1)
    return float((scaled[np.arange(len(classes)), classes] - top - np.log(np.exp(scaled - top[:, None]).sum(1))).mean())


def brier(scores: np.ndarray, classes: np.ndarray, temperature: float) -> float:
    """Average squared error of the probabilities; counts what is right and how sure, and lone outliers hardly."""
    shares = probabilities(scores, temperature)
    shares[np.arange(len(classes)), classes] -= 1
    return float((shares**2).sum(1).mean())


def probabilities(scores: np.ndarray, temperature: float) -> np.ndarray:
    scaled = scores.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def best_temperature(scores: np.ndarray, classes: np.ndarray) -> float:
    """The temperature that makes the true classes most likely. Golden section on its logarithm."""
    scores = scores.astype(np.float64)
    low, high, ratio = np.log(0.05), np.log(1000.0), (5**0.5 - 1) / 2

    def loss(t: float) -> float:
        return -log_likelihood(scores, classes, float(np.exp(t)))

    a, b = high - ratio * (high - low), low + ratio * (high - low)
    loss_a, loss_b = loss(a), loss(b)
    for _ in range(20):
        if loss_a < loss_b:
            high, b, loss_b = b, a, loss_a
            a = high - ratio * (high - low)
            loss_a = loss(a)
        else:
            low, a, loss_a = a, b, loss_b
            b = low + ratio * (high - low)
            loss_b = loss(b)
    return float(np.exp((low + high) / 2))

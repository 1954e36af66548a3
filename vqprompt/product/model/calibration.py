"""Reliable percentages, and which images are like no class.

- One temperature divides the scores, so that of the answers given with 80 %, about 80 % are right. It is fitted to
  images left out one at a time, every class counting the same.
- How familiar an image looks is a weighted sum of two numbers, each in units of its own spread over known images:
  certainty, the negative entropy of the probabilities (low between classes), and nearness: how much nearer an image is
  to its class than to a class that was never taught, which may be anywhere (low far away from all classes). Each misses
  what the other finds: with certainty alone, a bird is taken for a drawing; with nearness alone, an unknown drawing is
  taken for a known one.
- The weights are near the best of a grid on held-out training images (`benchmarks/trust_cub.py --parts choose`;
  docs/trust.md says how near). They are kept in a model's file, so that old files give the same answers.
- The threshold accepts 95 % of known images, also if there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vqprompt.core.metrics import calibration_error, reliability
from vqprompt.core.statistics.discriminant import (
    Array,
    Basis,
    Discriminant,
    Groups,
    LeaveOneOut,
    Means,
    best_temperature,
    join_modes,
    probabilities,
)
from vqprompt.product.model.closed_form import TESTED, Trials, choose_shrinkage, groups_of, spread_evenly
from vqprompt.product.model.counterexamples import solve_counterexamples
from vqprompt.product.model.records import ClassRecord

ACCEPTED = 0.95  # share of known images that are not called unknown
BINS = 15
LEAST_SPREAD = 0.05  # of certainty: if all known images are certain, 99 % must not be far from 100 %


@dataclass(frozen=True, eq=False)
class Background:
    """How far images are from the center of all classes, as a class that was never taught would be.

    Such a class is anywhere around the center, as far away as taught classes are, so the covariance of its images is
    1 + ratio times the covariance within a class (see `Means`). The squared distance from it, less xᵀ Σ⁻¹ x, is
    xᵀ matrix x + vector x + constant. matrix: [D, D]. vector: [D].
    """

    matrix: Array
    vector: Array
    constant: float

    @classmethod
    def of(cls, basis: Basis, shrinkage: float, means: Means) -> Background:
        scaled, share = basis.vectors / basis.shrunk(shrinkage), 1 / (1 + means.ratio)
        center = scaled @ means.center  # times the inverse of the covariance
        constant = share * float((means.center**2 / basis.shrunk(shrinkage)).sum())
        return cls(
            ((share - 1) * (scaled @ basis.vectors.T)).astype(np.float32), (-2 * share * center).astype(np.float32),
            constant,
        )  # fmt: skip

    def scores(self, features: Array) -> Array:
        x = features.astype(np.float32, copy=False)
        return ((x @ self.matrix) * x).sum(1) + x @ self.vector + self.constant


@dataclass(frozen=True)
class Weighing:
    """How certainty and nearness make familiarity.

    certainty: "entropy" of all probabilities, or "largest" of them. nearness: its weight; that of certainty is 1. far,
    steep: where nearness is more than `far` spreads below average, the part beyond gets the additional weight `steep`,
    so that no certainty can make up for it.
    """

    certainty: str = "entropy"
    nearness: float = 1.0
    far: float = 4.0
    steep: float = 5.0


@dataclass(frozen=True)
class Calibration:
    """certainty, nearness: their average and spread over known images. threshold: the familiarity that 95 % of known
    images exceed."""

    temperature: float
    certainty: tuple[float, float]
    nearness: tuple[float, float]
    threshold: float
    weighing: Weighing = field(default_factory=Weighing)


def familiarity(shares: Array, nearness: Array, calibration: Calibration) -> Array:
    """How much each image looks like something known [n]. shares: probabilities [n, C]. nearness: [n]."""
    weighing = calibration.weighing
    (mean_certainty, spread_certainty), (mean_nearness, spread_nearness) = calibration.certainty, calibration.nearness
    certain = (certainty_of(shares, weighing.certainty) - mean_certainty) / spread_certainty
    near = (nearness - mean_nearness) / spread_nearness
    return certain + weighing.nearness * near + weighing.steep * np.minimum(near + weighing.far, 0)


def certainty_of(shares: Array, kind: str) -> Array:
    """Probabilities [n, C] to certainty [n]: the negative entropy, or the logarithm of the largest."""
    if kind == "largest":
        return np.log(np.maximum(shares.max(1), 1e-12))
    return (shares * np.log(np.maximum(shares, 1e-12))).sum(1)


@dataclass(frozen=True, eq=False)
class Solved:
    """Everything that follows from what is remembered. right, tested: images per class [C], left out one at a time."""

    discriminant: Discriminant
    background: Background
    shrinkage: float
    calibration: Calibration
    right: Array
    tested: Array
    calibration_error: tuple[float, float]  # without and with the temperature
    against: Discriminant | None


@dataclass(frozen=True, eq=False)
class Sample:
    """Images under classifiers that have not learned them. scores: [n, C]. nearness: [n]. classes: [n]. weights: [n],
    so that every class counts the same. means: of all groups. distance: see `LeftOut`."""

    scores: Array
    nearness: Array
    classes: Array
    weights: Array
    means: Means
    distance: float

    @classmethod
    def of(cls, left_out: LeaveOneOut, shrinkage: float, classes: Array, weights: Array) -> Sample:
        seen = left_out.at(shrinkage)
        scores = join_modes(seen.scores, left_out.groups.owners)
        nearness = seen.from_center / (1 + seen.means.ratio) - seen.norms + 2 * scores.max(1)
        return cls(scores, nearness * left_out.stretch(shrinkage), classes, weights, seen.means, seen.distance)


def solve(records: Sequence[ClassRecord], gram: Array, against: ClassRecord | None = None) -> Solved:
    """records: the classes, in the order of their scores. gram: over all of them (see `gram_of`). against:
    counterexamples."""
    groups = groups_of(records, gram)
    basis = Basis.of(groups)
    shrinkage = choose_shrinkage(records, groups, basis)
    trials = Trials.of(records, spread_evenly(len(records), TESTED))
    right, tested = np.zeros(len(records), int), np.zeros(len(records), int)
    if not len(trials):  # one image per class: nothing can be left out
        calibration = Calibration(_temperature_untested(groups), (0.0, 1.0), (0.0, 1.0), -np.inf)
        means = Means.of(groups.means @ basis.vectors, groups.counts, basis.shrunk(shrinkage), 0.0)
        background = Background.of(basis, shrinkage, means)
        discriminant = basis.discriminant(groups, shrinkage)
        return Solved(
            discriminant, background, shrinkage, calibration, right, tested, (np.nan, np.nan),
            None if against is None else solve_counterexamples(against, basis, shrinkage, means),
        )  # fmt: skip
    np.add.at(tested, trials.classes, 1)
    left_out = LeaveOneOut(groups, basis, trials.features, trials.groups)
    sample = Sample.of(left_out, shrinkage, trials.classes, 1 / tested[trials.classes])
    np.add.at(right, trials.classes, sample.scores.argmax(1) == trials.classes)
    calibration = _calibrate(sample)
    before, after = (
        calibration_error_of(probabilities(sample.scores, t), sample.classes) for t in (1.0, calibration.temperature)
    )
    discriminant = basis.discriminant(groups, shrinkage, sample.distance)
    background = Background.of(basis, shrinkage, sample.means)
    return Solved(
        discriminant, background, shrinkage, calibration, right, tested, (before, after),
        None if against is None else solve_counterexamples(against, basis, shrinkage, sample.means),
    )  # fmt: skip


def _calibrate(sample: Sample) -> Calibration:
    weights = sample.weights / sample.weights.sum()
    temperature = best_temperature(sample.scores, sample.classes, weights) if sample.scores.shape[1] > 1 else 1.0
    shares = probabilities(sample.scores, temperature)

    def mean_and_spread(values: Array, least: float) -> tuple[float, float]:
        mean = float(values @ weights)
        return mean, max(float(np.sqrt((values - mean) ** 2 @ weights)), least)

    calibration = Calibration(
        temperature, mean_and_spread(certainty_of(shares, Weighing().certainty), LEAST_SPREAD),
        mean_and_spread(sample.nearness, 1e-9), 0.0,
    )  # fmt: skip
    values = familiarity(shares, sample.nearness, calibration)
    return replace(calibration, threshold=exceeded_by(values, weights, ACCEPTED))


def exceeded_by(values: Array, weights: Array, share: float) -> float:
    """The number that this share of further values will probably exceed. weights: of the values; 1 in all."""
    order, count = np.argsort(values, kind="stable"), 1 / float((weights**2).sum())
    places = np.cumsum(weights[order]) * (count / (count + 1))  # a further value is below the i-th of n in i / (n + 1)
    if 1 - share >= places[0]:
        return float(np.interp(1 - share, places, values[order]))
    # too few values: what a normal distribution with their mean and spread makes likely
    mean = float(values @ weights)
    spread = np.sqrt((values - mean) ** 2 @ weights * (count + 1) / (count - 1)) if count > 1 else 0.0
    return float(min(values.min(), mean + student_quantile(max(count - 1, 1), 1 - share) * spread))


def student_quantile(freedom: float, share: float) -> float:
    """Of Student's t-distribution: with t = sqrt(freedom) tan(angle), angles have the density cos ** (freedom - 1)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 4097)
    below = np.cumsum([0.0, *np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)])
    return float(freedom**0.5 * np.tan(np.interp(share, below / below[-1], angles)))


def _temperature_untested(groups: Groups) -> float:
    """If no image can be left out: half the average squared distance between class means."""
    means = groups.sums / np.maximum(groups.counts, 1)[:, None]
    return max(float(means.var(0).sum()), 1e-6)


def calibration_error_of(shares: Array, classes: Array) -> float:
    """How far the largest of the probabilities [n, C] is from the share of right answers."""
    return calibration_error(reliability(shares.max(1), shares.argmax(1) == classes, BINS))

"""Reliable percentages, and which images are like no class.

- One temperature divides the scores, so that of the answers given with 80 %, about 80 % are right. It is fitted to
  images left out one at a time, every class counting the same.
- How familiar an image looks is a weighted sum of two numbers, each in units of its own spread over known images:
  certainty, the negative entropy of the probabilities (low between classes), and nearness: how much nearer an image is
  to its class than to a class that was never taught, which may be anywhere (low far away from all classes). Each misses
  what the other finds: with certainty alone, a bird is taken for a drawing; with nearness alone, an unknown drawing is
  taken for a known one.
- Beside them counts the world (core/statistics/world.py): an image that is nearer to something ordinary that was never
  taught than to any taught class is less familiar. What the taught classes stand for themselves is no rival.
- The weights are the best of a grid on held-out training images (`benchmarks/quality.py --parts choose`). They are kept
  in a model's file, so that old files give the same answers.
- The threshold accepts 95 % of known images, also if there are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from vqprompt.core.metrics import balanced_interval, calibration_error, reliability
from vqprompt.core.statistics.discriminant import (
    Array,
    Basis,
    Discriminant,
    Means,
    best_temperature,
    join_modes,
    probabilities,
)
from vqprompt.core.statistics.leave_one_out import LeaveOneOut, LeftOut
from vqprompt.core.statistics.world import World
from vqprompt.product.model.closed_form import (
    TESTED,
    Trials,
    choose_shrinkage,
    counterexample_means,
    groups_of,
    spread_evenly,
)
from vqprompt.product.model.records import ClassRecord

REPLACED = 0.05  # share of a class's left-out images that a mean of the world must win, so that the class replaces it
ACCEPTED = 0.95  # share of known images that are not called unknown
BINS = 15
LEAST_SPREAD = 0.05  # of certainty: if all known images are certain, 99 % must not be far from 100 %


@dataclass(frozen=True, eq=False)
class Background:
    """How far images are from the center of all classes, as a class that was never taught would be.

    Such a class is anywhere around the center, as far away as taught classes are, so the covariance of its images is
    1 + ratio times the covariance within a class (see `Means`). The squared distance from it, less xᵀ Σ⁻¹ x, is
    xᵀ matrix x + vector x + constant. matrix: [D, D]. vector: [D]. share: 1 / (1 + ratio); matrix is (share - 1) Σ⁻¹.
    """

    matrix: Array
    vector: Array
    constant: float
    share: float = 0.0

    @classmethod
    def of(cls, basis: Basis, shrinkage: float, means: Means) -> Background:
        scaled, share = basis.vectors / basis.shrunk(shrinkage), float(1 / (1 + means.ratio))
        center = scaled @ means.center  # times the inverse of the covariance
        constant = share * float((means.center**2 / basis.shrunk(shrinkage)).sum())
        return cls(
            ((share - 1) * (scaled @ basis.vectors.T)).astype(np.float32), (-2 * share * center).astype(np.float32),
            constant, share,
        )  # fmt: skip

    def scores(self, features: Array) -> Array:
        x = features.astype(np.float32, copy=False)
        return ((x @ self.matrix) * x).sum(1) + x @ self.vector + self.constant


@dataclass(frozen=True, eq=False)
class Rivals:
    """What an image may be instead of a taught class: the world's means, less those that taught classes replace.

    A class of few images is moved towards the center of all, or a line through it (see `Means`). To be fair, the
    world's means are moved as much as the class that they are compared with, as if they came from as few images.

    left: bool [W], which means of the world are rivals. center: float32 [2, D], the center o and Σ⁻¹ o. norms: float32
    [W], the squared distances of the means from the center. reliance: float32 [M], how much of its offset from the
    center each mode of the taught classes keeps. line: float32 [D], what an offset is multiplied by to find its place
    along the line; 0 without one.
    """

    world: World
    left: Array
    center: Array
    norms: Array
    reliance: Array
    line: Array

    @property
    def apart(self) -> Array:
        """Float32 [L, D]: the rivals, relative to the center."""
        return self.world.means[self.left] - self.center[0]

    def ahead(self, features: Array, background: Background, scores: Array, examples: bool = False) -> Array:
        """By how much the best class is ahead of the best rival [n]. scores: of modes [n, M]. examples: the features
        are those of the world's examples; the mean of its own kind is no rival of an example."""
        # in double precision, because a file from anywhere may hold numbers whose products overflow single precision
        x, (center, toward) = features.astype(np.float32, copy=False), self.center.astype(np.float64)
        scaled, apart = (x @ background.matrix).astype(np.float64), self.apart.astype(np.float64)
        products = scaled @ apart.T / (background.share - 1) - apart @ toward
        above = scores.max(1) - (x @ toward - 0.5 * float(center @ toward))
        on_line, kept = apart @ self.line, self.reliance[scores.argmax(1), None]
        along = np.outer((x - center) @ self.line, on_line)
        rivals = kept * (products - along) - 0.5 * kept**2 * (self.norms[self.left] - on_line**2)
        rivals += along - 0.5 * on_line**2
        if examples:
            rivals[np.flatnonzero(self.left), np.arange(rivals.shape[1])] = -np.inf
        return above - rivals.max(1)

    @classmethod
    def of(
        cls, world: World, left_out: LeaveOneOut, seen: LeftOut, shrinkage: float, classes: Array
    ) -> tuple[Rivals, Array]:
        """The rivals of the taught classes, and by how much each left-out image is ahead of them [n]. classes: [n].

        A class replaces means that win its left-out images, at most one per image; a class of one image replaces the
        mean that is nearest to it."""
        basis, groups, counts = left_out.basis, left_out.groups, left_out.groups.counts
        means, variances = seen.means, basis.shrunk(shrinkage)
        rotated = (world.means @ basis.vectors.astype(np.float32)).astype(np.float64)
        best = seen.scores.argmax(1)
        images = np.where(best == left_out.own, left_out.others, counts[best])
        scores, center = left_out.around(shrinkage, means, rotated, means.reliance(images)[:, None])
        above = seen.scores.max(1) - center
        rival, rows, totals = scores.argmax(1), np.arange(len(scores)), np.bincount(classes)[:, None]
        won, wins = scores.max(1) > above, np.zeros((len(totals), len(world)))
        np.add.at(wins, (classes[won], rival[won]), 1)
        replacing = wins > REPLACED * totals
        left = np.asarray(~replacing.any(0))
        apart, single = (rotated - means.center) / np.sqrt(variances), means.means[counts == 1] - means.center
        squares = (apart**2).sum(1)
        left[(2 * (single / np.sqrt(variances)) @ apart.T - squares).argmax(1)] = False
        left |= not left.any()
        centers = groups.means[counts > 0].mean(0), basis.vectors @ (means.center / variances)
        rivals = cls(
            world, left, np.stack(centers).astype(np.float32), squares.astype(np.float32),
            means.reliance(counts).astype(np.float32), (basis.vectors @ means.line[1]).astype(np.float32),
        )  # fmt: skip
        # an image is judged without itself here, too: a mean that is replaced because of it alone is its rival
        alone = won & replacing[classes, rival] & (replacing.sum(0)[rival] == 1)
        alone &= wins[classes, rival] - 1 <= REPLACED * (totals[classes, 0] - 1)
        return rivals, above - np.maximum(scores[:, left].max(1), np.where(alone, scores[rows, rival], -np.inf))


@dataclass(frozen=True)
class Weighing:
    """How certainty and nearness make familiarity.

    certainty: "entropy" of all probabilities, or "largest" of them. nearness: its weight; that of certainty is 1. far,
    steep: where nearness is more than `far` spreads below average, the part beyond gets the additional weight `steep`,
    so that no certainty can make up for it. world: the weight of being ahead of the world; steeper: its additional
    weight where the world is ahead.
    """

    certainty: str = "entropy"
    nearness: float = 0.25
    far: float = 4.0
    steep: float = 5.0
    world: float = 0.5
    steeper: float = 6.0


@dataclass(frozen=True)
class Calibration:
    """certainty, nearness, ahead (of the world): their average and spread over known images. threshold: the familiarity
    that 95 % of known images exceed."""

    temperature: float
    certainty: tuple[float, float]
    nearness: tuple[float, float]
    threshold: float
    weighing: Weighing = field(default_factory=Weighing)
    ahead: tuple[float, float] = (0.0, 1.0)


def familiarity(shares: Array, nearness: Array, calibration: Calibration, ahead: Array | None = None) -> Array:
    """How much each image looks like something known [n]. shares: probabilities [n, C]. nearness: [n]. ahead: of the
    world [n], if there is one."""
    weighing = calibration.weighing
    (mean_certainty, spread_certainty), (mean_nearness, spread_nearness) = calibration.certainty, calibration.nearness
    certain = (certainty_of(shares, weighing.certainty) - mean_certainty) / spread_certainty
    near = (nearness - mean_nearness) / spread_nearness
    familiar = certain + weighing.nearness * near + weighing.steep * np.minimum(near + weighing.far, 0)
    if ahead is None:
        return familiar
    mean_ahead, spread_ahead = calibration.ahead
    behind = weighing.steeper * np.minimum(ahead, 0) / spread_ahead
    return familiar + weighing.world * (ahead - mean_ahead) / spread_ahead + behind


def certainty_of(shares: Array, kind: str) -> Array:
    """Probabilities [n, C] to certainty [n]: the negative entropy, or the logarithm of the largest."""
    if kind == "largest":
        return np.log(np.maximum(shares.max(1), 1e-12))
    return (shares * np.log(np.maximum(shares, 1e-12))).sum(1)


@dataclass(frozen=True)
class Measurements:
    """What was measured on images that were left out one at a time. accuracy: every class weighted equally. per_class:
    images that were right and images that were tested. calibration_error: without and with the temperature."""

    accuracy: float
    per_class: Mapping[str, tuple[int, int]]
    calibration_error: tuple[float, float]

    @classmethod
    def of(
        cls, records: Mapping[str, ClassRecord], scores: Array, classes: Array, temperature: float
    ) -> Measurements | None:
        """scores: [n, C], of images of these classes [n]. None if there is nothing to tell apart. Classes of which a
        network has seen all images do not count."""
        tested, right = (
            np.bincount(c, minlength=len(records)) for c in (classes, classes[scores.argmax(1) == classes])
        )
        testable = (tested > 0) & [record.unseen.any() for record in records.values()]
        if len(records) < 2 or not testable.any():
            return None
        before, after = (calibration_error_of(probabilities(scores, t), classes) for t in (1.0, temperature))
        counts = zip((right * testable).tolist(), (tested * testable).tolist(), strict=True)
        accuracy = float((right[testable] / tested[testable]).mean())
        return cls(accuracy, dict(zip(records, counts, strict=True)), (before, after))

    @property
    def standard_error(self) -> float:
        """Of the accuracy. As if one image more had been right and one more wrong: few images prove little."""
        right, tested = (sum(counts) for counts in zip(*self.per_class.values(), strict=True))
        share = (right + 1) / (tested + 2)
        return float(np.sqrt(share * (1 - share) / (tested + 2)))

    @property
    def interval(self) -> tuple[float, float]:
        return balanced_interval(self.accuracy, [tested for _, tested in self.per_class.values()])

    def share(self, name: str) -> float | None:
        """Of right answers about a class."""
        right, tested = self.per_class.get(name, (0, 0))
        return right / tested if tested else None


@dataclass(frozen=True, eq=False)
class Solution:
    """The classifier of some classes, in their order, and what is needed to trust it. gram: [D, D], the sum of the
    outer products of their kept features, in fixed point. against: scores of counterexamples, if there are any. rivals:
    what the world says against the classes."""

    discriminant: Discriminant
    background: Background
    shrinkage: float
    calibration: Calibration
    gram: np.ndarray
    measurements: Measurements | None = None
    against: Discriminant | None = None
    rivals: Rivals | None = None

    def judge(self, features: np.ndarray, examples: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Features [n, D] to probabilities [n, classes], and familiarity [n]: below 0 is unknown. examples: see
        `Rivals.ahead`."""
        modes = self.discriminant.scores_of_modes(features)
        scores = join_modes(modes, self.discriminant.owners)
        shares = probabilities(scores, self.calibration.temperature)
        best, familiar = scores.max(1), np.full(len(features), np.inf)
        if self.knows_unknown:
            nearness = self.background.scores(features) + 2 * best
            ahead = None if self.rivals is None else self.rivals.ahead(features, self.background, modes, examples)
            familiar = familiarity(shares, nearness, self.calibration, ahead) - self.calibration.threshold
        if self.against is not None:
            familiar = np.minimum(
                familiar, (best - self.against.scores(features).max(1)) / self.calibration.temperature
            )
        return shares, familiar

    @property
    def knows_unknown(self) -> bool:
        """False while no image could be left out, so that there is no threshold."""
        return bool(np.isfinite(self.calibration.threshold))


def solve(
    classes: Mapping[str, ClassRecord], gram: Array, against: ClassRecord | None = None, world: World | None = None
) -> Solution:
    """classes: in the order of their scores. gram: over all of them (see `gram_of`). against: counterexamples."""
    records = list(classes.values())
    groups = groups_of(records, gram)
    basis = Basis.of(groups)
    shrinkage = choose_shrinkage(records, groups, basis)
    trials = Trials.of(records, spread_evenly(len(records), TESTED))
    rivals, ahead, measurements = None, None, None
    if not len(trials):  # one image per class: nothing can be left out
        temperature = max(float(groups.means.var(0).sum()), 1e-6)  # half the average squared distance between means
        calibration = Calibration(temperature, (0.0, 1.0), (0.0, 1.0), -np.inf)
        means = Means.of(groups.means @ basis.vectors, groups.counts, basis.shrunk(shrinkage), 0.0)
    else:
        left_out = LeaveOneOut(groups, basis, trials.features, trials.groups)
        seen = left_out.at(shrinkage)
        scores, means = join_modes(seen.scores, groups.owners), seen.means
        nearness = seen.from_center / (1 + means.ratio) - seen.norms + 2 * scores.max(1)
        if world is not None:
            rivals, ahead = Rivals.of(world, left_out, seen, shrinkage, trials.classes)
        calibration = _calibrate(scores, nearness * left_out.stretch(shrinkage), trials.classes, ahead)
        measurements = Measurements.of(classes, scores, trials.classes, calibration.temperature)
    none = None if against is None else counterexample_means(against, basis, shrinkage, means)
    return Solution(
        basis.discriminant(means, shrinkage, groups.owners), Background.of(basis, shrinkage, means), shrinkage,
        calibration, gram, measurements,
        None if none is None else basis.discriminant(none, shrinkage, np.arange(len(none.counts))), rivals,
    )  # fmt: skip


def _calibrate(scores: Array, nearness: Array, classes: Array, ahead: Array | None) -> Calibration:
    """From images under classifiers that have not learned them; every class counts the same. scores: [n, C]. nearness:
    [n]. classes: [n]. ahead: of the world [n]."""
    weights = 1 / np.bincount(classes)[classes]
    weights = weights / weights.sum()
    temperature = best_temperature(scores, classes, weights) if scores.shape[1] > 1 else 1.0
    shares = probabilities(scores, temperature)

    def mean_and_spread(values: Array, least: float) -> tuple[float, float]:
        mean = float(values @ weights)
        return mean, max(float(np.sqrt((values - mean) ** 2 @ weights)), least)

    calibration = Calibration(
        temperature, mean_and_spread(certainty_of(shares, Weighing().certainty), LEAST_SPREAD),
        mean_and_spread(nearness, 1e-9), 0.0,
        ahead=(0.0, 1.0) if ahead is None else mean_and_spread(ahead, 1e-9),
    )  # fmt: skip
    values = familiarity(shares, nearness, calibration, ahead)
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


def calibration_error_of(shares: Array, classes: Array) -> float:
    """How far the largest of the probabilities [n, C] is from the share of right answers."""
    return calibration_error(reliability(shares.max(1), shares.argmax(1) == classes, BINS))

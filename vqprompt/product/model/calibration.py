"""Reliable percentages, and which images are like no class.

- One temperature divides the scores, so that of the answers given with 80 %, about 80 % are right. It is fitted to
  images left out one at a time.
- How familiar an image looks is a weighted sum of two numbers, each in units of its own spread over known images:
  certainty, the negative entropy of the probabilities (low between classes), and nearness, the relative Mahalanobis
  distance: how much nearer an image is to its class than to the average of all images (low far away from all classes).
  Each misses what the other finds: with certainty alone, a bird is taken for a drawing; with nearness alone, an unknown
  drawing is taken for a known one.
- The weights are near the best of a grid on held-out training images (`benchmarks/trust_cub.py --parts choose`;
  docs/trust.md says how near). They are kept in a model's file, so that old files give the same answers.
- The threshold accepts 95 % of known images.
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
    best_temperature,
    join_modes,
    probabilities,
    shrunk,
)
from vqprompt.product.model.closed_form import TESTED, Trials, choose_shrinkage, groups_of, spread_evenly
from vqprompt.product.model.records import ClassRecord

ACCEPTED = 0.95  # share of known images that are not called unknown
BINS = 15
LEAST_SPREAD = 0.05  # of certainty: if all known images are certain, 99 % must not be far from 100 %


@dataclass(frozen=True, eq=False)
class Background:
    """How near images are to the average of all images, compared with how near they are to a class.

    matrix: [D, D]. vector: [D]. constant. `scores` gives xᵀ matrix x + vector x + constant.
    """

    matrix: Array
    vector: Array
    constant: float

    @classmethod
    def of(cls, groups: Groups, basis: Basis, shrinkage: float) -> Background:
        count = groups.kept_counts.sum()
        center = groups.kept_sums.sum(0) / count
        within = (basis.vectors / basis.shrunk(shrinkage)) @ basis.vectors.T
        whole = np.linalg.inv(shrunk(groups.gram / count - np.outer(center, center), shrinkage))
        return cls(
            (whole - within).astype(np.float32), (-2 * whole @ center).astype(np.float32),
            float(center @ whole @ center),
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
    nearness: float = 0.35
    far: float = 4.0
    steep: float = 5.0


OF_OLD_FILES = Weighing("largest", 0.35, 4.0, 5.0)  # these do not name their weighing


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


def solve(records: Sequence[ClassRecord], gram: Array) -> Solved:
    """records: the classes, in the order of their scores. gram: over all of them (see `gram_of`)."""
    groups = groups_of(records, gram)
    basis = Basis.of(groups)
    shrinkage = choose_shrinkage(records, groups, basis)
    trials = Trials.of(records, spread_evenly(len(records), TESTED))
    background = Background.of(groups, basis, shrinkage)
    right, tested = np.zeros(len(records), int), np.zeros(len(records), int)
    if not len(trials):  # one image per class: nothing can be left out
        return Solved(
            basis.discriminant(groups, shrinkage), background, shrinkage,
            Calibration(_temperature_untested(groups), (0.0, 1.0), (0.0, 1.0), -np.inf), right, tested,
            (np.nan, np.nan),
        )  # fmt: skip
    left_out = LeaveOneOut(groups, basis, trials.features, trials.groups).at(shrinkage)
    scores = join_modes(left_out.scores, groups.owners)
    temperature = best_temperature(scores, trials.classes) if len(records) > 1 else 1.0
    shares = probabilities(scores, temperature)
    rotated = trials.features @ basis.vectors
    # the distance from the average of all other images; nearness then compares it with the distance from the class
    from_all = background.scores(trials.features) + (rotated**2 / basis.shrunk(shrinkage)).sum(1)
    count = groups.kept_counts.sum()
    from_all = from_all / np.maximum(1 - (1 - shrinkage) / max(count - 1, 1) * from_all, 1e-3)
    nearness = from_all - left_out.norms + 2 * scores.max(1)
    hit = shares.argmax(1) == trials.classes
    np.add.at(right, trials.classes, hit)
    np.add.at(tested, trials.classes, 1)
    certainty = certainty_of(shares, Weighing().certainty)
    calibration = Calibration(
        temperature, (float(certainty.mean()), max(float(certainty.std()), LEAST_SPREAD)),
        (float(nearness.mean()), float(nearness.std()) or 1.0), 0.0,
    )  # fmt: skip
    threshold = float(np.quantile(familiarity(shares, nearness, calibration), 1 - ACCEPTED))
    before = calibration_error_of(probabilities(scores, 1.0), trials.classes)
    return Solved(
        basis.discriminant(groups, shrinkage, left_out.distance), background, shrinkage,
        replace(calibration, threshold=threshold), right, tested,
        (before, calibration_error_of(shares, trials.classes)),
    )  # fmt: skip


def _temperature_untested(groups: Groups) -> float:
    """If no image can be left out: half the average squared distance between class means."""
    means = groups.sums / np.maximum(groups.counts, 1)[:, None]
    return max(float(means.var(0).sum()), 1e-6)


def calibration_error_of(shares: Array, classes: Array) -> float:
    """How far the largest of the probabilities [n, C] is from the share of right answers."""
    return calibration_error(reliability(shares.max(1), shares.argmax(1) == classes, BINS))

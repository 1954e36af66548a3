"""From what is remembered to discriminants: groups of images of classes and counterexamples, and how much is shrunk.

What is searched and tested is bounded (`SEARCHED`, `TESTED`, `COMPARED`), so that one more class costs little more with
many classes than with few. All choices depend only on what is remembered, not on the order of teaching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vqprompt.core.statistics.discriminant import (
    Array,
    Basis,
    Groups,
    Means,
    best_temperature,
    brier,
    join_modes,
    probabilities,
)
from vqprompt.core.statistics.leave_one_out import LeaveOneOut
from vqprompt.core.statistics.world import k_means
from vqprompt.product.model.records import STEP, ClassRecord

# Accuracy is measured on TESTED images, spread evenly over the classes. With many classes it is measured on fewer, so
# that images times classes stays below COMPARED, but on one of each class, or of TESTED classes where there are more.
TESTED = 2000
COMPARED = 400_000
SEARCHED = 128  # classes that take part in choosing the shrinkage, with at most 5 × 128 images in all
EQUAL = 0.001  # a difference of the Brier score that means nothing
PER_GROUP = 3  # counterexamples, on average
SHRINKAGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def groups_of(records: Sequence[ClassRecord], gram: Array) -> Groups:
    """The modes of all classes. gram: in fixed point, see `gram_of`."""
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
    return Groups(
        np.array(owners), np.array(sums) * STEP, np.array(counts), np.array(kept_sums) * STEP,
        np.array(kept_counts), gram * STEP**2,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trials:
    """Images to test with. features: [n, D]. ids: uint64 [n]. classes: [n]. groups: [n], the mode of the class."""

    features: Array
    ids: Array
    classes: Array
    groups: Array

    def __len__(self) -> int:
        return len(self.ids)

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
        kept, ids, classes, groups = (np.concatenate(p) for p in zip(*parts, strict=True))
        return cls(kept * STEP, ids, classes, groups)


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
    left_out = LeaveOneOut(groups, basis, trials.features, trials.groups, compared)
    losses = np.full(len(SHRINKAGES), np.inf)

    def best_with(places: Sequence[int]) -> int:
        """The best of all that were tried, after trying these; the largest of those that are equally good."""
        for i in places:
            scores = join_modes(left_out.at(SHRINKAGES[i]).scores, owners)
            losses[i] = brier(probabilities(scores, best_temperature(scores, classes, precision=0.05)), classes)
        return int(np.flatnonzero(losses <= losses.min() + EQUAL).max())

    best = best_with(range(1, len(SHRINKAGES), 2))  # every other one, then the neighbours of the best
    return SHRINKAGES[best_with([i for i in (best - 1, best + 1) if i < len(SHRINKAGES)])]


def counterexample_means(record: ClassRecord, basis: Basis, shrinkage: float, means: Means) -> Means:
    """Images that look similar to the classes, but are none of them, in groups whose scores are on the scale of those
    of classes. means: of the classes.

    An image that is nearer to a group than to any class is unknown. Counterexamples take no part in the covariance, the
    temperature and the threshold, because they may be of any number of kinds. The kinds are not known, so they are
    found: groups of about three images that are near each other. On birds and drawings groups of three refuse as many
    further images of the same kinds as groups that know the kinds; one group for all refuses far fewer, and a group per
    image also refuses images of the classes.
    """
    rotated, variances = record.features @ basis.vectors, basis.shrunk(shrinkage)
    whitened = rotated / np.sqrt(np.maximum(variances, 1e-12))
    groups = k_means(whitened, whitened[::PER_GROUP])
    counts = np.bincount(groups)
    sums = np.zeros((len(counts), rotated.shape[1]))
    np.add.at(sums, groups, rotated)
    return replace(means, means=sums / counts[:, None], counts=counts, distance=0.0)

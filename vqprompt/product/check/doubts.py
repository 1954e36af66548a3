"""Finds labels that similar images vote against, images unlike their class, and classes that look alike.

What is notable about this implementation:
- An image is judged without itself: means and covariance are computed as if it were not there (with the formula of
  Sherman and Morrison, in coordinates in which the covariance is the unit matrix).
- Distances between neighbours are measured relative to how much images of one class differ (the common covariance,
  shrunk). In that metric, ten neighbours name 71 % of CUB-200's birds; in the plain one, 54 %.
- A label is doubted if two tests agree: almost no neighbour has it, and the closed form, which compares all classes at
  once, finds it unlikely. The first test alone also doubts many images that are rare but right.
- The distance of an image from its class is measured in the plain metric, by angle. Outliers widen the covariance, so a
  distance relative to the covariance misses them: of drawings among birds it found one in ten.
- cleanlab takes such probabilities as input. Its rule (the average certainty of each class as threshold) finds fewer
  wrong labels and doubts more right ones (benchmarks/trust_cub.py), so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from vqprompt.core.statistics.discriminant import Array, Basis, Groups, best_temperature, probabilities
from vqprompt.core.statistics.leave_one_out import LeaveOneOut
from vqprompt.product.check.neighbours import nearest
from vqprompt.product.model.records import ClassRecord

NEIGHBOURS = 10  # or half the images of a typical class, if these are fewer
# docs/trust-measured.md says how well UNLIKELY, SUPPORT and FAR work on held-out training images
UNLIKELY = 0.1  # divided by the number of classes: the probability of its label below which an image is doubted …
UNLIKELY_AT_MOST = 0.02  # … but never more than this, which matters with fewer than six classes
WRONG = 0.05  # share of labels that may be wrong when probabilities are fitted
SUPPORT = 0.1  # a label with a larger share of the neighbours' votes is not doubted
FAR = 3.3  # robust standard deviations above the typical distance
SPREAD = 0.05  # a smaller standard deviation is replaced by this one
ALIKE = 0.25  # two classes look alike if this share of their images is taken for the other
BLOCK = 2048  # rows at a time
FITTED = 4000  # images that the temperature is fitted on
JUDGED = 4000  # images at most after teaching, spread evenly over the classes that are compared
RIVALS = 30  # classes that the taught ones are compared with: no slower with a thousand classes than with ten


@dataclass(frozen=True, eq=False)
class Doubts:
    """What is doubtful about each image [n].

    probability: of its label, judged by all other images. likelier, rival: the class that is most likely instead, and
    its probability. support: share of its neighbours' votes for its label. distance: from its class, in robust standard
    deviations above the typical one. mixed: [C, C], how often the images of a class are taken for another, as shares of
    the row's images.
    """

    probability: Array
    rival: Array
    support: Array
    likelier: Array
    distance: Array
    mixed: Array

    @property
    def mislabelled(self) -> Array:
        return self.disputed(min(UNLIKELY / len(self.mixed), UNLIKELY_AT_MOST), SUPPORT)

    def disputed(self, unlikely: float, support: float) -> Array:
        """Images whose label is less probable than `unlikely`, and has at most `support` of the neighbours' votes."""
        return (self.probability < unlikely) & (self.support <= support)

    @property
    def strange(self) -> Array:
        return self.distance > FAR


def find_doubts(features: Array, labels: Array, classes: int) -> Doubts:
    """features: [n, D]. labels: [n], from 0 to classes - 1. The only image of a class is not doubted."""
    n, width = features.shape
    x = features.astype(np.float64) - features.mean(0)
    groups = Groups.of(x, labels, classes)
    basis, counts = Basis.of(groups), groups.counts
    shrinkage = width / (width + basis.freedom)  # the fewer images, the less reliable is their covariance
    scores = np.empty((n, classes), np.float32)
    for part in _blocks(n):
        scores[part] = LeaveOneOut(groups, basis, x[part], labels[part]).at(shrinkage).scores
    testable = counts[labels] > 1
    chosen = np.flatnonzero(testable)[:: max(1, testable.sum() // FITTED)]
    temperature = best_temperature(scores[chosen], labels[chosen], wrong=WRONG) if len(chosen) and classes > 1 else 1.0
    probability, rival, likelier, mixed = np.ones(n), np.zeros(n), labels.copy(), np.zeros((classes, classes))
    for part in _blocks(n):
        shares = probabilities(scores[part], temperature)
        rows, own, judged = np.arange(len(shares)), labels[part], testable[part]
        probability[part] = np.where(judged, shares[rows, own], 1.0)
        np.add.at(mixed, (own[judged], shares.argmax(1)[judged]), 1)
        shares[rows, own] = -1
        likelier[part], rival[part] = shares.argmax(1), shares.max(1)
    support = _support(x @ basis.whitening(shrinkage), labels)
    support[~testable] = 1.0
    distance = _distances(features.astype(np.float64), labels, counts)
    return Doubts(probability, rival, support, likelier, distance, mixed / np.maximum(counts, 1)[:, None])


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, n, BLOCK))


def _support(z: Array, labels: Array) -> Array:
    """Share of the votes of each image's neighbours for its own label, weighted by similarity [n]."""
    rows = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    typical = int(np.median(np.bincount(labels)[labels]))
    places, similar = nearest(rows, min(NEIGHBOURS, max(typical // 2, 2)))
    weights = np.where(places >= 0, np.maximum(similar, 1e-6), 0)
    return (weights * (labels[places] == labels[:, None])).sum(1) / np.maximum(weights.sum(1), 1e-12)


def _distances(features: Array, labels: Array, counts: Array) -> Array:
    """How far from its class each image is: robust standard deviations of the logarithm [n]; 0 in classes of fewer than
    three images."""
    unit, centers = _unit_and_centers(features, labels, counts)
    far = np.log(np.maximum(((unit - centers) ** 2).sum(1), 1e-12))
    return _above_middle(far, counts[labels] > 2, lambda near: 1.4826 * np.median(np.abs(near - np.median(near))))


def strangeness(features: Array, labels: Array) -> Array:
    """How far from its class each image is in the first half of its features, by angle [n]: 1 is as far as the outer
    tenth of all images; 0 in classes of fewer than three. The first half is the class token before the last block. It
    tells photographs from scans, screenshots and drawings better than the last one, which sees more of what they show.
    """
    half, counts = features[:, : features.shape[1] // 2].astype(np.float64), np.bincount(labels)
    unit, centers = _unit_and_centers(half, labels, counts)
    far = 1 - (unit * centers).sum(1) / np.maximum(np.linalg.norm(centers, axis=1), 1e-12)
    return _above_middle(far, counts[labels] > 2, lambda near: np.quantile(near, 0.9) - np.median(near))


def _above_middle(far: Array, judged: Array, spread: Callable[[Array], float]) -> Array:
    """How many spreads above the median of those that are judged [n]; 0 for others."""
    if not judged.any():
        return np.zeros(len(far))
    return np.where(judged, (far - np.median(far[judged])) / max(spread(far[judged]), SPREAD), 0.0)


def _unit_and_centers(features: Array, labels: Array, counts: Array) -> tuple[Array, Array]:
    """Features of length 1, and for each the average of the others of its class [n, D]."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    sums = np.zeros((len(counts), unit.shape[1]))
    np.add.at(sums, labels, unit)
    return unit, (sums[labels] - unit) / np.maximum(counts[labels] - 1, 1)[:, None]


# ---------------------------------------------------------------------------------------------- after teaching


def noticed(classes: Mapping[str, ClassRecord], taught: Collection[str]) -> str | None:
    """One line for `learn` about what it has just been taught, from the features it keeps; None if nothing is odd."""
    taught = sorted(taught)
    compared = [*taught, *_rivals(classes, taught)]
    if len(compared) < 2 or not taught:
        return None
    each = max(2, JUDGED // len(compared))
    parts = [classes[name].features[:each] for name in compared]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    seen = find_doubts(np.concatenate(parts), labels, len(parts))
    new = labels < len(taught)
    wrong, strange = int((seen.mislabelled & new).sum()), int((seen.strange & ~seen.mislabelled & new).sum())
    if not wrong and not strange:
        return None
    return (
        f"of the images of these classes, {wrong} look like another class and {strange} unlike theirs; "
        "vqprompt check FOLDER shows which"
    )


def _rivals(classes: Mapping[str, ClassRecord], taught: Collection[str]) -> list[str]:
    """The other classes that images of the taught ones are nearest to."""
    others = [name for name in classes if name not in taught]
    if len(others) <= RIVALS:
        return others
    each = max(2, JUDGED // len(taught))
    images = np.concatenate([classes[name].features[:each] for name in taught])
    means = np.stack([classes[name].mean for name in others])
    distances = (means**2).sum(1) - 2 * images @ means.T  # [images, classes], less the same number in each row
    rank = distances.argsort(1).argsort(1).min(0)  # 0: the nearest class of at least one image
    return [others[place] for place in rank.argsort(kind="stable")[:RIVALS]]

"""Each image under a classifier that has not learned it: exact, and cheap.

The mean of a group and the common covariance without an image follow from those with it by a rank-one update (the
formula of Sherman and Morrison), so all images together cost little more than one solve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vqprompt.core.statistics.discriminant import PRIOR, Array, Basis, Groups, Means


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What classifiers answer about images that they have not learned.

    scores: [n, groups]. norms: [n], xᵀ Σ⁻¹ x, with Σ without x. from_center: [n], the squared distance from the center
    of all groups. means: of the groups.
    """

    scores: Array
    norms: Array
    from_center: Array
    means: Means


class LeaveOneOut:
    """Each image under a classifier that has not learned it, for any shrinkage.

    With r = x - mean, the covariance without x is the covariance with x minus a multiple of r rᵀ, so the formula of
    Sherman and Morrison gives its inverse; the center of all means moves along r too. By how much means are shrunk
    stays as it is with all images, and so does the diagonal that the covariance is shrunk to (but see `stretch`).

    features: [n, D], of images that are in the groups. own: [n], the group of each. compared: which groups are scored;
    all by default.
    """

    def __init__(
        self, groups: Groups, basis: Basis, features: Array, own: Array, compared: Array | None = None
    ) -> None:
        self.groups, self.basis, self.own = groups, basis, own
        self.compared = np.arange(len(groups.owners)) if compared is None else compared
        self.column = np.full(len(groups.owners), -1)
        self.column[self.compared] = np.arange(len(self.compared))
        self.several, self.others = groups.kept_counts[own] > 1, groups.counts[own] - 1
        self.longer = groups.kept_counts[own] / np.maximum(groups.kept_counts[own] - 1, 1)
        used, place = np.unique(own, return_inverse=True)
        kept_means = groups.kept_sums[used] / groups.kept_counts[used][:, None]
        self.x, self.rotated = features @ basis.vectors, groups.means @ basis.vectors
        self.mean = (self.rotated[own] * groups.counts[own][:, None] - self.x) / np.maximum(self.others, 1)[:, None]
        self.offsets = self.x - (kept_means @ basis.vectors)[place]
        self.features, self.kept_means = features, kept_means[place]

    def at(self, shrinkage: float) -> LeftOut:
        x, own, counts = self.x, self.own, self.groups.counts
        variances, q, far, growth = self._without(shrinkage)
        # the distance of images from the mean of their group without them, less the error of that mean
        outside = ((far + growth * far**2) * self.longer)[self.several]
        distance = float(outside.mean()) if len(outside) else 0.0
        means = Means.of(self.rotated, counts, self.basis.shrunk(shrinkage), distance)
        mu = means.shrunk[self.compared]
        along, away, toward = (q * x).sum(1), mu - means.center, means.center / variances
        # relative to the center, because features are far from zero, and single precision is relative
        crossed = _products(q, away) + (q @ means.center)[:, None]
        scores = _products(x - means.center, away / variances) + (x @ toward)[:, None] + away @ toward
        scores += growth[:, None] * crossed * (along[:, None] - 0.5 * crossed) - 0.5 * (mu**2 / variances).sum(1)
        # without x the center moves by `step` r, and with it every mean, as far as it does not rely on its own images
        # (and not along the line: r's place on it is `place`)
        step = -1 / (np.maximum(self.others, 1) * (counts > 0).sum())
        moving, place = 1 - means.reliance(counts[self.compared]), self.offsets @ means.line[1]
        line = means.line[0] / variances
        beside = far - place * (self.offsets @ line)
        grown, apart_on_line = 1 + growth * beside, (x @ line)[:, None] - mu @ line
        scores += means.bonus(counts[self.compared])
        scores += (step[:, None] * moving) * (
            grown[:, None] * (along[:, None] - crossed - 0.5 * (step * beside)[:, None] * moving)
            - place[:, None] * apart_on_line
        )
        # its own group, whose mean is computed without it
        center = means.center + step[:, None] * self.offsets
        mine = means.moved(self.mean, self.others, center)
        solved = mine / variances + (growth * (q * mine).sum(1))[:, None] * q
        own_scores = (solved * (x - 0.5 * mine)).sum(1) + means.bonus(self.others)
        scores[np.arange(len(x)), self.column[own]] = np.where(self.others > 0, own_scores, -np.inf)
        norms = (x**2 / variances).sum(1) + growth * along**2
        apart = x - center
        from_center = (apart**2 / variances).sum(1) + growth * (q * apart).sum(1) ** 2
        return LeftOut(scores, norms, from_center, means)

    def around(self, shrinkage: float, means: Means, others: Array, kept: Array) -> tuple[Array, Array]:
        """Scores of others than the groups [n, W], less that of the center of all [n], and the latter; under the
        covariance without each image. others: [W, D], in the coordinates of the basis. kept: how much of its offset
        from the center (or the line) each keeps, [n, 1] or [W]."""
        variances, q, _, growth = self._without(shrinkage)
        center, (line, place), offsets = means.center, means.line, self.x - means.center
        on_line = (others - center) @ place
        apart = others - center - np.outer(on_line, line)
        products = kept * _products(offsets, apart / variances) + np.outer(offsets @ (line / variances), on_line)
        norms = kept**2 * (apart**2 / variances).sum(1) + on_line**2 * (line**2 / variances).sum()
        crossed = kept * _products(q, apart) + np.outer(q @ line, on_line)
        toward, inside = (q * center).sum(1), (q * offsets).sum(1)
        scores = products - 0.5 * norms + growth[:, None] * crossed * (inside[:, None] - 0.5 * crossed)
        own = (center / variances * (self.x - 0.5 * center)).sum(1)
        return scores, own + growth * toward * ((q * self.x).sum(1) - 0.5 * toward)

    def stretch(self, shrinkage: float) -> Array:
        """By which factor squared distances grow if the diagonal, too, is computed without the image [n]: to first
        order, from what its own squared offsets add to each variance. With few images this is more than a tenth."""
        basis, freedom = self.basis, max(self.basis.freedom - 1, 1)
        _, q, far, growth = self._without(shrinkage)
        diagonal = 1 / (basis.vectors**2).sum(1)
        added = self.longer[:, None] * (self.features - self.kept_means) ** 2
        without = (diagonal * (basis.freedom + PRIOR) - added) / (freedom + PRIOR)
        less = shrinkage * (diagonal * (basis.freedom / freedom) - without)
        share = (less * (q @ basis.vectors.T) ** 2).sum(1) * (1 + growth * far) / np.maximum(far, 1e-12)
        return 1 / (1 - np.clip(share, 0, 0.5))

    def _without(self, shrinkage: float) -> tuple[Array, Array, Array, Array]:
        """The variances [D]; with their inverse Σ⁻¹, q = Σ⁻¹ r [n, D] and rᵀ q [n]; and the factor g [n] that makes
        Σ⁻¹ + g q qᵀ the inverse without the image."""
        freedom = max(self.basis.freedom - 1, 1)
        variances = self.basis.shrunk(shrinkage) * (max(self.basis.freedom, 1) / freedom)
        q = self.offsets / variances
        far = (q * self.offsets).sum(1)
        share = (1 - shrinkage) * self.longer / freedom  # of r rᵀ in the covariance
        return variances, q, far, share / np.maximum(1 - share * far, 1e-9)


def _products(rows: Array, columns: Array) -> Array:
    """rows @ columns.T in single precision: the large products, and what they decide does not need more."""
    return (rows.astype(np.float32) @ columns.T.astype(np.float32)).astype(np.float64)

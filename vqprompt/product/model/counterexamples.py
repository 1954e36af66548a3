"""Images that were taught as unknown: they look similar to the classes, but are none of them.

They are compared with the classes when a model answers: an image that is nearer to them than to any class is unknown.
They take no part in the covariance, the temperature and the threshold, because they may be of any number of kinds.

The kinds are not known, so they are found: groups of about three images that are near each other. On birds and drawings
groups of three refuse as many further images of the same kinds as groups that know the kinds; one group for all
refuses far fewer, and a group per image also refuses images of the classes.
"""

from __future__ import annotations

import numpy as np

from vqprompt.core.statistics.discriminant import Basis, Discriminant, Means
from vqprompt.core.statistics.world import clusters
from vqprompt.product.model.records import ClassRecord

PER_GROUP = 3  # images, on average


def solve_counterexamples(record: ClassRecord, basis: Basis, shrinkage: float, means: Means) -> Discriminant:
    """Scores of the groups, on the scale of the scores of classes. means: of the classes."""
    rotated, variances = record.features @ basis.vectors, basis.shrunk(shrinkage)
    groups = clusters(rotated / np.sqrt(np.maximum(variances, 1e-12)), PER_GROUP)
    counts = np.bincount(groups)
    sums = np.zeros((len(counts), rotated.shape[1]))
    np.add.at(sums, groups, rotated)
    own = Means(sums / counts[:, None], means.center, counts, means.ratio).shrunk
    scaled = own / variances
    bias = -0.5 * (scaled * own).sum(1)
    weights = (scaled @ basis.vectors.T).astype(np.float32)
    return Discriminant(weights, bias.astype(np.float32), np.arange(len(counts)))

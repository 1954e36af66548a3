"""Gaussians of the classes learned so far, how they follow features that move, and classifiers corrected from them."""

from vqprompt.statistics.drift import Drift, Moving, fit_drift
from vqprompt.statistics.gaussians import ClassStatistics, Covariance, make_statistics, means_by_class
from vqprompt.statistics.rebalancing import Rebalancing, rebalance
from vqprompt.statistics.sums import ClassSums

__all__ = [
    "ClassStatistics", "ClassSums", "Covariance", "Drift", "Moving", "Rebalancing", "fit_drift", "make_statistics",
    "means_by_class", "rebalance",
]  # fmt: skip

"""Gaussians of the classes learned so far, and how they follow features that move."""

from vqprompt.core.statistics.drift import Drift, Moving, fit_drift
from vqprompt.core.statistics.gaussians import ClassStatistics, Covariance, make_statistics, means_by_class
from vqprompt.core.statistics.sums import ClassSums

__all__ = [
    "ClassStatistics", "ClassSums", "Covariance", "Drift", "Moving", "fit_drift", "make_statistics", "means_by_class",
]  # fmt: skip

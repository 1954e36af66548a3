"""The closed form as a scikit-learn estimator on plain feature matrices.

What is notable about this implementation:
- It keeps counts, means and one scatter matrix. So `partial_fit` takes any number of rows at a time, in any order, with
  new classes or without, and the result equals that of one `fit` with all rows.
- Batches are merged by the differences of their means (Chan, Golub and LeVeque). That stays exact where features are
  large and vary little; the difference of two large sums would not.
- With a number as shrinkage it equals `LinearDiscriminantAnalysis(solver="lsqr", shrinkage=number)`, which has no
  `partial_fit`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.discriminant_analysis import DiscriminantAnalysisPredictionMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from vqprompt.core.statistics.discriminant import shrunk, solve_discriminant


class ClosedFormClassifier(DiscriminantAnalysisPredictionMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear discriminant with one covariance for all classes. It is solved, not trained, and learns new classes.

    shrinkage: how much of the unit matrix (times the average variance) is mixed into the covariance, from 0 to 1;
    "auto" estimates it from the scatter and the number of rows (OAS).

    Attributes after fitting: classes_, class_count_, means_, covariance_ (shrunk), shrinkage_, priors_ (the class
    frequencies), coef_, intercept_.
    """

    def __init__(self, shrinkage: float | str = "auto") -> None:
        self.shrinkage = shrinkage

    def fit(self, X: Any, y: Any) -> ClosedFormClassifier:
        """Learn from rows X [n, D] with labels y [n]. Everything learned before is forgotten."""
        return self._learn(X, y, None, first=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> ClosedFormClassifier:
        """Learn more rows. New classes are added; `classes` may name some whose rows come later (or never)."""
        return self._learn(X, y, classes, first=not hasattr(self, "classes_"))

    def _learn(self, X: Any, y: Any, classes: Any, first: bool) -> ClosedFormClassifier:
        if self.shrinkage != "auto" and (isinstance(self.shrinkage, str) or not 0 <= self.shrinkage <= 1):
            raise ValueError(f"shrinkage={self.shrinkage!r}: give a number from 0 to 1, or 'auto'")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        if None in y.tolist():
            raise ValueError("y: classes are names or whole numbers, not None")
        check_classification_targets(y)
        taught, width = np.unique(y), X.shape[1]
        announced = taught if classes is None else np.union1d(np.asarray(classes), taught)
        if first:
            self.classes_, self._scatter = announced[:0], np.zeros((width, width))
            self.class_count_, self.means_ = np.zeros(0), np.zeros((0, width))
        kinds = announced.dtype.kind + self.classes_.dtype.kind
        if "U" in kinds and kinds != "UU":
            raise ValueError(
                f"labels were {self.classes_.dtype} and are {announced.dtype} now; give names or numbers, not both"
            )
        fresh = np.setdiff1d(announced, self.classes_)
        places = np.searchsorted(self.classes_, fresh)
        self.classes_ = np.union1d(self.classes_, announced)
        self.class_count_, self.means_ = (np.insert(of, places, 0, axis=0) for of in (self.class_count_, self.means_))
        for label, place in zip(taught, np.searchsorted(self.classes_, taught), strict=True):
            rows, known = X[y == label], self.class_count_[place]
            count, mean = len(rows), rows.mean(0)
            offsets, apart = rows - mean, mean - self.means_[place]
            self._scatter += offsets.T @ offsets + np.outer(apart, apart) * (known * count / (known + count))
            self.class_count_[place] += count
            self.means_[place] += apart * (count / (known + count))
        self._solve()
        return self

    def _solve(self) -> None:
        total = self.class_count_.sum()
        self.priors_, covariance = self.class_count_ / total, self._scatter / total
        self.shrinkage_ = _oas(covariance, total) if isinstance(self.shrinkage, str) else float(self.shrinkage)
        self.covariance_ = shrunk(covariance, self.shrinkage_)  # if no class has two rows that differ: the unit matrix
        self.coef_, offsets = solve_discriminant(self.covariance_, self.means_)
        with np.errstate(divide="ignore"):  # a class that was announced, and has not come: minus infinity
            self.intercept_ = offsets + np.log(self.priors_)

    def _decision_function(self, X: Any) -> np.ndarray:
        """Scores [n, classes]; the mixin makes the other answers of them."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return X @ self.coef_.T + self.intercept_


def _oas(covariance: np.ndarray, count: float) -> float:
    """Oracle approximating shrinkage of a covariance [D, D] around known means (Chen, Wiesel, Eldar and Hero, 2010)."""
    width = len(covariance)
    squares, level = (covariance**2).mean(), np.trace(covariance) / width
    numerator = squares + level**2
    denominator = (count + 1) * (squares - level**2 / width)
    return 1.0 if denominator <= 0 else float(min(numerator / denominator, 1.0))

"""The closed form as a scikit-learn estimator on plain feature matrices.

What is notable about this implementation:
- It keeps counts, means and one scatter matrix. So `partial_fit` takes any number of rows at a time, in any order, with
  new classes or without, and the result equals that of one `fit` with all rows.
- Batches are merged by the differences of their means (Chan, Golub and LeVeque). That stays exact where features are
  large and vary little; the difference of two large sums would not.
- With a number as shrinkage it equals `LinearDiscriminantAnalysis(solver="lsqr", shrinkage=number)`, which has no
  `partial_fit`. scikit-learn weights the covariance of each class by its prior. If the priors are not the class
  frequencies, this needs one scatter matrix per class, so only then are these kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.discriminant_analysis import DiscriminantAnalysisPredictionMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from vqprompt.core.statistics.discriminant import shrunk, solve_discriminant


def check_labels(labels: np.ndarray) -> None:
    """Refuse what cannot be a class, such as None."""
    if odd := [label for label in labels.tolist() if label is None]:
        raise ValueError(f"y: classes are names or whole numbers, not {odd[0]!r}")
    check_classification_targets(labels)


class ClosedFormClassifier(DiscriminantAnalysisPredictionMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear discriminant with one covariance for all classes. It is solved, not trained, and learns new classes.

    shrinkage: how much of the unit matrix (times the average variance) is mixed into the covariance, from 0 to 1;
    "auto" estimates it from the scatter and the number of rows (OAS). priors: one per class, in the order of
    `classes_`; "uniform"; None takes the class frequencies. temperature: divides the scores; above 1, probabilities
    become less certain.

    Attributes after fitting: classes_, class_count_, means_, covariance_ (shrunk), shrinkage_, priors_, coef_,
    intercept_.
    """

    def __init__(self, shrinkage: float | str = "auto", priors: Any = None, temperature: float = 1.0) -> None:
        self.shrinkage = shrinkage
        self.priors = priors
        self.temperature = temperature

    def fit(self, X: Any, y: Any) -> ClosedFormClassifier:
        """Learn from rows X [n, D] with labels y [n]. Everything learned before is forgotten."""
        return self._learn(X, y, None, first=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> ClosedFormClassifier:
        """Learn more rows. New classes are added; `classes` may name some whose rows come later (or never)."""
        return self._learn(X, y, classes, first=not hasattr(self, "classes_"))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of what `predict_proba` gives: probabilities [n, classes], in the order of `classes_`."""
        return log_softmax(self._decision_function(X) / self.temperature, axis=1)

    def _learn(self, X: Any, y: Any, classes: Any, first: bool) -> ClosedFormClassifier:
        self._check_settings()
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        check_labels(y)
        taught, per_class = np.unique(y), self.priors is not None
        announced = taught if classes is None else np.union1d(np.asarray(classes), taught)
        if first:
            self.classes_, self._per_class, self._scatter = announced[:0], per_class, dict[Any, np.ndarray]()
            self.class_count_, self.means_ = np.zeros(0), np.zeros((0, X.shape[1]))
        kinds = announced.dtype.kind + self.classes_.dtype.kind
        if "U" in kinds and kinds != "UU":
            raise ValueError(
                f"labels were {self.classes_.dtype} and are {announced.dtype} now; give names or numbers, not both"
            )
        if self._per_class != per_class:
            raise ValueError("priors were set or removed between two calls of partial_fit; call fit again")
        fresh = np.setdiff1d(announced, self.classes_)
        places = np.searchsorted(self.classes_, fresh)
        self.classes_ = np.union1d(self.classes_, announced)
        self.class_count_, self.means_ = (np.insert(of, places, 0, axis=0) for of in (self.class_count_, self.means_))
        for label, place in zip(taught.tolist(), np.searchsorted(self.classes_, taught), strict=True):
            rows, known = X[y == label], self.class_count_[place]
            count, mean = len(rows), rows.mean(0)
            offsets, apart = rows - mean, mean - self.means_[place]
            scatter = offsets.T @ offsets + np.outer(apart, apart) * (known * count / (known + count))
            owner = label if per_class else None
            self._scatter[owner] = self._scatter.get(owner, 0) + scatter
            self.class_count_[place] += count
            self.means_[place] += apart * (count / (known + count))
        self._solve()
        return self

    def _check_settings(self) -> None:
        if self.shrinkage != "auto" and (isinstance(self.shrinkage, str) or not 0 <= self.shrinkage <= 1):
            raise ValueError(f"shrinkage={self.shrinkage!r}: give a number from 0 to 1, or 'auto'")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")
        if isinstance(self.priors, str) and self.priors != "uniform":
            raise ValueError(f"priors={self.priors!r}: give a probability for each class, 'uniform' or None")

    def _solve(self) -> None:
        seen, total = self.class_count_ > 0, self.class_count_.sum()
        self.priors_ = self._priors(seen)
        if self._per_class:
            shares = dict(zip(self.classes_.tolist(), self.priors_ / np.maximum(self.class_count_, 1), strict=True))
            covariance = sum(shares[label] * scatter for label, scatter in self._scatter.items())
        else:
            covariance = self._scatter[None] / total
        self.shrinkage_ = _oas(covariance, total) if isinstance(self.shrinkage, str) else float(self.shrinkage)
        self.covariance_ = shrunk(covariance, self.shrinkage_)  # if no class has two rows that differ: the unit matrix
        self.coef_, offsets = solve_discriminant(self.covariance_, self.means_)
        with np.errstate(divide="ignore"):
            log_priors = np.log(self.priors_)
        self.intercept_ = offsets + np.where(seen, log_priors, -np.inf)

    def _priors(self, seen: np.ndarray) -> np.ndarray:
        if self.priors is None:
            return self.class_count_ / self.class_count_.sum()
        if isinstance(self.priors, str):
            return seen / seen.sum()
        given = np.asarray(self.priors, float)
        if given.shape != seen.shape or (given < 0).any() or not given.sum() > 0:
            raise ValueError(f"priors: give one non-negative number for each of the {len(seen)} classes")
        return given / given.sum()

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

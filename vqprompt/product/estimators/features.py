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
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from vqprompt.core.statistics.discriminant import shrunk, solve_discriminant


def check_labels(labels: np.ndarray) -> None:
    """Refuse what cannot be a class, such as None."""
    if odd := [label for label in labels.tolist() if label is None]:
        raise ValueError(f"y: classes are names or whole numbers, not {odd[0]!r}")
    check_classification_targets(labels)


class ClosedFormClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
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

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores [n, classes]; for two classes [n]: the score of the second minus the score of the first."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row."""
        scores = self._scores(X)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [n, classes], in the order of `classes_`."""
        return softmax(self._scores(X) / self.temperature, axis=1)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        shares = self.predict_proba(X)
        return np.log(np.maximum(shares, np.finfo(shares.dtype).tiny))

    # ------------------------------------------------------------------ sums

    def _reset(self, labels: np.ndarray, width: int) -> None:
        """No class yet. With priors there is one scatter matrix per class."""
        self._per_class = self.priors is not None
        self.classes_, self.class_count_, self.means_ = labels[:0], np.zeros(0), np.zeros((0, width))
        self._scatter = np.zeros((0 if self._per_class else 1, width, width))

    def _learn(self, X: Any, y: Any, classes: Any, first: bool) -> ClosedFormClassifier:
        self._check_settings()
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        check_labels(y)
        if first:
            self._reset(y, X.shape[1])
        self._make_room(np.unique(y) if classes is None else np.union1d(np.asarray(classes), np.unique(y)))
        places = np.searchsorted(self.classes_, y)
        for place in np.unique(places):
            rows = X[places == place]
            count, mean = len(rows), rows.mean(0)
            offsets = rows - mean
            known = self.class_count_[place]
            apart = mean - self.means_[place]
            scatter = offsets.T @ offsets + np.outer(apart, apart) * (known * count / (known + count))
            self._scatter[place if self._per_class else 0] += scatter
            self.means_[place] += apart * (count / (known + count))
            self.class_count_[place] = known + count
        self._solve()
        return self

    def _make_room(self, announced: np.ndarray) -> None:
        """Rows for classes that are new; `classes_` stays sorted."""
        if announced.dtype.kind != self.classes_.dtype.kind and "U" in announced.dtype.kind + self.classes_.dtype.kind:
            raise ValueError(
                f"labels were {self.classes_.dtype} and are {announced.dtype} now; give names or numbers, not both"
            )
        if self._per_class != (self.priors is not None):
            raise ValueError("priors were set or removed between two calls of partial_fit; call fit again")
        joined = np.union1d(self.classes_, announced)
        places = np.searchsorted(joined, self.classes_)

        def grown(rows: np.ndarray) -> np.ndarray:
            new = np.zeros((len(joined), *rows.shape[1:]))
            new[places] = rows
            return new

        if len(joined) > len(places):
            self.classes_, self.class_count_, self.means_ = joined, grown(self.class_count_), grown(self.means_)
            self._scatter = grown(self._scatter) if self._per_class else self._scatter

    # ------------------------------------------------------------------ solving

    def _check_settings(self) -> None:
        if isinstance(self.shrinkage, str):
            if self.shrinkage != "auto":
                raise ValueError(f"shrinkage={self.shrinkage!r}: give a number from 0 to 1, or 'auto'")
        elif not 0 <= self.shrinkage <= 1:
            raise ValueError(f"shrinkage={self.shrinkage}: give a number from 0 to 1, or 'auto'")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")
        if isinstance(self.priors, str) and self.priors != "uniform":
            raise ValueError(f"priors={self.priors!r}: give a probability for each class, 'uniform' or None")

    def _solve(self) -> None:
        seen = self.class_count_ > 0
        total = self.class_count_.sum()
        self.priors_ = self._priors(seen)
        if self._per_class:
            shares = np.divide(self.priors_, self.class_count_, out=np.zeros(len(seen)), where=seen)
            covariance = np.tensordot(shares, self._scatter, 1)
        else:
            covariance = self._scatter[0] / total
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

    def _scores(self, X: Any) -> np.ndarray:
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

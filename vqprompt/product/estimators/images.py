"""A `vqprompt.Model` as a scikit-learn classifier of images: paths, Pillow images or arrays in, class names out.

What is notable about this implementation:
- The attribute `model_` is a `vqprompt.Model`, so a fitted classifier can be saved, shown and taught from the command
  line.
- The features of an image do not depend on the split it falls into. The process remembers them by the image's content,
  so cross-validation and grid searches show each image to the network once.
- The backbone is not pickled with a model. Only its name is, and the backbone is loaded again where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import unique_labels
from sklearn.utils.validation import check_is_fitted

from vqprompt.product.model.extractor import Extractor
from vqprompt.product.model.model import CROP, Model
from vqprompt.product.model.network import open_extractor
from vqprompt.product.model.pictures import Picture, content_id

REMEMBERED = 20_000  # the first features per backbone; at 768 numbers each, 60 MB


class VQPromptClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifies images with a frozen Vision Transformer and a classifier in closed form.

    backbone: a name (`vqprompt backbones`) or a weights file. size: image size in px, the backbone's own by default.
    crop: side of the central crop, as a fraction of the short side; 0: the whole image, squashed. effort: as in
    `Model.learn`. device: "auto", "cpu", "cuda" … unknown: what `predict` answers for an image that is like no class;
    None: always the nearest class, as scikit-learn's metrics expect.

    Attributes after fitting: classes_, model_ (a `vqprompt.Model`).
    """

    def __init__(
        self,
        backbone: str | Path = "vit-s14",
        size: int | None = None,
        crop: float = CROP,
        effort: str = "instant",
        device: str = "auto",
        unknown: Any = None,
    ) -> None:
        self.backbone = backbone
        self.size = size
        self.crop = crop
        self.effort = effort
        self.device = device
        self.unknown = unknown

    def fit(self, X: Any, y: Any) -> VQPromptClassifier:
        """Learn images X (a list, or an array of them) with labels y (names or whole numbers), from scratch."""
        images, labels = _checked(X, y)
        model = Model(self.backbone, size=self.size, crop=self.crop, device=self.device, opener=open_remembering)
        model.learn(images, [str(label) for label in labels], effort=self.effort)
        self.model_, self.classes_ = model, unique_labels(labels)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> VQPromptClassifier:
        """Learn more images: new classes are added, known ones get better. classes: not needed, and ignored."""
        if not hasattr(self, "model_"):
            return self.fit(X, y)
        images, labels = _checked(X, y)
        if len({isinstance(label, str) for label in [*self.classes_.tolist(), *labels.tolist()]}) > 1:
            raise ValueError(
                f"labels were {self.classes_.dtype} and are {labels.dtype} now; give names or numbers, not both"
            )
        self.model_.learn(images, [str(label) for label in labels], effort=self.effort)
        self.classes_ = np.union1d(self.classes_, labels)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The class of each image."""
        shares, familiar = self._judged(X)
        best: np.ndarray = self.classes_[shares.argmax(1)]
        if self.unknown is None:
            return best
        best = best.astype(object) if not isinstance(self.unknown, type(self.classes_[0])) else best
        strange = familiar < 0
        return np.where(strange, np.array(self.unknown, dtype=object), best) if strange.any() else best

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [n, classes], in the order of `classes_`."""
        return self._judged(X)[0]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`."""
        return np.asarray(np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny)))

    def transform(self, X: Any) -> np.ndarray:
        """Features [n, D] of images under the backbone: for estimators of your own, such as `ClosedFormClassifier`."""
        check_is_fitted(self, "model_")
        return np.asarray(self.model_.embed(_images(X)))

    def _judged(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self, "model_")
        model = self.model_
        shares, familiar = model.judge(model.embed(_images(X)))
        place = {name: column for column, name in enumerate(model.classes)}
        return shares[:, [place[str(c)] for c in self.classes_]], familiar

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags


def _images(X: Any) -> list[Any]:
    if isinstance(X, str | Path) or not hasattr(X, "__len__"):
        raise ValueError("X: give a list (or an array) of images: paths, Pillow images or uint8 arrays")
    if getattr(X, "ndim", 1) == 2 and hasattr(X, "shape") and X.shape[1] == 1:  # one column, as tables have it
        X = np.asarray(X)[:, 0]
    images = list(X)
    if not images:
        raise ValueError("X has no image; give at least one")
    return images


def _checked(X: Any, y: Any) -> tuple[list[Any], np.ndarray]:
    images, labels = _images(X), np.asarray(y)
    if labels.ndim != 1 or len(labels) != len(images):
        raise ValueError(f"X has {len(images)} images and y has shape {list(labels.shape)}; give one label per image")
    if labels.dtype.kind == "f":
        raise ValueError("y: classes are names or whole numbers, not fractions")
    if odd := [label for label in labels.tolist() if not isinstance(label, str | int)]:
        raise ValueError(f"y: classes are names or whole numbers, not {odd[0]!r}")
    return images, labels


class RememberingExtractor:
    """Another extractor that remembers what it has seen, by content. Many threads may use it."""

    def __init__(self, extractor: Extractor) -> None:
        self.fingerprint, self.size, self.width = extractor.fingerprint, extractor.size, extractor.width
        self.precision, self.at_once, self._extractor = extractor.precision, extractor.at_once, extractor
        self._known: dict[int, np.ndarray] = {}

    def of_one(self, picture: Picture) -> np.ndarray | Exception:
        return next(self.of([picture]))

    def of(self, pictures: Iterable[Picture]) -> Iterator[np.ndarray | Exception]:
        by_id = [(_content_id(picture), picture) for picture in pictures]
        features: dict[int, np.ndarray | Exception] = {i: self._known[i] for i, _ in by_id if i in self._known}
        new = {i: picture for i, picture in by_id if i not in features}
        for i, feature in zip(new, self._extractor.of(new.values()), strict=True):
            features[i] = feature
            if not isinstance(feature, Exception) and len(self._known) < REMEMBERED:
                self._known[i] = feature
        return iter([features[i] for i, _ in by_id])


def _content_id(picture: Picture) -> int:
    try:
        return content_id(picture.open()) if picture.content_id is None else picture.content_id
    except Exception:
        return -id(picture)  # reading it again will say why


@lru_cache(maxsize=4)
def open_remembering(
    backbone: str, size: int | None, crop: float, device: str, precision: str | None
) -> RememberingExtractor:
    return RememberingExtractor(open_extractor(backbone, size, crop, device, precision))

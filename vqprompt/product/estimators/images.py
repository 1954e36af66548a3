"""A `vqprompt.Model` as a scikit-learn classifier of images: paths, Pillow images or arrays in, class names out.

What is notable about this implementation:
- The attribute `model_` is a `vqprompt.Model`, so a fitted classifier can be saved, shown and taught from the command
  line.
- The features of an image do not depend on the split it falls into. The process remembers them by the image's content,
  so cross-validation and grid searches show each image to the network once.
- The backbone is not pickled. Only its name is, and the backbone is loaded again where it is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import unique_labels
from sklearn.utils.validation import check_is_fitted

from vqprompt.product.model import file as files
from vqprompt.product.model.features import Features
from vqprompt.product.model.file import Backbone, Content, Stored
from vqprompt.product.model.model import CROP, Model
from vqprompt.product.model.pictures import Picture, name_of

REMEMBERED = 20_000  # features per backbone; at 768 numbers each, 60 MB


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
        model = self._prepared(Model(self.backbone, size=self.size, crop=self.crop, device=self.device))
        model.learn(images, [str(label) for label in labels], effort=self.effort)
        self.model_, self.classes_ = model, unique_labels(labels)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> VQPromptClassifier:
        """Learn more images: new classes are added, known ones get better. classes: not needed, and ignored."""
        if not hasattr(self, "model_"):
            return self.fit(X, y)
        images, labels = _checked(X, y)
        joined = np.union1d(self.classes_, labels)
        if len({str(c) for c in joined}) != len(joined) or joined.dtype.kind not in (self.classes_.dtype.kind, "O"):
            raise ValueError(
                f"labels were {self.classes_.dtype} and are {labels.dtype} now; give names or numbers, not both"
            )
        self._prepared(self.model_).learn(images, [str(label) for label in labels], effort=self.effort)
        self.classes_ = joined
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The class of each image."""
        shares, familiar = self._judged(X)
        best = self.classes_[shares.argmax(1)]
        if self.unknown is None:
            return best
        best = best.astype(object) if not isinstance(self.unknown, type(self.classes_[0])) else best
        strange = familiar < 0
        return np.where(strange, np.array(self.unknown, dtype=object), best) if strange.any() else best

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [n, classes], in the order of `classes_`."""
        return self._judged(X)[0]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def transform(self, X: Any) -> np.ndarray:
        """Features [n, D] of images under the backbone: for estimators of your own, such as `ClosedFormClassifier`."""
        check_is_fitted(self, "model_")
        return self._prepared(self.model_).embed(_images(X))

    def _judged(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self, "model_")
        model = self._prepared(self.model_)
        shares, familiar = model.judge(model.embed(_images(X)))
        place = {name: column for column, name in enumerate(model.classes)}
        return shares[:, [place[str(c)] for c in self.classes_]], familiar

    def _prepared(self, model: Model) -> Model:
        """The model, using the features that this process remembers if they come from the same backbone."""
        if not isinstance(model._features, _Remembering):
            shared = _shared_features(str(self.backbone), self.size, self.crop, self.device)
            if model._stored is None:
                model._stored = Stored(shared.backbone, Content(), np.zeros((shared.width, shared.width)))
            if model._stored.backbone == shared.backbone:
                model._features = shared
            else:
                _ = model.extractor  # says what is wrong, if anything is
        return model

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "model_" in state:
            stored = state["model_"]._stored
            state["model_"] = files.pack(stored)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.get("model_")
        super().__setstate__({k: v for k, v in state.items() if k != "model_"})
        if packed is not None:
            stored = files.parse(packed, Path("pickled model"))
            model = Model(self.backbone, size=stored.backbone.size, crop=stored.backbone.crop, device=self.device)
            model._stored = stored
            self.model_ = model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags


# ---------------------------------------------------------------------------------------------- images


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
    return images, labels


# ---------------------------------------------------------------------------------------------- features


class _Remembering:
    """`Features` that remembers what it has seen, by content. Many threads may use it."""

    def __init__(self, features: Features, backbone: Backbone) -> None:
        self.features, self.backbone = features, backbone
        self.known: OrderedDict[int, np.ndarray] = OrderedDict()
        self.lock = threading.Lock()

    @property
    def width(self) -> int:
        return self.features.width

    def seconds_per_image(self) -> float:
        return self.features.seconds_per_image()

    def of_one(self, picture: Picture) -> np.ndarray | Exception:
        return next(iter(self.of([picture])))

    def of(self, pictures: Iterable[Picture]) -> Iterator[np.ndarray | Exception]:
        pictures = list(pictures)
        names = [self._name(p) for p in pictures]
        with self.lock:
            held = {name: self.known[name] for name in names if isinstance(name, int) and name in self.known}
        computed = self.features.of([p for p, name in zip(pictures, names, strict=True) if name not in held])
        for name in names:
            feature: np.ndarray | Exception = held[name] if name in held else next(computed)  # type: ignore[index]
            if isinstance(name, int) and not isinstance(feature, Exception):
                with self.lock:
                    self.known[name] = feature
                    self.known.move_to_end(name)
                    while len(self.known) > REMEMBERED:
                        self.known.popitem(last=False)
            yield feature

    @staticmethod
    def _name(picture: Picture) -> int | None:
        try:
            return name_of(picture.open())
        except Exception:
            return None  # whoever opens it next says why


@lru_cache(maxsize=4)
def _shared_features(backbone: str, size: int | None, crop: float, device: str) -> _Remembering:
    model = Model(backbone, size=size, crop=crop, device=device)
    features = model.extractor
    assert model._stored is not None
    return _Remembering(features, model._stored.backbone)

"""Ask a model: classes, probabilities, features."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vqprompt.core.data.decode import ImageLike
from vqprompt.core.errors import UserError
from vqprompt.product.model.calibration import Solution
from vqprompt.product.model.extractor import Extractor, unless_error
from vqprompt.product.model.file import ModelError
from vqprompt.product.model.knowledge import Backbone, Knowledge, Stored
from vqprompt.product.model.network import Network
from vqprompt.product.model.pictures import UNKNOWN, find_pictures, is_one

if TYPE_CHECKING:
    from vqprompt.product.model.efforts import Trained
    from vqprompt.product.model.features import Features


@dataclass(frozen=True)
class Answer:
    """What is in one image. name: the best class, or "unknown". classes: the best ones with their probabilities.
    familiarity: how far the image is above the threshold for known images; below 0 it is unknown. note: what to say
    instead of percentages, where too few images were taught to check them."""

    name: str
    classes: tuple[tuple[str, float], ...]
    familiarity: float
    note: str = ""

    @property
    def shares(self) -> dict[str, float | None]:
        """What to show of the best classes: None where a percentage would contradict the name or the note."""
        shown = self.name != UNKNOWN and not self.note
        return {name: share if shown else None for name, share in self.classes}


class Predicting:
    """The part of `Model` that answers questions about images. Each answer is that of one version, also while another
    thread changes the model."""

    path: Path | None
    _network: Network
    _stored: Stored | None
    _changing: threading.RLock

    @property
    def knowledge(self) -> Knowledge:
        """Everything that the model knows now; a value that never changes."""
        return Knowledge() if self._stored is None else self._stored.knowledge

    @property
    def backbone(self) -> Backbone:
        """The network that it was taught with. A new model opens it to know."""
        return self._opened().backbone

    @property
    def weights(self) -> str:
        """The name of its backbone, or the path of its weights file."""
        return self._network.weights

    @property
    def extractor(self) -> Extractor:
        """What computes features under the model's network: its backbone, and what was trained."""
        return self.extractor_of(self.knowledge)

    @property
    def network(self) -> Features:
        """The extractor in PyTorch, with the network inside."""
        return self._in_torch(self.knowledge.trained)

    def extractor_of(self, known: Knowledge) -> Extractor:
        with self._naming_the_file():
            return self._network.open(self._opened().backbone, known.trained)

    def _in_torch(self, trained: Trained | None) -> Features:
        with self._naming_the_file():
            return self._network.in_torch(self._opened().backbone, trained)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except ModelError:
            raise
        except UserError as error:
            raise ModelError(f"{self.path or 'the model'}: {error}") from None

    def _opened(self) -> Stored:
        """What it holds; a new model opens its network for that."""
        if self._stored is None:
            backbone = self._network.backbone
            with self._changing:
                if self._stored is None:
                    self._stored = Stored.empty(backbone)
        return self._stored

    def predict(
        self, pictures: ImageLike | Sequence[ImageLike], *, unknown: bool = True, strictness: float = 0.0
    ) -> Any:
        """The class of one image (a name), or of several (a list of names); "unknown" for what is like no class.

        unknown: False always names a class. strictness: moves the threshold; above 0, more images are called unknown.
        """
        answers = self.answers(pictures, unknown=unknown, strictness=strictness)
        return answers[0].name if is_one(pictures) else [a.name for a in answers]

    def predict_proba(self, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Probabilities [n, classes] of several images, or [classes] of one, in the order of `classes`."""
        known, extractor = self._taught()
        shares = solution_of(known).judge(_embed(extractor, pictures))[0]
        return shares[0] if is_one(pictures) else shares

    def answers(
        self, pictures: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: bool = True, strictness: float = 0.0
    ) -> list[Answer]:
        """One answer per image, with the `top` best classes."""
        answers = self.try_answers(pictures, top=top, unknown=unknown, strictness=strictness)
        return [unless_error(answer) for answer in answers]

    def try_answers(
        self, pictures: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: bool = True, strictness: float = 0.0
    ) -> list[Answer | Exception]:
        """Like `answers`, but an image that cannot be read gives its error instead of an answer."""
        known, extractor = self._taught()
        features = _try_embed(extractor, pictures)
        good = [f for f in features if not isinstance(f, Exception)]
        answers = iter(answers_to(known, np.stack(good), top, unknown, strictness) if good else ())
        return [f if isinstance(f, Exception) else next(answers) for f in features]

    def embed(self, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Features [n, D] of images under the model's network."""
        return _embed(self.extractor_of(self.knowledge), pictures)

    def judge(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features [n, D] to probabilities [n, classes], and familiarity [n]: below 0 is unknown."""
        return solution_of(self.knowledge).judge(features)

    def check_taught(self) -> None:
        solution_of(self.knowledge)

    def _taught(self) -> tuple[Knowledge, Extractor]:
        known = self.knowledge
        solution_of(known)  # refused before the backbone is loaded
        return known, self.extractor_of(known)


def solution_of(known: Knowledge) -> Solution:
    if known.solution is None:
        raise UserError("the model has learned nothing yet; teach it with learn")
    return known.solution


def answers_to(known: Knowledge, features: np.ndarray, top: int, unknown: bool, strictness: float) -> list[Answer]:
    """Features [n, D] to what is in the images."""
    classes, answers = list(known.classes), []
    shares, margins = solution_of(known).judge(features)
    for row, margin in zip(shares, margins.tolist(), strict=True):
        best = np.argsort(-row, kind="stable")[:top]
        is_unknown = unknown and margin < strictness
        named = tuple((classes[i], float(row[i])) for i in best)
        answers.append(Answer(UNKNOWN if is_unknown else named[0][0], named, margin, note_about(known, named[0][0])))
    return answers


def note_about(known: Knowledge, name: str) -> str:
    """Why a class has no percentage, if it has none: percentages are checked with images that are left out."""
    if len(known.classes) == 1:
        return "no percentage: the model knows no other class"
    return "no percentage: taught with one image" if known.classes[name].count == 1 else ""


def _embed(extractor: Extractor, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
    rows = [unless_error(feature) for feature in _try_embed(extractor, pictures)]
    return np.stack(rows) if rows else np.zeros((0, extractor.width), np.float32)


def _try_embed(extractor: Extractor, pictures: ImageLike | Sequence[ImageLike]) -> list[np.ndarray | Exception]:
    found, _ = find_pictures(pictures, "picture")
    return [extractor.of_one(found[0])] if len(found) == 1 else list(extractor.of(found))

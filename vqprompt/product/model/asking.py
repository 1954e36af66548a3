"""Ask a model: classes, probabilities, features, and which prompts an image uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vqprompt.core.errors import UserError
from vqprompt.core.statistics.discriminant import probabilities
from vqprompt.product.model.answers import Answer, PromptUse
from vqprompt.product.model.calibration import familiarity
from vqprompt.product.model.file import Content
from vqprompt.product.model.pictures import UNKNOWN, ImageLike, find_pictures
from vqprompt.product.model.solving import background_of, calibration_of


class Asking:
    """The part of `Model` that answers questions about images."""

    @property
    def classes(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def knowledge(self) -> Content:
        raise NotImplementedError

    @property
    def extractor(self) -> Any:
        raise NotImplementedError

    def predict(
        self, pictures: ImageLike | Sequence[ImageLike], *, unknown: bool = True, strictness: float = 0.0
    ) -> Any:
        """The class of one image (a name), or of several (a list of names); "unknown" for what is like no class.

        unknown: False always names a class. strictness: moves the threshold; above 0, more images are called unknown.
        """
        answers = self.answers(pictures, unknown=unknown, strictness=strictness)
        return answers[0].name if _is_one(pictures) else [a.name for a in answers]

    def predict_proba(self, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Probabilities [n, classes] of several images, or [classes] of one, in the order of `classes`."""
        shares = self._asked(pictures)[0]
        return shares[0] if _is_one(pictures) else shares

    def answers(
        self, pictures: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: bool = True, strictness: float = 0.0
    ) -> list[Answer]:
        """One answer per image, with the `top` best classes."""
        return self._answers(*self._asked(pictures), top, unknown, strictness)

    def try_answers(
        self, pictures: Sequence[ImageLike], *, top: int = 1, unknown: bool = True, strictness: float = 0.0
    ) -> list[Answer | Exception]:
        """Like `answers`, but an image that cannot be read gives its error instead of an answer."""
        self.check_taught()
        features = self._embed(pictures)
        good = [f for f in features if not isinstance(f, Exception)]
        answers = iter(self._answers(*self.judge(np.stack(good)), top, unknown, strictness) if good else ())
        return [f if isinstance(f, Exception) else next(answers) for f in features]

    def _answers(
        self, shares: np.ndarray, margins: np.ndarray, top: int, unknown: bool, strictness: float
    ) -> list[Answer]:
        classes = self.classes
        answers = []
        for row, margin in zip(shares, margins.tolist(), strict=True):
            best = np.argsort(-row, kind="stable")[:top]
            is_unknown = unknown and margin < strictness
            named = tuple((classes[i], float(row[i])) for i in best)
            answers.append(Answer(UNKNOWN if is_unknown else named[0][0], named, margin))
        return answers

    def embed(self, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Features [n, D] of images under the model's backbone."""
        rows = []
        for feature in self._embed([pictures] if _is_one(pictures) else list(pictures)):  # type: ignore[list-item, arg-type]
            if isinstance(feature, Exception):
                raise feature
            rows.append(feature)
        return np.stack(rows) if rows else np.zeros((0, self.extractor.width), np.float32)

    def _embed(self, pictures: Sequence[ImageLike]) -> list[np.ndarray | Exception]:
        wrapped, _ = find_pictures(list(pictures), "picture")
        extractor = self.extractor
        return [extractor.of_one(wrapped[0])] if len(wrapped) == 1 else list(extractor.of(wrapped))

    def judge(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features [n, D] to probabilities [n, classes], and familiarity [n]: below 0 is unknown."""
        content = self.knowledge
        self.check_taught()
        assert content.solved is not None
        calibration = calibration_of(content.facts)
        scores = content.solved.scores(features)
        shares = probabilities(scores, calibration.temperature)
        if content.spread is None or not np.isfinite(calibration.threshold):
            return shares, np.full(len(features), np.inf)
        nearness = background_of(content).scores(features) + 2 * scores.max(1)
        return shares, familiarity(shares, nearness, calibration) - calibration.threshold

    def prompts_used(self, pictures: ImageLike | Sequence[ImageLike]) -> list[list[PromptUse]]:
        """Which prompts each image uses, block by block; an empty list per image for models without prompts."""
        wrapped, _ = find_pictures([pictures] if _is_one(pictures) else list(pictures), "picture")  # type: ignore[arg-type]
        trained = self.knowledge.trained
        if trained is None or "pool.prompts" not in trained.tensors:
            return [[] for _ in wrapped]
        from vqprompt.product.model.prompt_use import prompts_used

        return prompts_used(self.extractor, trained, wrapped)

    def _asked(self, pictures: ImageLike | Sequence[ImageLike]) -> tuple[np.ndarray, np.ndarray]:
        self.check_taught()
        return self.judge(self.embed(pictures))

    def check_taught(self) -> None:
        if self.knowledge.solved is None:
            raise UserError("the model has learned nothing yet; teach it with learn")


def _is_one(pictures: Any) -> bool:
    array = isinstance(pictures, np.ndarray) and pictures.ndim < 4
    return array or isinstance(pictures, str | Path | bytes | Image.Image)

"""A snapshot of a learner: it only predicts, never changes, and can be used from many threads at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.decode import load_pixels
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import STORED_MARGIN, Store, stored_side
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.device import Runtime
from vqprompt.research.learner.build import rebuild_method
from vqprompt.research.learner.evaluator import Evaluator
from vqprompt.research.learner.state import SavedState
from vqprompt.research.methods.base import Method

Picture = str | Path | Image.Image | np.ndarray
"""An image file, a Pillow image, or a uint8 array [H, W], [H, W, 3] or [H, W, 4]."""
OPENED_AT_ONCE = 256  # pictures in memory at the same time, already shrunk


class Predictor:
    """
    predictor = learner.predictor()         # a snapshot; the learner can go on
    predictor = Predictor.load("runs/birds")
    predictor.predict(["garden.jpg"])
    """

    def __init__(
        self, method: Method, classes: Sequence[str], runtime: Runtime, test_crop: float, stored: float = STORED_MARGIN
    ) -> None:
        """method: the predictor's own copy; nothing else may change it. test_crop, stored: see `Training`."""
        self.classes, self._stored = tuple(classes), stored
        self._evaluator = Evaluator(method.eval(), runtime, test_crop)

    @classmethod
    def load(
        cls, folder: str | Path, device: str = "auto", precision: str = "auto", compile: str = "auto",
        deterministic: bool = True, backbone: str | Path | ViT | None = None,
    ) -> Predictor:  # fmt: skip
        """What `Learner.save` or a run wrote. backbone: where the weights are now, if they have moved."""
        state, runtime = SavedState.read(Path(folder)), Runtime.pick(device, precision, compile, deterministic)
        built = rebuild_method(state, runtime, backbone)
        built.method.end_task()  # drops what only training needs
        training = state.record.training
        return cls(built.method, state.record.classes, runtime, training.test_crop, training.stored)

    def predict_proba(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """Probabilities [n, classes] of one picture or of several."""
        return predict_proba(self._evaluator, self.classes, pictures, self._stored)

    def predict(self, pictures: Picture | Sequence[Picture]) -> list[str]:
        """The most likely class of each picture."""
        return [self.classes[i] for i in self.predict_proba(pictures).argmax(dim=1).tolist()]

    def predict_each(self, pictures: Sequence[Picture]) -> Iterator[Tensor | UserError]:
        """Probabilities [classes] of each picture, or why it cannot be used. At most a few hundred pictures are in
        memory at a time, already shrunk."""
        return predict_each(self._evaluator, self.classes, pictures, self._stored)


def predict_proba(
    evaluator: Evaluator, classes: Sequence[str], pictures: Picture | Sequence[Picture], stored: float = STORED_MARGIN
) -> Tensor:
    if isinstance(pictures, str | Path | Image.Image) or (isinstance(pictures, np.ndarray) and pictures.ndim < 4):
        pictures = [pictures]
    rows = []
    for row in predict_each(evaluator, classes, list(pictures), stored):
        if isinstance(row, UserError):
            raise row
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, len(classes))


def predict_each(
    evaluator: Evaluator, classes: Sequence[str], pictures: Sequence[Picture], stored: float
) -> Iterator[Tensor | UserError]:
    if not classes:
        raise UserError("nothing has been learned yet; learn a task first")
    side = stored_side(evaluator.method.vit.config.image_size, stored)
    for start in range(0, len(pictures), OPENED_AT_ONCE):
        part = [_open(picture, side) for picture in pictures[start : start + OPENED_AT_ONCE]]
        good = [opened for opened in part if not isinstance(opened, UserError)]
        scores: Iterator[Tensor] = iter(())
        if good:
            store = Store(np.stack([pixels for pixels, _ in good]), np.array([a for _, a in good]), fingerprint="")
            logits = evaluator.logits(Images(store, np.arange(len(good)), np.zeros(len(good))))
            # in the middle of a task, there are also scores of classes that are not learned yet: they are cut off
            scores = iter(logits[:, : len(classes)].softmax(dim=1).cpu())
        for opened in part:
            yield opened if isinstance(opened, UserError) else next(scores)


def _open(picture: Picture, side: int) -> tuple[np.ndarray, float] | UserError:
    """Pixels, already shrunk to what the network needs, and aspect ratio."""
    try:
        return load_pixels(picture, side)
    except UserError as error:
        return error

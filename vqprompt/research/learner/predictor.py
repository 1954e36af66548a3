"""A snapshot of a learner: it only predicts, never changes, and can be used from many threads at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.decode import STORED_MARGIN, decode_pixels, stored_side
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.cores import parallel
from vqprompt.core.runtime.device import Runtime
from vqprompt.research.learner.build import rebuild_method
from vqprompt.research.learner.evaluator import Evaluator
from vqprompt.research.learner.state import SavedState

Picture = str | Path | Image.Image | np.ndarray
"""An image file, a Pillow image, or a uint8 array [H, W], [H, W, 3] or [H, W, 4]."""
OPENED_AT_ONCE = 256  # pictures in memory at the same time, already shrunk


class Predictor:
    """
    predictor = learner.predictor()         # a snapshot; the learner can go on
    predictor = Predictor.load("runs/birds")
    predictor.predict(["garden.jpg"])
    """

    def __init__(self, evaluator: Evaluator, classes: Sequence[str], stored: float = STORED_MARGIN) -> None:
        """evaluator: of a method that nothing else changes. stored: see `Training`."""
        self._evaluator, self.classes = evaluator, tuple(classes)
        self._side = stored_side(evaluator.method.vit.config.image_size, stored)

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
        return cls(Evaluator(built.method, runtime, training.test_crop), state.record.classes, training.stored)

    def predict_proba(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """Probabilities [n, classes] of one picture or of several."""
        if isinstance(pictures, str | Path | Image.Image) or (isinstance(pictures, np.ndarray) and pictures.ndim < 4):
            pictures = [pictures]
        rows = []
        for row in self.predict_each(list(pictures)):
            if isinstance(row, UserError):
                raise row
            rows.append(row)
        return torch.stack(rows) if rows else torch.zeros(0, len(self.classes))

    def predict(self, pictures: Picture | Sequence[Picture]) -> list[str]:
        """The most likely class of each picture."""
        return [self.classes[i] for i in self.predict_proba(pictures).argmax(dim=1).tolist()]

    def predict_each(self, pictures: Sequence[Picture]) -> Iterator[Tensor | UserError]:
        """Probabilities [classes] of each picture, or why it cannot be used. At most a few hundred pictures are in
        memory at a time, already shrunk."""
        if not self.classes:
            raise UserError("nothing has been learned yet; learn a task first")
        for start in range(0, len(pictures), OPENED_AT_ONCE):
            part = list(parallel(self._open, pictures[start : start + OPENED_AT_ONCE]))
            good = [opened for opened in part if not isinstance(opened, UserError)]
            scores: Iterator[Tensor] = iter(())
            if good:
                store = Store(np.stack([pixels for pixels, _ in good]), np.array([a for _, a in good]), fingerprint="")
                logits = self._evaluator.logits(Images(store, np.arange(len(good)), np.zeros(len(good))))
                # in the middle of a task, there are also scores of classes that are not learned yet: they are cut off
                scores = iter(logits[:, : len(self.classes)].softmax(dim=1).cpu())
            for opened in part:
                yield opened if isinstance(opened, UserError) else next(scores)

    def _open(self, picture: Picture) -> tuple[np.ndarray, float] | UserError:
        """Pixels and the true width / height, or why there are none."""
        try:
            return decode_pixels(picture, "an image", self._side)
        except UserError as error:
            return error

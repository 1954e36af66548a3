"""What was learned at one moment: it only predicts, never changes, and can be used from many threads at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vqprompt.backbones.vit import ViT
from vqprompt.data.decode import load_pixels
from vqprompt.data.images import Images
from vqprompt.data.store import Store, stored_side
from vqprompt.errors import UserError
from vqprompt.learner.build import rebuild_method
from vqprompt.learner.evaluator import Evaluator
from vqprompt.learner.state import SavedState
from vqprompt.methods.base import Method
from vqprompt.runtime import Runtime
from vqprompt.training.settings import Training

Picture = str | Path | Image.Image | np.ndarray
"""An image file, a Pillow image, or a uint8 array [H, W], [H, W, 3] or [H, W, 4]."""
Refused = dict[int, UserError]
OPENED_AT_ONCE = 256  # pictures whose pixels are in memory, already shrunk to what the network needs


class Predictor:
    """
    predictor = learner.predictor()         # a snapshot; the learner can go on
    predictor = Predictor.load("runs/birds")
    predictor.predict(["garden.jpg"])
    """

    def __init__(self, method: Method, classes: Sequence[str], runtime: Runtime, test_crop: float) -> None:
        """method: nobody else may change it."""
        self.classes = tuple(classes)
        self._evaluator = Evaluator(method.eval(), runtime, test_crop)

    @classmethod
    def load(
        cls, folder: str | Path, device: str = "auto", precision: str = "auto", compile: str = "auto",
        deterministic: bool = True, backbone: str | Path | ViT | None = None,
    ) -> Predictor:  # fmt: skip
        """What `Learner.save` or a run wrote. backbone: where the weights are now, if not where they were."""
        state, runtime = SavedState.read(Path(folder)), Runtime.pick(device, precision, compile, deterministic)
        built = rebuild_method(state, runtime, backbone)
        built.method.end_task()  # what only training needs
        return cls(built.method, state.info["classes"], runtime, Training(**state.info["training"]).test_crop)

    def predict_proba(self, pictures: Picture | Sequence[Picture], refused: Refused | None = None) -> Tensor:
        """Probabilities [n, classes] of one picture or of several.

        refused: collects the errors of pictures that cannot be used, by their positions. They get no row. Without it,
        the first one is raised.
        """
        return predict_proba(self._evaluator, self.classes, pictures, refused)

    def predict(self, pictures: Picture | Sequence[Picture]) -> list[str]:
        """The most likely class of each picture."""
        return [self.classes[i] for i in self.predict_proba(pictures).argmax(dim=1).tolist()]


def predict_proba(
    evaluator: Evaluator, classes: Sequence[str], pictures: Picture | Sequence[Picture], refused: Refused | None = None
) -> Tensor:
    if not classes:
        raise UserError("nothing has been learned yet; learn a task first")
    if isinstance(pictures, str | Path | Image.Image) or (isinstance(pictures, np.ndarray) and pictures.ndim < 4):
        pictures = [pictures]
    # in the middle of a task there are rows for classes to come: they are cut off
    found = [
        evaluator.logits(images)[:, : len(classes)].softmax(dim=1).cpu()
        for images in _opened(list(pictures), evaluator.method.vit.config.image_size, refused)
    ]
    return torch.cat(found) if found else torch.zeros(0, len(classes))


def _opened(pictures: Sequence[Picture], size: int, refused: Refused | None) -> Iterator[Images]:
    """The pictures, a part at a time; each is shrunk to what the network needs as it is opened."""
    side = stored_side(size)
    for start in range(0, len(pictures), OPENED_AT_ONCE):
        part = []
        for position in range(start, min(start + OPENED_AT_ONCE, len(pictures))):
            try:
                part.append(load_pixels(pictures[position], side))
            except UserError as error:
                if refused is None:
                    raise
                refused[position] = error
        if part:
            pixels, aspects = zip(*part, strict=True)
            yield Images(Store(np.stack(pixels), np.array(aspects), ""), np.arange(len(part)), np.zeros(len(part)))

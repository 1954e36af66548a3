"""A model's network: opened when it is first needed, and checked against the one that the model was taught with."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vqprompt.core.errors import UserError
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.extractor import Extractor, Opener
from vqprompt.product.model.knowledge import LARGEST_SIZE, Backbone
from vqprompt.product.model.parsing import ModelError

if TYPE_CHECKING:
    from vqprompt.product.model.features import Features


def open_extractor(backbone: str, size: int | None, crop: float, device: str) -> Extractor:
    """PyTorch's, which is slow to import."""
    from vqprompt.product.model.features import open_features

    return open_features(backbone, size, crop, device)


class Network:
    """weights: the name of a backbone, or the path of a weights file. opener: of what computes features, while nothing
    is trained. A copy, or a pickled one, opens its own."""

    def __init__(self, weights: str, size: int | None, crop: float, device: str, opener: Opener) -> None:
        if size is not None and not 1 <= size <= LARGEST_SIZE:
            raise UserError(f"size={size}: images can be 1 to {LARGEST_SIZE} px wide")
        if not 0 <= crop <= 1:
            raise UserError(f"crop={crop} must be a share from 0 to 1")
        self.weights, self.size, self.crop, self.device, self.opener = weights, size, crop, device, opener
        self._lock = threading.Lock()
        self._plain: Extractor | None = None
        self._trained: tuple[Trained, Features] | None = None

    def __reduce__(self) -> Any:
        return Network, (self.weights, self.size, self.crop, self.device, self.opener)

    def open(self, wanted: Backbone | None) -> Extractor:
        """The bare backbone. wanted: the one that the model was taught with."""
        with self._lock:
            if self._plain is None:
                self._plain = self.opener(self.weights, self.size, self.crop, self.device)
        given = self._plain
        if wanted is not None and given.fingerprint != wanted.fingerprint:
            raise ModelError(
                f"the model was taught with the backbone {wanted.name} ({wanted.fingerprint[:12]}), and {self.weights} "
                f"has other weights ({given.fingerprint[:12]}); give the right ones with --backbone"
            )
        if wanted is not None and given.width != wanted.width:
            raise ModelError(f"the model has features of width {wanted.width}, and {self.weights} of {given.width}")
        return given

    @property
    def backbone(self) -> Backbone:
        """For a new model."""
        from vqprompt.core.backbones.load import backbone_path

        plain = self.open(None)
        return Backbone(backbone_path(self.weights), plain.fingerprint, plain.size, self.crop, plain.width)

    def in_torch(self, wanted: Backbone, trained: Trained | None) -> Features:
        """In PyTorch, with what was trained."""
        from vqprompt.product.model.features import open_features

        self.open(wanted)
        plain = open_features(self.weights, self.size, self.crop, self.device)
        if trained is None:
            return plain
        from vqprompt.product.model.trained import with_trained

        with self._lock:
            if self._trained is None or self._trained[0] is not trained:
                self._trained = trained, with_trained(plain, trained)
            return self._trained[1]

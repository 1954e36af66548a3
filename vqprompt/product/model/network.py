"""A model's network: opened when it is first needed, and checked against the one that the model was taught with.

ONNX Runtime computes features on CPUs, PyTorch on GPUs. PyTorch is slow to import, so it is imported only where it is
needed. A model is asked with the precision that it was taught with, where the machine can do that.
"""

from __future__ import annotations

import sys
import threading
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt.core.backbones.weights import Weights, backbone_path, read_weights
from vqprompt.core.errors import UserError
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.extractor import Extractor, Opener
from vqprompt.product.model.file import ModelError
from vqprompt.product.model.knowledge import LARGEST_SIZE, Backbone
from vqprompt.product.model.onnx_features import OnnxFeatures

if TYPE_CHECKING:
    from vqprompt.product.model.features import Features

DRIVERS = ("nvidiactl", "kfd", "dxg")  # files in /dev that Linux has with a GPU: Nvidia's, AMD's, that of Windows
_opening = threading.Lock()


def on_gpu(device: str) -> bool:
    """Whether a device ("auto", "cpu", "cuda" …) is a GPU; for "auto", if there is one. Asks PyTorch only if there may
    be one."""
    if device == "cpu":
        return False
    if device == "auto":
        there = sys.platform != "linux" or any(Path("/dev", name).exists() for name in DRIVERS)
        if not there or find_spec("torch") is None:
            return False
    from vqprompt.core.runtime.device import pick_device

    return pick_device(device).type != "cpu"


def needs_torch(backbone: str, device: str) -> bool:
    return on_gpu(device) or bool(open_weights(backbone).config.particular)


def open_extractor(
    backbone: str, size: int | None, crop: float, device: str, precision: str | None = None
) -> Extractor:
    """An `Opener`. Models of one process share what it opens."""
    if needs_torch(backbone, device):
        return open_in_torch(backbone, size, crop, device)
    with _opening:
        return _open_onnx(open_weights(backbone), size, crop, None, precision)


def open_in_torch(backbone: str, size: int | None, crop: float, device: str) -> Features:
    from vqprompt.product.model.features import open_features

    with _opening:
        return open_features(open_weights(backbone), size, crop, device)


_open_onnx = lru_cache(maxsize=2)(OnnxFeatures)


def _with_trained(plain: Features, trained: Trained) -> Features:
    from vqprompt.product.model.trained import with_trained

    return with_trained(plain, trained)


def open_weights(backbone: str) -> Weights:
    """Models of one process share them."""
    path = Path(backbone).expanduser()
    status = path.stat() if path.is_file() else None
    return _read_weights(backbone, None if status is None else (status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=2)
def _read_weights(backbone: str, stamp: tuple[int, int] | None) -> Weights:
    """stamp: of the file, which may have changed since it was read."""
    return read_weights(backbone)


class Network:
    """weights: the name of a backbone, or the path of a weights file. opener: of what computes features, while nothing
    is trained. precision: of features; None: the faster one. A copy, or a pickled one, opens its own."""

    def __init__(
        self, weights: str, size: int | None, crop: float, device: str, opener: Opener, precision: str | None = None
    ) -> None:
        if size is not None and not 1 <= size <= LARGEST_SIZE:
            raise UserError(f"size={size}: images can be 1 to {LARGEST_SIZE} px wide")
        if not 0 <= crop <= 1:
            raise UserError(f"crop={crop} must be a share from 0 to 1")
        self.weights, self.size, self.crop, self.device, self.opener = weights, size, crop, device, opener
        self.precision = precision
        self._lock = threading.RLock()
        self._checked: Backbone | None = None
        self._plain, self._trained = lru_cache(1)(opener), lru_cache(1)(OnnxFeatures)
        self._trained_in_torch = lru_cache(1)(_with_trained)

    def __reduce__(self) -> Any:
        return Network, (self.weights, self.size, self.crop, self.device, self.opener, self.precision)

    def open(self, wanted: Backbone | None, trained: Trained | None = None) -> Extractor:
        """wanted: the backbone that the model was taught with. trained: what changes it."""
        with self._lock:
            plain = self._plain(self.weights, self.size, self.crop, self.device, self.precision)
            if wanted is not None and wanted is not self._checked:
                self._check(plain, wanted)
                self._checked = wanted
            if trained is None:
                return plain
            if needs_torch(self.weights, self.device):
                return self.in_torch(wanted, trained)
            return self._trained(open_weights(self.weights), self.size, self.crop, trained, self.precision)

    def _check(self, given: Extractor, wanted: Backbone) -> None:
        if given.fingerprint != wanted.fingerprint and self._resized_fingerprint() != wanted.fingerprint:
            raise ModelError(
                f"the model was taught with the backbone {wanted.name} ({wanted.fingerprint[:12]}), and {self.weights} "
                f"has other weights ({given.fingerprint[:12]}); give the right ones with --backbone"
            )
        if given.width != wanted.width:
            raise ModelError(f"the model has features of width {wanted.width}, and {self.weights} of {given.width}")
        if given.precision != wanted.precision:
            warnings.warn(
                f"the model was taught with features in {wanted.precision}. This machine computes them in "
                f"{given.precision}, which differs by about 0.02 %: percentages may differ in their last digit",
                stacklevel=2,
            )

    def _resized_fingerprint(self) -> str | None:
        """As older models state it: of the weights after PyTorch had resampled their positions to the model's size."""
        weights = open_weights(self.weights)
        if self.size in (None, weights.config.image_size):
            return None
        from vqprompt.core.backbones.load import fingerprint, make_vit

        return fingerprint(make_vit(weights, self.size))

    @property
    def backbone(self) -> Backbone:
        """For a new model."""
        plain = self.open(None)
        path = backbone_path(self.weights)
        return Backbone(path, plain.fingerprint, plain.size, self.crop, plain.width, plain.precision)

    def in_torch(self, wanted: Backbone | None, trained: Trained | None) -> Features:
        """In PyTorch on any device, with the network inside."""
        self.open(wanted)
        plain = open_in_torch(self.weights, self.size, self.crop, self.device)
        with self._lock:
            return plain if trained is None else self._trained_in_torch(plain, trained)

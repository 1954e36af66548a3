"""vqprompt: a Vision Transformer that keeps learning new classes, without keeping old images.

The names below are imported when they are first used, so that `import vqprompt` and `vqprompt --help` do not wait for
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vqprompt._version import __version__

if TYPE_CHECKING:
    from vqprompt.backbones.load import load_backbone
    from vqprompt.data.stream import Stream
    from vqprompt.datasets import open_dataset
    from vqprompt.estimators.features import ClosedFormClassifier
    from vqprompt.estimators.images import VQPromptClassifier
    from vqprompt.learner.learner import Learner
    from vqprompt.learner.predictor import Predictor
    from vqprompt.methods import METHODS
    from vqprompt.model.model import Model
    from vqprompt.training.settings import Training

__all__ = [
    "METHODS", "ClosedFormClassifier", "Learner", "Model", "Predictor", "Stream", "Training", "VQPromptClassifier",
    "__version__", "load_backbone", "open_dataset",
]  # fmt: skip

_HOMES = {
    "METHODS": "vqprompt.methods",
    "ClosedFormClassifier": "vqprompt.estimators.features",
    "VQPromptClassifier": "vqprompt.estimators.images",
    "Learner": "vqprompt.learner.learner",
    "Model": "vqprompt.model.model",
    "Predictor": "vqprompt.learner.predictor",
    "Stream": "vqprompt.data.stream",
    "Training": "vqprompt.training.settings",
    "load_backbone": "vqprompt.backbones.load",
    "open_dataset": "vqprompt.datasets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""vqprompt: a Vision Transformer that keeps learning new classes, without keeping old images.

The names below are imported when they are first used, so that `import vqprompt` and `vqprompt --help` do not wait for
torch.
"""

from __future__ import annotations

from importlib import import_module

from vqprompt._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`: a command takes Ctrl-C well only after this file
    from typing import Any

    from vqprompt.core.backbones.load import load_backbone
    from vqprompt.core.data.stream import Stream
    from vqprompt.product.estimators.features import ClosedFormClassifier
    from vqprompt.product.estimators.images import VQPromptClassifier
    from vqprompt.product.model.model import Model
    from vqprompt.research.datasets import open_dataset
    from vqprompt.research.learner.learner import Learner
    from vqprompt.research.learner.predictor import Predictor
    from vqprompt.research.methods import METHODS
    from vqprompt.research.training.settings import Training

__all__ = [
    "METHODS", "ClosedFormClassifier", "Learner", "Model", "Predictor", "Stream", "Training", "VQPromptClassifier",
    "__version__", "load_backbone", "open_dataset",
]  # fmt: skip

_HOMES = {
    "METHODS": "vqprompt.research.methods",
    "ClosedFormClassifier": "vqprompt.product.estimators.features",
    "VQPromptClassifier": "vqprompt.product.estimators.images",
    "Learner": "vqprompt.research.learner.learner",
    "Model": "vqprompt.product.model.model",
    "Predictor": "vqprompt.research.learner.predictor",
    "Stream": "vqprompt.core.data.stream",
    "Training": "vqprompt.research.training.settings",
    "load_backbone": "vqprompt.core.backbones.load",
    "open_dataset": "vqprompt.research.datasets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""vqprompt: a frozen Vision Transformer that learns classes as they come, without keeping old images."""

from vqprompt._version import __version__
from vqprompt.backbones.load import load_backbone
from vqprompt.data.stream import Stream
from vqprompt.datasets import open_dataset
from vqprompt.learner.learner import Learner
from vqprompt.training.settings import Training

__all__ = ["Learner", "Stream", "Training", "__version__", "load_backbone", "open_dataset"]


_LAZY = {
    "Model": "vqprompt.model.model",
    "ClosedFormClassifier": "vqprompt.estimators.features",
    "VQPromptClassifier": "vqprompt.estimators.images",
}


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    if name in _LAZY:  # scikit-learn and the model take a moment to import
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""vqprompt: a frozen Vision Transformer that learns classes as they come, without keeping old images."""

from vqprompt._version import __version__
from vqprompt.backbones.load import load_backbone
from vqprompt.data.stream import Stream
from vqprompt.datasets import open_dataset
from vqprompt.learner.learner import Learner
from vqprompt.training.settings import Training

__all__ = ["Learner", "Stream", "Training", "__version__", "load_backbone", "open_dataset"]


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    if name == "Model":
        from vqprompt.model.model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""vqprompt: a frozen Vision Transformer that learns classes as they come, without keeping old images."""

from vqprompt._version import __version__
from vqprompt.datasets import open_dataset
from vqprompt.learner import Learner
from vqprompt.stream import Stream
from vqprompt.training import Training
from vqprompt.weights import load_backbone

__all__ = ["Learner", "Stream", "Training", "__version__", "load_backbone", "open_dataset"]

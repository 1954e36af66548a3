"""Learners, and predictors that are snapshots of them."""

from vqprompt.research.learner.learner import Learner
from vqprompt.research.learner.predictor import Predictor

__all__ = ["Learner", "Predictor"]

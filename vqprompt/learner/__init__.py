"""Learners, and predictors that are snapshots of them."""

from vqprompt.learner.learner import Learner
from vqprompt.learner.predictor import Predictor

__all__ = ["Learner", "Predictor"]

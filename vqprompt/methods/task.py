"""What a method knows about the task it learns: its place in the stream, its images, and their features. It knows
nothing of other tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from vqprompt.data.images import Images


@dataclass(frozen=True)
class TaskInfo:
    """A task's place in the stream."""

    number: int  # from 0
    old_classes: int
    new_classes: int

    @property
    def all_classes(self) -> int:
        return self.old_classes + self.new_classes


class ImageEvaluator(Protocol):
    """Shows images, without augmentation, to the network."""

    def features(self, images: Images, task: int | None = None) -> Tensor: ...

    def queries(self, images: Images) -> Tensor: ...

    def logits(self, images: Images) -> Tensor: ...


class TaskData:
    """The open task, as every hook of a method gets it.

    images: its training images; they cannot be read any more when the next task has been opened.
    labels: their positions in the head [n], on the device.
    augmented: computes the features of one augmented view of each image, if statistics are taken from these.
    features_before: their features before the task started [n, D], for methods that ask for them
    (`needs_features_before`).
    batch_size, seed: for training that a method does itself after the loop.
    """

    def __init__(
        self, task: TaskInfo, images: Images, labels: Tensor, evaluator: ImageEvaluator, batch_size: int, seed: int
    ) -> None:
        self.task, self.images, self.labels = task, images, labels
        self.batch_size, self.seed = batch_size, seed
        self.features_before: Tensor | None = None
        self.augmented: Callable[[int], Tensor] | None = None
        self._evaluator = evaluator

    @cached_property
    def features(self) -> Tensor:
        """Features of the un-augmented images after training [n, D]. Do not use it before training ends."""
        return self._evaluator.features(self.images, self.task.number)

    @cached_property
    def statistics_features(self) -> Tensor:
        """Features for the class statistics [n, D]: `features`, or features of augmented views."""
        return self.features if self.augmented is None else self.augmented(self.task.number)

    @property
    def queries(self) -> Tensor:
        """Features without prompts [n, D]."""
        return self._evaluator.queries(self.images)

    def logits(self, images: Images) -> Tensor:
        """Scores of the task's images, or of exemplars that the method keeps [n, classes]."""
        return self._evaluator.logits(images)

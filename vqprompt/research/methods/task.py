"""What a method knows about the task it learns: its place in the stream, its images, and their features."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, NamedTuple, Protocol

import torch
from pydantic import NonNegativeInt, Strict
from torch import Tensor

from vqprompt.core.data.images import Images
from vqprompt.core.runtime.distributed import ShardedRows
from vqprompt.core.statistics.sums import ClassSums

MOST_IN_MEMORY = 16 << 20  # bytes; where a task's features are larger, only sums per class are held


class TaskInfo(NamedTuple):
    """A task's place in the stream. returning: positions in the head of old classes that it has images of."""

    number: NonNegativeInt
    old_classes: NonNegativeInt
    new_classes: NonNegativeInt
    returning: Annotated[tuple[NonNegativeInt, ...], Strict(False)] = ()

    @property
    def all_classes(self) -> int:
        return self.old_classes + self.new_classes


class ImageEvaluator(Protocol):
    """Shows images, without augmentation, to the network."""

    def features(self, images: Images, task: int | None = None) -> ShardedRows: ...

    def queries(self, images: Images) -> ShardedRows: ...

    def logits(self, images: Images) -> Tensor: ...


class TaskFeatures:
    """Features of the open task's images [n, D]: all of them at once (`whole`), or added up batch by batch.

    labels: their positions in the head [n].
    """

    def __init__(self, computed: ShardedRows, labels: Tensor) -> None:
        self.computed, self.labels = computed, labels

    @cached_property
    def whole(self) -> Tensor:
        """All features, in every process; from now on they are held."""
        return self.computed.whole()

    def few(self, width: int) -> bool:
        """Whether this process computes them all and they fit into memory, or are there already."""
        return "whole" in self.__dict__ or (
            self.computed.ranks.count == 1 and 4 * len(self.labels) * width <= MOST_IN_MEMORY
        )

    def add_up(self, sums: ClassSums) -> ClassSums:
        """Sums over all features, none of which is held. Each process adds up its own batches."""
        for rows, features in self.computed.own():
            sums.add(features, self.labels[rows])
        sums.reduce(self.computed.ranks)
        return sums


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
        self.augmented: Callable[[int], ShardedRows] | None = None
        self._evaluator = evaluator

    @property
    def features(self) -> Tensor:
        """Features of the un-augmented images after training [n, D]. Do not use it before training ends."""
        return self.trained_features.whole

    def network_changed(self) -> None:
        """Compute features again when they are next needed."""
        self.__dict__.pop("trained_features", None)
        self.__dict__.pop("statistics_features", None)

    @property
    def queries(self) -> Tensor:
        """Features without prompts [n, D]."""
        return self.plain_features.whole

    @cached_property
    def trained_features(self) -> TaskFeatures:
        """`features`, for those who do not need them all at once."""
        return TaskFeatures(self._evaluator.features(self.images, self.task.number), self.labels)

    @property
    def plain_features(self) -> TaskFeatures:
        """`queries`, for those who do not need them all at once."""
        return TaskFeatures(self._evaluator.queries(self.images), self.labels)

    @cached_property
    def statistics_features(self) -> TaskFeatures:
        """Features for the class statistics: `trained_features`, or features of augmented views."""
        if self.augmented is None:
            return self.trained_features
        return TaskFeatures(self.augmented(self.task.number), self.labels)

    def class_sums(self, width: int) -> ClassSums:
        """Sums of the features of the task's classes."""
        return self.trained_features.add_up(ClassSums(None, self.classes, width))

    @property
    def classes(self) -> Tensor:
        """Positions in the head of the classes that the task has images of [c], in order."""
        new = range(self.task.old_classes, self.task.all_classes)
        return torch.tensor([*self.task.returning, *new], device=self.labels.device)

    def logits(self, images: Images) -> Tensor:
        """Scores of the task's images, or of exemplars that the method keeps [n, classes]."""
        return self._evaluator.logits(images)

"""What a method knows about the task it learns: its place in the stream, its images, and what the network makes of
them. Nothing of other tasks."""

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


class Looks(Protocol):
    """Whoever can show images to the network, without augmentation."""

    def features(self, images: Images, task: int | None = None) -> Tensor: ...

    def queries(self, images: Images) -> Tensor: ...

    def logits(self, images: Images) -> Tensor: ...


class TaskData:
    """The open task, as every hook of a method gets it.

    images: its training images; they cannot be read any more once the next task opens.
    labels: their positions in the head [n], on the device.
    augmented: gives the features of one augmented view of each, if statistics are to be taken of these.
    features_before: their features before the task started [n, D], for methods that ask for them
    (`needs_features_before`).
    batch_size, seed: for what a method trains by itself after the loop.
    """

    def __init__(
        self, task: TaskInfo, images: Images, labels: Tensor, looks: Looks, batch_size: int, seed: int
    ) -> None:
        self.task, self.images, self.labels = task, images, labels
        self.batch_size, self.seed = batch_size, seed
        self.features_before: Tensor | None = None
        self.augmented: Callable[[int], Tensor] | None = None
        self._looks = looks

    @cached_property
    def features(self) -> Tensor:
        """Features of the un-augmented images after training [n, D]. Do not ask before training ends."""
        return self._looks.features(self.images, self.task.number)

    @cached_property
    def statistics_features(self) -> Tensor:
        """What class statistics are taken of [n, D]: `features`, or features of augmented views."""
        return self.features if self.augmented is None else self.augmented(self.task.number)

    @property
    def queries(self) -> Tensor:
        """Features without prompts [n, D]."""
        return self._looks.queries(self.images)

    def logits(self, images: Images) -> Tensor:
        """What the method now says of the task's images, or of exemplars that it keeps [n, classes]."""
        return self._looks.logits(images)

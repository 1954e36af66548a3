"""What a method knows about the task it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vqprompt.data.images import Images


@dataclass(frozen=True)
class TaskInfo:
    """What a method may know of a task, without its images."""

    number: int  # from 0
    old_classes: int
    new_classes: int

    @property
    def all_classes(self) -> int:
        return self.old_classes + self.new_classes


@dataclass(frozen=True)
class Finish:
    """What a method gets when a task's training ends: its images, and nothing of other tasks."""

    task: TaskInfo
    features: Callable[[], tuple[Tensor, Tensor]]  # un-augmented training images: features [n, D], labels [n]
    queries: Callable[[], tuple[Tensor, Tensor]]  # the same without prompts
    images: Images  # the training images themselves, for methods that rehearse; closed when the next task opens
    logits: Callable[[Images], Tensor]  # what the method now says of these or of its own exemplars, un-augmented
    batch_size: int
    seed: int

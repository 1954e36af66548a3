"""What a learner keeps on disk: its backbone, method and settings, what it has learned, a task that is half learned.

build.py makes learners and predictors from a `SavedState`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError
from torch import Tensor, nn

from vqprompt.core.errors import CheckpointError, explain
from vqprompt.research.learner.checkpoint import read_checkpoint, write_checkpoint
from vqprompt.research.methods.base import Method
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.loop import LoopState
from vqprompt.research.training.settings import Training

METHOD, OPTIMIZER, FEATURES_BEFORE = "method.", "optimizer.", "task.features_before"  # how names of tensors begin


class OpenTaskRecord(BaseModel, strict=True):
    """A task that is half learned, as checkpoint.json has it. groups, scalars: of the optimizer."""

    task: TaskInfo
    classes: list[str]
    groups: list[dict[str, Any]]
    scalars: dict[str, Any]
    epoch: NonNegativeInt
    images_seen: NonNegativeInt
    seconds: float


class LearnerRecord(BaseModel, strict=True):
    """What checkpoint.json says about a learner. weights, fingerprint: as in `Built`."""

    backbone: str
    weights: str
    fingerprint: str
    method: str
    options: dict[str, Any]
    size: int = Field(ge=1, le=1 << 16)
    planned_tasks: int = Field(ge=1, le=1_000_000)
    seed: int
    training: Training
    classes: list[str]
    tasks: list[TaskInfo]
    images_seen: NonNegativeInt
    seconds_training: float
    saved: str = ""  # when
    unfinished: OpenTaskRecord | None
    run: dict[str, Any] | None = None

    @property
    def consistent(self) -> bool:
        """Whether the classes are those of the tasks, each name once."""
        tasks, classes, half = self.tasks, self.classes, self.unfinished
        learned = len(tasks)
        if half is not None:
            tasks, classes = [*tasks, half.task], list(dict.fromkeys([*classes, *half.classes]))
        starts = [0, *accumulate(task.new_classes for task in tasks)]
        numbered = all((t.number, t.old_classes) == (n, starts[n]) for n, t in enumerate(tasks))
        numbered = numbered and all(place < t.old_classes for t in tasks for place in t.returning)
        return numbered and len(self.classes) == starts[learned] and starts[-1] == len(classes) == len(set(classes))


@dataclass
class OpenTask:
    """A task that is being learned. loop: where its training is, known between two epochs. At other times it is None:
    then the learner can be neither saved nor continued."""

    info: TaskInfo
    classes: list[str]
    features_before: Tensor | None = None
    loop: LoopState | None = None


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that was read and checked."""

    folder: Path
    record: LearnerRecord
    tensors: dict[str, Tensor]
    open_task: OpenTask | None

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        tensors, info = read_checkpoint(folder)
        try:
            record = LearnerRecord(**info)
        except ValidationError as error:
            what = f"{folder}: the checkpoint is damaged; restore it or start over"
            raise CheckpointError(explain(error, what)) from None
        if not record.consistent:
            raise CheckpointError(f"{folder}: its classes and tasks contradict each other; restore it or start over")
        return cls(folder, record, tensors, None if record.unfinished is None else _unpack(record.unfinished, tensors))

    def fill(self, method: Method) -> None:
        """Give a new method what was learned."""
        for task in self.record.tasks:
            method.grow(task)
        if self.open_task is not None:
            method.start_task(self.open_task.info)
        method.to(method.head.weight.device)
        own = {name.removeprefix(METHOD): t for name, t in self.tensors.items() if name.startswith(METHOD)}
        load_tensors(method, own, saved_names(method), str(self.folder))
        method.loaded()
        method.eval()


def write_state(folder: Path, record: LearnerRecord, method: Method, open_task: OpenTask | None) -> None:
    """Write everything learned; a frozen backbone is named in the record, not copied."""
    tensors = {f"{METHOD}{name}": t for name, t in method.state_dict().items() if method.saved(name)}
    if open_task is not None:
        record.unfinished, more = _pack(open_task)
        tensors |= more
    write_checkpoint(folder, tensors, record.model_dump())


def saved_names(method: Method) -> set[str]:
    """Names of the tensors that were learned; those of a frozen backbone are not among them."""
    return {name for name in method.state_dict() if method.saved(name)}


def _pack(open_task: OpenTask) -> tuple[OpenTaskRecord, dict[str, Tensor]]:
    """An open task as JSON and tensors: an optimizer's state has both."""
    assert open_task.loop is not None, "refused by the learner"
    loop = open_task.loop
    state = {f"{p}.{name}": value for p, values in loop.optimizer["state"].items() for name, value in values.items()}
    tensors = {OPTIMIZER + name: value for name, value in state.items() if isinstance(value, Tensor)}
    if open_task.features_before is not None:
        tensors[FEATURES_BEFORE] = open_task.features_before
    groups = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in loop.optimizer["param_groups"]
    ]
    record = OpenTaskRecord(
        task=open_task.info,
        classes=open_task.classes,
        groups=groups,
        scalars={name: value for name, value in state.items() if not isinstance(value, Tensor)},
        epoch=loop.next_epoch,
        images_seen=loop.images_seen,
        seconds=loop.seconds,
    )
    return record, tensors


def _unpack(record: OpenTaskRecord, tensors: dict[str, Tensor]) -> OpenTask:
    state: dict[int, dict[str, Any]] = {}
    saved = {name.removeprefix(OPTIMIZER): t for name, t in tensors.items() if name.startswith(OPTIMIZER)}
    for name, value in (saved | record.scalars).items():
        parameter, leaf = name.split(".")
        state.setdefault(int(parameter), {})[leaf] = value
    optimizer = {"state": state, "param_groups": record.groups}
    loop = LoopState(record.epoch, optimizer, record.images_seen, record.seconds)
    return OpenTask(record.task, record.classes, tensors.get(FEATURES_BEFORE), loop)


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: dict[str, Tensor], names: set[str], where: str) -> None:
    """Copy saved tensors into a module. Statistics grow with the images and follow the checkpoint; the shapes of
    parameters follow from the classes and the options."""
    missing, unexpected = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
    if missing or unexpected:
        raise CheckpointError(
            f"{where}: the checkpoint does not fit this method: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        old = getattr(owner, leaf)
        if isinstance(old, nn.Parameter) and old.numel() and old.shape != tensor.shape:
            wanted, given = tuple(old.shape), tuple(tensor.shape)
            raise CheckpointError(
                f"{where}: {name} has the shape {given}, but classes and options want {wanted}; restore it"
            )
        tensor = tensor.to(old)
        setattr(owner, leaf, nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor)

"""A learner on disk: its backbone, method and settings, what it has learned, and a task that is half learned.

`SavedState` is the checked content of a checkpoint. build.py makes learners and predictors from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn

from vqprompt.core.backbones.registry import BACKBONES
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.errors import CheckpointError, explain
from vqprompt.research.learner.checkpoint import read_checkpoint, write_checkpoint
from vqprompt.research.methods.base import Method
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.settings import Training

METHOD, OPTIMIZER, FEATURES_BEFORE = "method.", "optimizer.", "task.features_before"


Count = Annotated[int, Field(ge=0)]
TaskNumbers = Annotated[list[Count], Field(min_length=3, max_length=3)]  # as in a TaskInfo


class Unfinished(BaseModel, extra="allow", strict=True):
    """The fields of a half-learned task in the JSON."""

    task: TaskNumbers
    classes: list[str]
    groups: list[dict[str, Any]]
    scalars: dict[str, Any]
    epoch: Count


class Required(BaseModel, extra="allow", strict=True):
    """The fields that the JSON must have; a writer may add others."""

    backbone: str
    fingerprint: str
    method: str
    options: dict[str, Any]
    size: int = Field(ge=1, le=1 << 16)
    planned_tasks: int = Field(ge=1, le=1_000_000)
    seed: int
    training: Training
    classes: list[str]
    tasks: list[TaskNumbers]
    images_seen: Count
    seconds_training: float
    unfinished: Unfinished | None


@dataclass
class HalfLearned:
    """A task between two epochs. `loop` is `TrainingLoop.state()`."""

    task: TaskInfo
    classes: list[str]
    loop: dict[str, Any]
    features_before: Tensor | None = None


@dataclass
class SavedState:
    folder: Path
    info: dict[str, Any]  # as in `Required`
    tensors: dict[str, Tensor]
    unfinished: HalfLearned | None = None
    history: list[TaskInfo] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        tensors, info = read_checkpoint(folder)
        if missing := [key for key in Required.model_fields if key not in info]:
            raise CheckpointError(f"{folder}: the checkpoint lacks {', '.join(missing)}; restore it or start over")
        try:
            Required(**info)
        except ValidationError as error:
            raise CheckpointError(explain(error, f"{folder}: the checkpoint is damaged")) from None
        if not _counts_agree(info):
            raise CheckpointError(f"{folder}: its classes and tasks contradict each other; restore it or start over")
        state = cls(folder, info, tensors, history=[TaskInfo(*numbers) for numbers in info["tasks"]])
        if info["unfinished"] is not None:
            state.unfinished = _unpack(info["unfinished"], tensors)
        return state

    def find_backbone(self, backbone: str | Path | ViT | None = None) -> str | Path | ViT:
        """The backbone to build on: the one that is given, or the one that was saved, if it can be found."""
        saved = self.info["backbone"]
        if backbone is None and saved not in BACKBONES and not Path(saved).is_file():
            raise CheckpointError(
                f"{self.folder}: learned with the weights {saved}, which are not there; say where they are: "
                "backbone=… of Learner.load, --backbone of vqprompt predict"
            )
        return backbone or saved

    def check_weights(self, weights: str, resized: str) -> None:
        """Refuse a backbone with other weights. weights, resized: its fingerprints, as it is in its file and after
        resizing; older checkpoints have only the second one."""
        same = self.info["weights"] == weights if "weights" in self.info else self.info["fingerprint"] == resized
        if not same:
            raise CheckpointError(
                f"{self.folder}: learned with other weights of {self.info['backbone']!r} than these; "
                "give the original backbone"
            )

    def fill(self, method: Method) -> None:
        """Give a new method what was learned."""
        for task in self.history:
            method.grow(task)
        if self.unfinished is not None:
            method.start_task(self.unfinished.task)
        method.to(method.head.weight.device)
        own = {name.removeprefix(METHOD): t for name, t in self.tensors.items() if name.startswith(METHOD)}
        load_tensors(method, own, saved_names(method), str(self.folder))
        if len(method.head.weight) != method.head.out_features:
            raise CheckpointError(
                f"{self.folder}: {method.head.out_features} classes, but a classifier of {len(method.head.weight)}; "
                "restore it or start over"
            )
        method.loaded()
        method.eval()


def _counts_agree(info: dict[str, Any]) -> bool:
    """Whether the classes are those of the tasks, each name once."""
    half = info["unfinished"]
    tasks = [TaskInfo(*numbers) for numbers in (*info["tasks"], *([half["task"]] if half else []))]
    classes = [*info["classes"], *(half["classes"] if half else [])]
    starts = [0, *accumulate(task.new_classes for task in tasks)]
    numbered = all((t.number, t.old_classes) == (n, starts[n]) for n, t in enumerate(tasks))
    learned = len(info["classes"]) == starts[len(info["tasks"])]
    return numbered and learned and starts[-1] == len(classes) == len(set(classes))


def write_state(
    folder: Path, info: dict[str, Any], method: Method, unfinished: HalfLearned | None, extra: dict[str, Any]
) -> None:
    """Write everything learned; a frozen backbone is named in `info`, not copied."""
    names = saved_names(method)
    tensors = {f"{METHOD}{name}": t for name, t in method.state_dict().items() if name in names}
    packed = None
    if unfinished is not None:
        packed, more = _pack(unfinished)
        tensors |= more
    write_checkpoint(folder, tensors, {**info, "unfinished": packed, **extra})


def saved_names(method: Method) -> set[str]:
    """Names of the tensors that were learned; those of a frozen backbone are not among them."""
    return {name for name in method.state_dict() if method.saved(name)}


def as_list(task: TaskInfo) -> list[int]:
    return list(asdict(task).values())


def _pack(half: HalfLearned) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A half-learned task as JSON and tensors: an optimizer's state has both."""
    tensors, scalars = {}, {}
    optimizer = half.loop["optimizer"]
    for parameter, values in optimizer["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{parameter}.{name}"] = value
            else:
                scalars[f"{parameter}.{name}"] = value
    if half.features_before is not None:
        tensors[FEATURES_BEFORE] = half.features_before
    groups = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer["param_groups"]
    ]
    info = {"task": as_list(half.task), "classes": half.classes, "groups": groups, "scalars": scalars}
    return {**info, **{key: half.loop[key] for key in ("epoch", "images_seen", "seconds")}}, tensors


def _unpack(info: dict[str, Any], tensors: dict[str, Tensor]) -> HalfLearned:
    state: dict[int, dict[str, Any]] = {}
    saved: Iterable[tuple[str, Any]] = (
        *((name.removeprefix(OPTIMIZER), t) for name, t in tensors.items() if name.startswith(OPTIMIZER)),
        *info["scalars"].items(),
    )
    for name, value in saved:
        parameter, leaf = name.split(".")
        state.setdefault(int(parameter), {})[leaf] = value
    loop = {
        "epoch": info["epoch"],
        "optimizer": {"state": state, "param_groups": info["groups"]},
        "images_seen": info.get("images_seen", 0),  # older checkpoints do not have it
        "seconds": info.get("seconds", 0.0),
    }
    return HalfLearned(TaskInfo(*info["task"]), info["classes"], loop, tensors.get(FEATURES_BEFORE))


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: dict[str, Tensor], names: set[str], where: str) -> None:
    """Copy saved tensors into a module. Shapes follow the checkpoint, because heads and statistics grow with the
    classes."""
    missing, unexpected = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
    if missing or unexpected:
        raise CheckpointError(
            f"{where}: the checkpoint does not fit this method: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        old = getattr(owner, leaf)
        tensor = tensor.to(device=old.device, dtype=old.dtype)
        if isinstance(old, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))
        else:
            setattr(owner, leaf, tensor)

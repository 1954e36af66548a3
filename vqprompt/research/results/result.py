"""The result of a run: the typed record behind `metrics.json`.

A run writes it after each task. The report, the paper's tables and the trackers read it back through the same model.
Files that `bench table --save` wrote lack some fields; these have their defaults here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from vqprompt.core import metrics as m
from vqprompt.core.errors import UserError, explain
from vqprompt.core.files import read_json, write_atomically

FILE = "metrics.json"
CLASSES_FILE = "classes.json"
SCHEMA_VERSION = 2  # 1: before the version was written


class Record(BaseModel):
    """Written as JSON and read back. A loss that diverged is NaN, and stays NaN (by default pydantic writes null)."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")

    what: ClassVar[str] = "record"
    file: ClassVar[str]  # its name in a run's folder

    def write(self, folder: Path) -> None:
        write_atomically(folder / self.file, self.model_dump_json(indent=1))

    @classmethod
    def parse(cls, content: Any, where: str) -> Self:
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"{where}: not the {cls.what} of a run ({explain(error, 'its fields')})") from None


class ParameterCounts(Record):
    prompting: int = 0
    classifier: int = 0
    backbone: int = 0
    trainable: int = 0


class EpochLosses(Record):
    """The mean of each loss term over the steps of one epoch."""

    task: int
    epoch: int
    losses: dict[str, float]


class PromptUse(Record):
    """How many images choose each prompt.

    counts[task][block][prompt]: of a task's training images, after that task. test[-1][task][block][prompt]: of a
    task's test images, after the last task; prompts that none chooses are left out.
    """

    blocks: list[int]
    counts: list[list[list[int]]]
    test: list[list[list[dict[int, int]]]] = []


class ClassResult(Record):
    """Test images of one class. task: from 0. taken_for: the class that its images were most often taken for."""

    name: str
    task: int
    right: int
    total: int
    taken_for: str | None = None
    times: int = 0


class Mistake(Record):
    """A wrong answer. picture: a small JPEG as a data: address."""

    label: str
    answer: str
    probability: float
    picture: str | None = None


class ClassResults(Record):
    """What `classes.json` says, beside `metrics.json`: after the last task, class by class, and the worst mistakes, the
    most confident first."""

    what, file = "classes", CLASSES_FILE
    after: int
    classes: list[ClassResult]
    worst: list[Mistake] = []

    def weakest(self) -> list[ClassResult]:
        """The classes that were tested, the weakest first."""
        return sorted((c for c in self.classes if c.total), key=lambda c: (c.right / c.total, c.task, c.name))

    @classmethod
    def read(cls, folder: Path) -> ClassResults | None:
        """None for a run without such a file: one that is not done."""
        path = folder / CLASSES_FILE
        return cls.parse(read_json(path), str(path)) if path.exists() else None


class Progressed(Record):
    """What a run adds to with every task. Its checkpoint has it, too."""

    seconds: float | None = None
    task_seconds: list[float] = []
    losses: list[EpochLosses] = []
    within_task: list[float] = Field([], description="after each task: accuracy if the task of an image were known")
    curve: list[tuple[int, float]] = Field([], description="online: images so far, accuracy on all classes so far")
    peak_memory: int = Field(0, description="bytes, of the GPU if there is one; 0: not measured")
    training_flops: int = Field(0, description="per image and step, the most of the first two tasks")
    rounding: list[dict[str, str | int]] = Field([], description="runtime.rounding of every machine that worked on it")


class RunResult(Progressed):
    """Accuracies are in percent. `accuracy[i][j]`: on task i after learning task j; None before task i was learned."""

    what, file = "result", FILE
    schema_version: int = Field(1, description="1 where a file does not say")
    method: str = ""
    title: str = ""
    data: str = ""
    backbone: str = ""
    seed: int = 0
    tasks: list[list[str]] = []
    done: bool
    faa: float | None = None
    caa: float | None = None
    forgetting: float | None = None
    average_accuracy: list[float] = []
    forgetting_per_task: list[float] = []
    accuracy: list[list[float | None]] = []
    images_per_second: float | None = None
    parameters: ParameterCounts = ParameterCounts()
    exemplars: int = 0
    stream: str = "disjoint"
    kept_bytes: int | None = Field(None, description="carried from task to task, a frozen backbone not counted")
    test_flops: int | None = None
    prompt_use: PromptUse | None = None
    validation: float = 0.0
    notes: list[str] = []
    hardware: str = ""
    processes: int = Field(1, description="how many computed it together, last")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def measures(self) -> dict[str, float]:
        """More numbers of a finished run, as far as they are known (core/metrics.py). within_task: FAA if the task of
        each image were known."""
        if not self.done:
            return {}
        measures = m.transfer(self.accuracy) if len(self.accuracy) > 1 else {}
        if self.within_task:
            measures["within_task"] = self.within_task[-1]
        if self.curve:
            measures["area_under_curve"] = m.area_under_curve(self.curve)
        return measures

    def number(self, name: str) -> float | None:
        """One of the measures, of the fields or `trainable`, by name; None if it is not known."""
        if name in (computed := {**self.measures, "trainable": self.parameters.trainable}):
            return computed[name]
        value = getattr(self, name, None)
        measured = value or name not in ("peak_memory", "training_flops")
        return value if measured and isinstance(value, int | float) else None

    @property
    def learned(self) -> int:
        """How many tasks so far."""
        return len(self.average_accuracy)

    @classmethod
    def read(cls, folder: Path) -> RunResult:
        path = folder / FILE
        if not path.exists():
            raise UserError(f"{folder}: no {FILE} here; give a folder that `vqprompt run` wrote")
        return cls.parse(read_json(path), str(path))

    @classmethod
    def parse(cls, content: Any, where: str) -> Self:
        result = super().parse(content, where)
        if result.schema_version > SCHEMA_VERSION:
            raise UserError(
                f"{where}: written by a newer vqprompt (schema {result.schema_version}, this one reads up to "
                f"{SCHEMA_VERSION}); update vqprompt"
            )
        return result

"""The description in a model's file (formats 4 and 5): what each field may be, checked before anything is made of it.

A file may come from anywhere, and a checksum says only that it is as it was written. So every number is bounded, every
count is compared with its tensor (file.py), and what is not described here is refused.

Format 5 has one tensor more (docs/format.md). Format 3 is format 4 without counterexamples, corrections and the world.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from vqprompt.core.errors import UserError, shown
from vqprompt.product.model.knowledge import HISTORY_KEPT, LARGEST_SIZE
from vqprompt.product.model.pictures import clean_name
from vqprompt.product.model.records import KEPT

LARGEST = 1e18  # of any number and any tensor: sums of products with features are far from the limits of float32
MOST_IMAGES = 1 << 40


def _class_name(name: str) -> str:
    try:
        if clean_name(name) == name:
            return name
    except UserError:
        pass
    raise ValueError("not the name of a class")


def _text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not printable")
    return text


def _finite(options: dict[str, Any]) -> dict[str, Any]:
    json.dumps(options, allow_nan=False)  # raises ValueError for what is no number
    return options


ClassName = Annotated[str, AfterValidator(_class_name)]
Text = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_text)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(ge=1e-30, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=MOST_IMAGES)]


class Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class BackboneFields(Fields):
    name: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    fingerprint: Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")]
    size: Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
    crop: Share
    width: Annotated[int, Field(ge=1, le=1 << 20)]
    precision: Literal["fp32", "int8"] = "fp32"


class RecordFields(Fields):
    images: Annotated[int, Field(ge=1, le=MOST_IMAGES)]
    kept: Annotated[int, Field(ge=1, le=KEPT)]

    @model_validator(mode="after")
    def _all_that_fit(self) -> RecordFields:
        if self.kept != min(self.images, KEPT):
            raise ValueError(f"features of {min(self.images, KEPT)} images must be kept")
        return self


class TrainedFields(Fields):
    effort: Literal["good", "best"]
    method: Literal["moving-prompts", "moving-weights"]
    options: Annotated[dict[str, Any], AfterValidator(_finite)]


class EventFields(Fields):
    date: Annotated[Text, StringConstraints(max_length=40)]
    what: Literal["learned", "relabeled", "unlearned", "merged", "renamed", "forgot", "returned"]
    effort: Literal["instant", "good", "best"] = "instant"
    classes: dict[ClassName | Literal["unknown"], Count] = {}
    name: Text = ""
    new_name: Text = ""
    version: Count | None = None


class VersionFields(Fields):
    number: Count
    parent: Count | None = None
    classes: dict[ClassName, Annotated[int, Field(ge=0)]]
    history: Annotated[list[EventFields], Field(max_length=HISTORY_KEPT)]
    measured: bool
    moved: list[ClassName] = []
    trained: Annotated[int, Field(ge=0)] | None = None
    against: Annotated[int, Field(ge=0)] | None = None

    @property
    def records(self) -> list[int]:
        """The numbers of all its records: of the classes and of the counterexamples."""
        return [*self.classes.values(), *([] if self.against is None else [self.against])]

    @model_validator(mode="after")
    def _consistent(self) -> VersionFields:
        names = list(self.classes)
        if names != sorted(names):
            raise ValueError("classes must be sorted by name")
        if len(set(self.records)) < len(self.records):
            raise ValueError("two classes have the same record")
        if not set(self.moved) <= self.classes.keys():
            raise ValueError("moved names a class that is not there")
        return self


class WeighingFields(Fields):
    certainty: Literal["entropy", "largest"]
    nearness: Number
    far: Number
    steep: Number
    world: Number = 0.0
    steeper: Number = 0.0


class MeasurementsFields(Fields):
    accuracy: Share
    per_class: dict[ClassName, tuple[Count, Count]]
    calibration_error: tuple[Share, Share]


class SolutionFields(Fields):
    shrinkage: Annotated[float, Field(gt=0, le=1)]
    temperature: Annotated[float, Field(ge=1e-6, le=LARGEST)]
    certainty: tuple[Number, Positive]
    nearness: tuple[Number, Positive]
    threshold: Number | None
    background: Number
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    ahead: tuple[Number, Positive] = (0.0, 1.0)
    weighing: WeighingFields
    measurements: MeasurementsFields | None = None


class Description(Fields):
    """versions: the last one is the model, the others can be returned to. latest: the largest number that a version of
    this model ever had. solution: of the model; None if it has no class."""

    backbone: BackboneFields
    records: list[RecordFields]
    trained: list[TrainedFields] = []
    versions: Annotated[list[VersionFields], Field(min_length=1, max_length=1000)]
    latest: Count
    solution: SolutionFields | None

    @model_validator(mode="after")
    def _consistent(self) -> Description:
        numbers = [version.number for version in self.versions]
        if len(set(numbers)) < len(numbers) or max(numbers) > self.latest:
            raise ValueError("the numbers of the versions are not all different, or too large")
        for version in self.versions:
            if max(version.records, default=-1) >= len(self.records):
                raise ValueError("a class has a record that is not there")
            if version.trained is not None and version.trained >= len(self.trained):
                raise ValueError("a version has a training that is not there")
        classes = self.versions[-1].classes
        if (self.solution is None) != (not classes):
            raise ValueError("a model has a solution if it has a class, and only then")
        measured = self.solution and self.solution.measurements
        if measured and (
            list(measured.per_class) != list(classes) or any(right > of for right, of in measured.per_class.values())
        ):
            raise ValueError("what was measured does not fit the classes")
        return self


def parse_description(text: str) -> Description:
    """Raises ValueError with one sentence about the first thing that is wrong."""
    try:
        return Description.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "its description"
        reason = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] == "value_error" or not first["loc"] else f" (it is {shown(first['input'], 60)})"
        raise ValueError(f"{shown(place, 100)[1:-1]}: {reason}{given}") from None

"""Everything that can change a model or takes long. Each kind is a class: its request, how to check and to do it.

A request is checked in the server, against the snapshot, before it becomes a job. It is done in the worker process
(jobs.py), which loads the model's file, changes the copy in memory, and replaces the file in one step. What it has
reported as done is on disk; if it is killed at any moment, the file is the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from vqprompt.core.files import write_atomically
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.words import counted
from vqprompt.product.model.correcting import check_known
from vqprompt.product.model.efforts import check_effort
from vqprompt.product.model.model import Model
from vqprompt.product.model.opening import ModelDefaults, changing
from vqprompt.product.model.pictures import Picture, check_spelling
from vqprompt.product.serve.errors import Conflict, NotThere
from vqprompt.product.serve.images import Thumbnail, thumbnails
from vqprompt.product.serve.models import Snapshot


@dataclass(frozen=True)
class Change:
    """One change of one model, as the server sends it to the worker. body: what the client asked for. images: to teach
    or to check. target: a file that the change may make, in the server's private folder."""

    path: Path
    defaults: ModelDefaults
    body: Body
    images: tuple[Picture, ...]
    target: Path


@dataclass(frozen=True)
class Outcome:
    """How a change has ended."""

    state: Literal["done", "failed", "cancelled"]
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    thumbnails: tuple[Thumbnail, ...] = ()


PREVIEW = Field(default=False, description="Only tell which answers would change; the model stays as it is.")
FOR_GOOD = Field(default=False, description="Also delete all that is kept of it, older versions too.")
NO_LABEL = "none"  # of images that are none of the classes, until they are learned
ImageId = Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$"), AfterValidator(lambda text: int(text, 16))]
IMAGES = Field(min_length=1, max_length=10_000, description="Ids of images, as in GET /models/{name}/images.")


class Body(BaseModel):
    """What a client asks for."""

    model_config = ConfigDict(extra="forbid")

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    def check(self, now: Snapshot) -> None:
        """Refuse what cannot be done with the model as it is now."""

    def do(self, change: Change, tell: Report) -> Outcome:
        with changing(change.path, change.defaults.open) as model:
            result = self.apply(model, change.images, tell)
            made = () if getattr(self, "preview", False) else tuple(thumbnails(change.images))
            tell(Progress(Stage.STATISTICS, 1, 1, detail="writing the model"))  # the last moment to cancel
        return Outcome("done", result=result, thumbnails=made)

    def apply(self, model: Model, images: Sequence[Picture], tell: Report) -> dict[str, Any]:
        """Change the model, and return the job's result. Here: by the model's method of the same name, which takes the
        fields by their names."""
        done = getattr(model, self.kind)(**dict(self))
        return self.model_dump() if done is None else done.to_json()


class Teach(Body):
    """Teach the images of an upload."""

    upload: str = Field(description="The id that POST /models/{name}/uploads returned.")
    leave_out: list[int] = Field(default=[], description="Numbers of images in the upload that are not to be taught.")
    effort: str = Field(default="instant", description="How much work to do; GET /models lists the efforts.")
    as_unknown: bool = Field(default=False, description="These images are none of the classes, whatever their label.")
    preview: bool = PREVIEW

    def check(self, now: Snapshot) -> None:
        check_effort(self.effort, now.model.knowledge.trained)

    def apply(self, model: Model, images: Sequence[Picture], tell: Report) -> dict[str, Any]:
        return model.learn(
            images, effort=self.effort, as_unknown=self.as_unknown, preview=self.preview, skip_broken=True,
            progress=tell,
        ).to_json()  # fmt: skip


class Check(Body):
    """Look through the images of an upload, before they are taught."""

    def do(self, change: Change, tell: Report) -> Outcome:
        from vqprompt.product.check.check import check as check_images  # slow to import

        report = check_images(change.images, model=change.defaults.open(change.path), progress=tell)
        number = {image.where: place for place, image in enumerate(change.images)}
        told = report.to_json()
        for finding in told["findings"]:  # a page knows images by their place in the upload
            finding["image"], finding["other"] = number[finding["image"]], number.get(finding["other"])
        return Outcome("done", result=told)


class Undo(Body):
    """Go back to the model before the last change, or before several."""

    steps: int = Field(default=1, ge=1, le=1000, description="How many changes to undo, the last one first.")
    version: int | None = Field(None, description="Refuse if it is not the model's version any more.")

    def check(self, now: Snapshot) -> None:
        if self.steps > (possible := now.model.can_undo):
            raise Conflict(f"{counted(possible, 'change')} can be undone, not {self.steps}")

    def apply(self, model: Model, images: Sequence[Picture], tell: Report) -> dict[str, Any]:
        if self.version not in (None, now := model.knowledge.version):
            raise Conflict(f"nothing was undone: the model has changed, it is at version {now} and not {self.version}")
        return {"undone": model.undo(self.steps)}


class Return(Body):
    """Return to another version, an older one or one that was undone. This can be undone."""

    version: int = Field(ge=0, description="One of the model's versions; 0 is the empty model.")

    def check(self, now: Snapshot) -> None:
        others = [number for number in now.versions if number != now.version]
        if self.version not in others:
            raise NotThere(f"there is no other version {self.version}; the other versions are {others or 'none'}")

    def apply(self, model: Model, images: Sequence[Picture], tell: Report) -> dict[str, Any]:
        model.return_to(self.version)
        return self.model_dump()


class Rename(Body):
    """Give a class another name."""

    old: str
    new: str

    def check(self, now: Snapshot) -> None:
        copy(now.model).rename(self.old, self.new)


class Relabel(Body):
    """Move images that were taught to another class, known or new."""

    images: list[ImageId] = IMAGES
    name: str = Field(alias="label", description='Their class; "unknown" if they are none of the classes.')
    preview: bool = PREVIEW

    def check(self, now: Snapshot) -> None:
        check_spelling(now.model.classes, [self.name])


class Unlearn(Body):
    """Take images away that were taught, as if they had never been."""

    images: list[ImageId] = IMAGES
    for_good: bool = FOR_GOOD
    preview: bool = PREVIEW


class Merge(Body):
    """Make one class of several."""

    names: list[str] = Field(min_length=2, max_length=1000)
    into: str = Field(alias="new", description="The name of one of them, or a new one.")
    preview: bool = PREVIEW

    def check(self, now: Snapshot) -> None:
        for name in self.names:
            check_known(name, now.model.classes)


class Forget(Body):
    """Remove a class, as if it had never been taught; "unknown" removes all that was taught as none of the classes."""

    name: str
    for_good: bool = FOR_GOOD

    def check(self, now: Snapshot) -> None:
        if not self.for_good:  # what it has forgotten before may have left traces
            check_known(self.name, now.model.knowledge.records)

    def apply(self, model: Model, images: Sequence[Picture], tell: Report) -> dict[str, Any]:
        before = model.accuracy
        model.forget(self.name, for_good=self.for_good)
        result: dict[str, Any] = {"accuracy_before": before, "accuracy": model.accuracy, "notes": []}
        return result if self.for_good else {"name": self.name, **result}


class Onnx(Body):
    """Make the model's ONNX file; `GET /models/{name}/onnx` downloads it when the job is done."""

    def check(self, now: Snapshot) -> None:
        now.check_taught()

    def do(self, change: Change, tell: Report) -> Outcome:
        from vqprompt.product.export.onnx import onnx_file  # slow to import

        content = onnx_file(change.defaults.open(change.path))[0]
        write_atomically(change.target, content)
        return Outcome("done", result={"bytes": len(content)})


# changes that a JSON body describes, by their kind; the others come with images
EDITS = {edit.__name__.lower(): edit for edit in (Undo, Return, Rename, Relabel, Unlearn, Merge, Forget, Onnx)}

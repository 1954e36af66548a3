"""Everything that can change a model or takes long: one table of its routes, its requests and the functions that do it.

A request is checked in the server, against the snapshot, before it becomes a job. The function is called in the worker
process (worker.py). It loads the model's file, changes the copy in memory, and replaces the file in one step. What it
has reported as done is on disk; if it is killed at any moment, the file is the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.progress import Progress, Stage
from vqprompt.core.words import counted
from vqprompt.product.model.correcting import check_known
from vqprompt.product.model.efforts import check_effort
from vqprompt.product.model.erase import erase_class
from vqprompt.product.model.file import locked
from vqprompt.product.model.model import Model
from vqprompt.product.model.pictures import UNKNOWN, Picture, check_spelling, clean_name
from vqprompt.product.serve.errors import Conflict, NotThere
from vqprompt.product.serve.gallery import Thumbnail, thumbnails
from vqprompt.product.serve.models import ModelDefaults, ServedModel

Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class UploadedImage:
    """name: the client's, for messages; no two of an upload are equal. file: where it is on this machine."""

    name: str
    label: str
    file: Path

    def picture(self) -> Picture:
        return Picture(self.name, self.label, self.read)

    def read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError as error:
            raise ImageError(f"{self.name}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class Change:
    """One change of one model, as the server sends it to the worker. body: what the client asked for. images: to teach
    or to check. target: a file that the change may make, in the server's private folder."""

    kind: str
    path: Path
    defaults: ModelDefaults
    body: Any
    images: tuple[UploadedImage, ...]
    target: Path


@dataclass(frozen=True)
class JobUpdate:
    """What the worker reports. state: running, done, failed or cancelled. file: what the change made."""

    state: str
    progress: Progress | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    thumbnails: tuple[Thumbnail, ...] = ()
    file: Path | None = None


def open_model(change: Change) -> Model:
    if change.path.exists():
        return Model.load(change.path, device=change.defaults.device)
    return Model(change.defaults.backbone, size=change.defaults.size, device=change.defaults.device)


@contextmanager
def changed_model(change: Change, tell: Tell) -> Iterator[Model]:
    """The model, which replaces its file when the block ends, if it has changed then."""
    with locked(change.path):
        model = open_model(change)
        before = model.knowledge
        yield model
        if model.knowledge is not before:
            tell(Progress(Stage.STATISTICS, 1, 1, detail="writing the model"))  # the last moment to cancel
            model.save(change.path, locked=True)


# ---------------------------------------------------------------------------------------------- kinds


PREVIEW = Field(default=False, description="Only tell which answers would change; the model stays as it is.")
NO_LABEL = "none"  # of images that are none of the classes, until they are learned
ImageId = Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")]
IMAGES = Field(min_length=1, max_length=10_000, description="Ids of images, as in GET /models/{name}/images.")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def check(self, served: ServedModel) -> None:
        """Refuse what cannot be done with the model as it is now."""


class Teach(Body):
    """Teach the images of an upload."""

    upload: str = Field(description="The id that POST /models/{name}/uploads returned.")
    leave_out: list[int] = Field(default=[], description="Numbers of images in the upload that are not to be taught.")
    effort: str = Field(default="instant", description="How much work to do; GET /models lists the efforts.")
    as_unknown: bool = Field(default=False, description="These images are none of the classes, whatever their label.")
    preview: bool = PREVIEW

    def check(self, served: ServedModel) -> None:
        check_effort(self.effort, served.snapshot.model.knowledge.trained)


def teach(change: Change, body: Teach, tell: Tell) -> JobUpdate:
    with changed_model(change, tell) as model:
        pictures = [replace(i.picture(), label=NO_LABEL if body.as_unknown else i.label) for i in change.images]
        taught = model.learn(
            pictures, effort=body.effort, as_unknown=body.as_unknown, preview=body.preview, skip_broken=True,
            progress=tell,
        )  # fmt: skip
        made = () if body.preview else tuple(thumbnails((i.name, i.read) for i in change.images))
    return JobUpdate("done", result=taught.to_json(), thumbnails=made)


class Check(Body):
    """Look through the images of an upload, before they are taught."""


def check(change: Change, body: Check, tell: Tell) -> JobUpdate:
    from vqprompt.product.check.check import check as check_images  # slow to import

    model, defaults = open_model(change), change.defaults
    known = {"model": model} if model.classes else {"backbone": defaults.backbone, "size": defaults.size}
    report = check_images([i.picture() for i in change.images], device=defaults.device, progress=tell, **known)
    number = {image.name: place for place, image in enumerate(change.images)}
    told = report.to_json()
    for finding in told["findings"]:  # a page knows images by their place in the upload
        finding["image"], finding["other"] = number[finding["image"]], number.get(finding["other"])
    return JobUpdate("done", result=told)


class Undo(Body):
    """Go back to the model before the last change, or before several."""

    steps: int = Field(default=1, ge=1, le=1000, description="How many changes to undo, the last one first.")

    def check(self, served: ServedModel) -> None:
        if self.steps > (possible := served.snapshot.model.can_undo):
            raise Conflict(f"{counted(possible, 'change')} can be undone, not {self.steps}")


def undo(change: Change, body: Undo, tell: Tell) -> JobUpdate:
    with changed_model(change, tell) as model:
        undone = model.undo(body.steps)
    return JobUpdate("done", result={"undone": undone})


class Return(Body):
    """Return to another version, an older one or one that was undone. This can be undone."""

    version: int = Field(ge=0, description="One of the model's versions; 0 is the empty model.")

    def check(self, served: ServedModel) -> None:
        others = [number for number in served.versions if number != served.snapshot.version]
        if self.version not in others:
            raise NotThere(f"there is no other version {self.version}; the other versions are {others or 'none'}")


def return_to(change: Change, body: Return, tell: Tell) -> JobUpdate:
    with changed_model(change, tell) as model:
        model.return_to(body.version)
    return JobUpdate("done", result={"version": body.version})


class Rename(Body):
    """Give a class another name."""

    old: str
    new: str

    def check(self, served: ServedModel) -> None:
        _check_known(served, self.old)
        check_spelling([c for c in served.snapshot.model.classes if c != self.old], [clean_name(self.new)])


def rename(change: Change, body: Rename, tell: Tell) -> JobUpdate:
    with changed_model(change, tell) as model:
        model.rename(body.old, body.new)
    return JobUpdate("done", result={"old": body.old, "new": body.new})


class Correction(Body):
    """A change that is previewed on request."""

    preview: bool = PREVIEW

    def correct(self, model: Model) -> Any:
        raise NotImplementedError


def correct(change: Change, body: Correction, tell: Tell) -> JobUpdate:
    with changed_model(change, tell) as model:
        done = body.correct(model)
    return JobUpdate("done", result=done.to_json())


class Relabel(Correction):
    """Move images that were taught to another class, known or new."""

    images: list[ImageId] = IMAGES
    label: str = Field(description='Their class; "unknown" if they are none of the classes.')

    def check(self, served: ServedModel) -> None:
        if self.label != UNKNOWN:
            check_spelling(served.snapshot.model.classes, [clean_name(self.label)])

    def correct(self, model: Model) -> Any:
        return model.relabel([int(image, 16) for image in self.images], self.label, preview=self.preview)


class Unlearn(Correction):
    """Take images away that were taught, as if they had never been."""

    images: list[ImageId] = IMAGES
    for_good: bool = Field(default=False, description="Also delete every older version that knows one of them.")

    def correct(self, model: Model) -> Any:
        ids = [int(image, 16) for image in self.images]
        return model.unlearn(ids, for_good=self.for_good, preview=self.preview)


class Merge(Correction):
    """Make one class of several."""

    names: list[str] = Field(min_length=2, max_length=1000)
    new: str = Field(description="The name of one of them, or a new one.")

    def check(self, served: ServedModel) -> None:
        for name in self.names:
            _check_known(served, name)
        others = [name for name in served.snapshot.model.classes if name not in self.names]
        check_spelling(others, [clean_name(self.new)])

    def correct(self, model: Model) -> Any:
        return model.merge(self.names, self.new, preview=self.preview)


class Forget(Body):
    """Remove a class, as if it had never been taught; "unknown" removes all that was taught as none of the classes."""

    name: str
    for_good: bool = Field(default=False, description="Also delete everything that is kept of it, older versions too.")

    def check(self, served: ServedModel) -> None:
        if not self.for_good:  # what it has forgotten before may have left traces
            _check_known(served, self.name, served.snapshot.model.knowledge.records)


def forget(change: Change, body: Forget, tell: Tell) -> JobUpdate:
    notes: list[str] = []
    with changed_model(change, tell) as model:
        before = model.accuracy
        if body.for_good:
            notes = erase_class(model, body.name)
        else:
            model.forget(body.name)
    result = {"accuracy_before": before, "accuracy": model.accuracy, "notes": notes}
    return JobUpdate("done", result=result if body.for_good else {"name": body.name, **result})


class Export(Body):
    """Make the model's ONNX file; `GET /models/{name}/onnx` downloads it when the job is done."""

    def check(self, served: ServedModel) -> None:
        check_taught(served)


def export(change: Change, body: Export, tell: Tell) -> JobUpdate:
    from vqprompt.product.export.onnx import onnx_file  # slow to import

    write_atomically(change.target, onnx_file(open_model(change))[0])
    return JobUpdate("done", result={"bytes": change.target.stat().st_size}, file=change.target)


def check_taught(served: ServedModel) -> None:
    if not served.snapshot.model.classes:
        raise Conflict("the model has learned nothing yet; teach it first")


def _check_known(served: ServedModel, name: str, names: Collection[str] | None = None) -> None:
    try:
        check_known(name, served.snapshot.model.classes if names is None else names)
    except UserError as error:
        raise NotThere(str(error)) from None


@dataclass(frozen=True)
class Kind:
    """One kind of change. route: its address. body: what its request must contain; it checks itself. do: what the
    worker does. with_images: whether images come with the request, or from an upload."""

    route: str
    body: type[Body]
    do: Callable[[Change, Any, Tell], JobUpdate]
    with_images: bool = False


KINDS = {
    "teach": Kind("/models/{name}/teach", Teach, teach, with_images=True),
    "check": Kind("/models/{name}/uploads", Check, check, with_images=True),
    "undo": Kind("/models/{name}/undo", Undo, undo),
    "return": Kind("/models/{name}/return", Return, return_to),
    "rename": Kind("/models/{name}/rename", Rename, rename),
    "relabel": Kind("/models/{name}/relabel", Relabel, correct),
    "unlearn": Kind("/models/{name}/unlearn", Unlearn, correct),
    "merge": Kind("/models/{name}/merge", Merge, correct),
    "forget": Kind("/models/{name}/forget", Forget, forget),
    "onnx": Kind("/models/{name}/onnx", Export, export),
}

"""A model of your own that keeps learning: teach it, ask it, rename, forget, undo, save.

model = Model()
model.learn("birds/")                       # one folder per class
model.predict("garden.jpg")                 # "kestrel", or "unknown"
model.save("garden.vqp")

model = Model.load("garden.vqp")            # next month
model.learn("autumn/")                      # new classes are added, known ones get better
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Report, ignore
from vqprompt.product.model import file as files
from vqprompt.product.model.correcting import Correcting, misspellings
from vqprompt.product.model.efforts import check_effort, held_out, seconds_of_training, why_not_train
from vqprompt.product.model.extractor import Extractor, Opener, seconds_per_image
from vqprompt.product.model.hub import OnTheHub
from vqprompt.product.model.knowledge import Event, Knowledge, Stored, Version
from vqprompt.product.model.network import Network, open_extractor
from vqprompt.product.model.pictures import UNKNOWN, check_spelling, open_pictures
from vqprompt.product.model.records import ClassRecord, added
from vqprompt.product.model.teaching import Plan, Taught, about_training, decided, summary

if TYPE_CHECKING:
    from vqprompt.product.model.ingest import NewPictures

CROP = 0.875
SECONDS_TO_SOLVE = 0.8  # and to measure and write: about, for up to a thousand classes


class Model(Correcting, OnTheHub):
    """Any number of threads may use a model: changes happen one after another, and questions are answered meanwhile.

    backbone: a name (`vqprompt backbones`) or a weights file. size: image size in px, the backbone's own by default.
    device: "auto", "cpu", "cuda" … opener: opens what computes features; by default ONNX
    Runtime on CPUs and PyTorch on GPUs. precision: of features, "fp32" or "int8"; by default the faster one.
    """

    def __init__(
        self,
        backbone: str | Path = "vit-s14",
        *,
        size: int | None = None,
        crop: float = CROP,
        device: str = "auto",
        opener: Opener = open_extractor,
        precision: str | None = None,
    ) -> None:
        self.path: Path | None = None
        self._network = Network(str(backbone), size, crop, device, opener, precision)
        self._stored: Stored | None = None  # a new model has no file, and no backbone until it is needed
        self._checksum: str | None = None  # of the file, as this model knows it
        self._changing = threading.RLock()

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", backbone: str | Path | None = None) -> Model:
        """backbone: where its weights file is now, if it was moved."""
        path = Path(path).expanduser()
        stored, checksum = files.read(path)
        model = cls._of(stored, device, backbone)
        model.path, model._checksum = path, checksum
        return model

    @classmethod
    def from_bytes(cls, data: bytes, *, device: str = "auto", backbone: str | Path | None = None) -> Model:
        """The content of a model's file."""
        return cls._of(files.parse(data, Path("the model")), device, backbone)

    @classmethod
    def _of(cls, stored: Stored, device: str, backbone: str | Path | None) -> Model:
        own = stored.backbone
        model = cls(backbone or own.name, size=own.size, crop=own.crop, device=device, precision=own.precision)
        model._stored = stored
        return model

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        return files.pack(self._written())

    def shareable(self) -> Model:
        """A copy for other people: without other versions, which may hold forgotten classes, and without the path of
        the backbone."""
        stored = self._written()
        backbone = replace(stored.backbone, name=Path(stored.backbone.name).name)
        return self._of(replace(stored, backbone=backbone, others=()), self._network.device, self.weights)

    def __getstate__(self) -> dict[str, Any]:
        """What it knows is pickled as a model's file, so that later versions of this package can read it."""
        state = {name: value for name, value in vars(self).items() if name != "_changing"}
        return {**state, "_stored": None if self._stored is None else files.pack(self._stored)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state["_stored"]
        stored = None if packed is None else files.parse(packed, Path("the model"))
        vars(self).update(state, _stored=stored, _changing=threading.RLock())

    def __copy__(self) -> Model:
        """It shares what it knows, which never changes, and can be taught without changing this model."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), _network=copy(self._network), _changing=threading.RLock())
        return copied

    # ------------------------------------------------------------------ what it knows

    @property
    def classes(self) -> tuple[str, ...]:
        """Names, sorted; the columns of `predict_proba`."""
        return tuple(self.knowledge.classes)

    @property
    def counts(self) -> dict[str, int]:
        """Images learned of each class."""
        return self.knowledge.counts

    @property
    def counterexamples(self) -> int:
        """Images learned as none of the classes."""
        return 0 if self.knowledge.against is None else self.knowledge.against.count

    @property
    def accuracy(self) -> float | None:
        """Share of right answers for images that it has not learned (left out one at a time); every class counts the
        same."""
        return self.knowledge.accuracy

    @property
    def effort(self) -> str:
        """What was trained: "instant" for nothing, "good" for prompts, "best" for the network."""
        return "instant" if self.knowledge.trained is None else self.knowledge.trained.effort

    @property
    def history(self) -> tuple[Event, ...]:
        """The changes, oldest first."""
        return self.knowledge.history

    @property
    def versions(self) -> tuple[Version, ...]:
        """Those that are kept, by number: the model as it is (`knowledge.version`), earlier ones, and undone ones."""
        return (Version.of(Knowledge()),) if self._stored is None else self._stored.versions

    @property
    def can_undo(self) -> int:
        """How many steps."""
        return 0 if self._stored is None else len(self._stored.ancestors)

    def show(self) -> dict[str, Any]:
        """Everything known about the model, for people and programs."""
        backbone = None if self._stored is None else asdict(self._stored.backbone)
        size = self.path.stat().st_size if self.path is not None and self.path.is_file() else None
        known, versions = self.knowledge.to_json(), [asdict(version) for version in self.versions]
        return {**known, "backbone": backbone, "versions": versions, "can_undo": self.can_undo, "bytes": size}

    # ------------------------------------------------------------------ learn

    def learn(
        self,
        source: Any,
        labels: Sequence[str] | str | None = None,
        *,
        effort: str = "instant",
        hold_out: float = 0.2,
        skip_broken: bool = False,
        exclude: Iterable[str | Path] = (),
        seed: int = 0,
        on_disk: bool = True,
        classes: str = "",
        as_unknown: bool = False,
        preview: bool = False,
        announce: Callable[[Plan], None] | None = None,
        progress: Report = ignore,
    ) -> Taught:
        """Learn classes from a folder, an archive, a table, shards, or a list of images with labels. New classes are
        added, known ones get better. If anything goes wrong, the model stays as it was.

        effort: "instant" keeps sums of features and is exact; "good" also trains prompts, "best" the network, and
        "auto" decides whether training is worth its time. hold_out: if it is 0, accuracy is not measured. At effort
        instant, accuracy is measured by leaving out one image at a time, and the model learns from all images; at the
        others, this share of the images, and at least ten of a class or half of them, does not take part in training.
        skip_broken: leave out images that cannot be read. exclude: paths not to learn. seed: of the training. on_disk:
        decoded images may be put into a temporary file if there are many; otherwise all are kept in memory. classes:
        "outer" or "inner", if the images are in folders of folders. as_unknown: these images are none of the classes,
        although they look similar: what is nearer to them than to any class is unknown. preview: only tell what would
        change. announce: called with the plan before learning starts.
        """
        from vqprompt.product.model.ingest import DecodedPictures, fit, ingest, select  # slow to import

        with self._changing:
            started, before = time.monotonic(), self.knowledge
            check_effort(effort, before.trained)
            if not 0 <= hold_out < 1:
                raise UserError(f"hold_out={hold_out} must be a share from 0 up to, but not including, 1")
            if as_unknown and labels is not None:
                raise UserError(
                    "images that are none of the classes have no class; leave out --as, or leave out --as-unknown"
                )
            if as_unknown and effort != "instant":
                raise UserError(f"effort {effort} trains with classes only; teach what is unknown at effort instant")
            pictures, notes = open_pictures(source, "none" if as_unknown else labels, exclude, classes)
            if as_unknown:
                pictures = replace(pictures, classes=[UNKNOWN], labels=np.zeros_like(pictures.labels))
            check_spelling(before.classes, pictures.names)
            notes += misspellings({*pictures.names} - {*before.records}, before.classes)
            extractor, side = self.extractor_of(before), self.backbone.side
            before = self.knowledge  # of a new model, with the world under its network
            together = fit(pictures, side, effort)
            with closing(DecodedPictures(side, on_disk)) as decoded:
                new = select(pictures, before.records, decoded if together else None, skip_broken, progress)
                if not len(new):
                    notes.append("nothing new: the model knows all of these images")
                    return summary(before, before, new, notes, started)
                plan, records, trained, moved = None, None, before.trained, before.moved
                if effort == "auto":
                    records = ingest(new, extractor, before.records, skip_broken, progress)
                    training = self._plan(new, "best" if trained is None else trained.effort, hold_out, extractor)
                    plan = decided(training, before, records, new.labels)
                    effort = plan.effort
                if effort != "instant" and (reason := why_not_train(new.labels)) is not None:
                    notes.append(f"nothing was trained: {reason}; learned as at effort instant")
                    effort = "instant"
                if announce is not None:
                    announce(plan or self._plan(new, effort, hold_out, extractor))
                if effort == "instant":
                    records = records or ingest(new, extractor, before.records, skip_broken, progress)
                else:
                    from vqprompt.product.model.trained import retrain

                    plain, under = self._in_torch(None), partial(self._network.open, self.backbone)
                    done = retrain(before, new, effort, plain, under, hold_out, seed, progress)
                    trained, records = done.trained, done.records
                    notes += about_training(done.kept, done.expected)
                    moved, effort = (moved | before.classes.keys(), effort) if done.kept else (moved, "instant")
            former = {name: record.count for name, record in before.records.items()}
            grown = {name: record.count - former.get(name, 0) for name, record in sorted(records.items())}
            event = Event.now("learned", effort=effort, classes={name: n for name, n in grown.items() if n})
            now = before.changed(event, records=records, trained=trained, moved=moved, measured=hold_out > 0)
            if not preview:
                self._stored = self._opened().with_version(now)
            return summary(before, now, new, notes, started, effort, preview)

    def learn_records(self, records: Mapping[str, ClassRecord]) -> None:
        """Learn classes whose features were computed elsewhere, under the same network."""
        with self._changing:
            before = self._opened().knowledge
            check_spelling(before.classes, records)
            event = Event.now("learned", classes={name: record.count for name, record in records.items()})
            now = before.changed(event, records=added(before.records, records))
            self._stored = self._opened().with_version(now)

    def _plan(self, new: NewPictures, effort: str, hold_out: float, extractor: Extractor) -> Plan:
        seconds = SECONDS_TO_SOLVE + seconds_per_image(extractor, next(iter(new))) * len(new)
        if effort != "instant":
            shown = int((~held_out(np.array(new.labels), new.ids, hold_out)).sum())
            seconds += seconds_of_training(self._in_torch(None), effort, len(new), shown, bool(self.classes))
        names = [name for name in new.pictures.names if name != UNKNOWN]
        fresh = tuple(name for name in names if name not in self.knowledge.classes)
        return Plan(len(new), len(names), fresh, seconds, effort)

    # ------------------------------------------------------------------ change

    def undo(self, steps: int = 1) -> str:
        """Go back to the model before the last changes. Returns what was undone, newest first. Undone versions are kept
        for a while, so that `return_to` can bring them back."""
        with self._changing:
            before = self._opened()
            self._stored = before.undone(steps)
            undone = [before.knowledge, *before.ancestors][:steps]
            return ", ".join(Version.of(known).description for known in undone)

    def return_to(self, number: int) -> None:
        """Make the model what it was in another version. That is a change like others: it can be undone."""
        with self._changing:
            self._stored = self._opened().returned(number)

    # ------------------------------------------------------------------ file

    def save(self, path: str | Path | None = None, *, locked: bool = False) -> Path:
        """Write the model. At any moment, the file is the complete old one or the complete new one.

        path: where it was loaded from by default. locked: the caller holds the file's lock (see `file.locked`).
        """
        target = Path(path).expanduser() if path is not None else self.path
        if target is None:
            raise UserError("where to? Give a path, such as model.save('garden.vqp')")
        with self._changing:
            stored = self._written()
            with nullcontext() if locked else files.locked(target):
                known = self._checksum if target == self.path and target.is_file() else None
                if known is not None and files.checksum_inside(target) != known:
                    raise files.ModelError(
                        f"{target}: another process has taught this model since it was loaded; load it again and "
                        "repeat, or save under another name"
                    )
                self._checksum = files.write(target, stored)
            self.path = target
        return target

    def _written(self) -> Stored:
        if self._stored is None or not self._stored.latest:
            raise UserError("the model has learned nothing yet; teach it with learn")
        return self._stored

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.core.progress import Report, ignore
from vqprompt.core.words import shorten
from vqprompt.product.model import file as files
from vqprompt.product.model.answers import describe, share
from vqprompt.product.model.asking import Asking
from vqprompt.product.model.efforts import Trained, check_effort, seconds_of_training, why_not_train
from vqprompt.product.model.file import Backbone, Content, ModelError, Stored
from vqprompt.product.model.hub import OnTheHub
from vqprompt.product.model.pictures import check_spelling, clean_name, spelling
from vqprompt.product.model.records import ClassRecord
from vqprompt.product.model.solving import renamed, solved, updated_gram
from vqprompt.product.model.teaching import Plan, Taught, nothing_new, summary

CROP = 0.875


class Model(Asking, OnTheHub):
    """
    backbone: a name (`vqprompt backbones`) or a weights file. size: image size in px, the backbone's own by default.
    device: "auto", "cpu", "cuda" …
    """

    def __init__(
        self, backbone: str | Path = "vit-s14", *, size: int | None = None, crop: float = CROP, device: str = "auto"
    ) -> None:
        self.device, self._given = device, backbone
        self._size, self._crop = size, crop
        self._stored: Stored | None = None  # a new model has no file, and no backbone until it is needed
        self._features: Any = None  # of the bare backbone
        self._trained_features: tuple[Trained, Any] | None = None
        self._opening = threading.Lock()
        self.path: Path | None = None
        self._on_disk: str | None = None

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", backbone: str | Path | None = None) -> Model:
        """backbone: where its weights file is now, if it was moved."""
        path = Path(path).expanduser()
        stored, on_disk = files.read(path)
        model = cls(
            backbone or stored.backbone.name, size=stored.backbone.size, crop=stored.backbone.crop, device=device
        )
        model._stored, model.path, model._on_disk = stored, path, on_disk
        return model

    # ------------------------------------------------------------------ what it knows

    @property
    def classes(self) -> tuple[str, ...]:
        """Names, sorted; the columns of `predict_proba`."""
        return tuple(self.knowledge.classes)

    @property
    def counts(self) -> dict[str, int]:
        """Images learned of each class."""
        return {name: record.count for name, record in self.knowledge.classes.items()}

    @property
    def accuracy(self) -> float | None:
        """Share of right answers for images that it has not learned (left out one at a time); every class counts the
        same."""
        return self.knowledge.facts.get("accuracy")

    @property
    def effort(self) -> str:
        """What was trained: "instant" for nothing, "good" for prompts, "best" for the network."""
        return "instant" if self.knowledge.trained is None else self.knowledge.trained.effort

    @property
    def backbone(self) -> str:
        """The name of the backbone, or the path of its weights."""
        return str(self._given)

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        return self.knowledge.history

    @property
    def knowledge(self) -> Content:
        """What the model knows: its classes with what is kept of them, its classifier, what was measured."""
        return self._stored.content if self._stored is not None else Content()

    def show(self) -> dict[str, Any]:
        """Everything known about the model, for people and programs."""
        facts = self.knowledge.facts
        per_class = facts.get("per_class", {})
        stored = self._stored
        return {
            "classes": [
                {
                    "name": name,
                    "images": record.count,
                    "kinds": int(record.modes.max(initial=0)) + 1,
                    "accuracy": share(*per_class.get(name, (0, 0))),
                    "taught": self._dates(name),
                }
                for name, record in self.knowledge.classes.items()
            ],
            "images": sum(self.counts.values()),
            "accuracy": self.accuracy,
            "calibration_error": facts.get("calibration_error"),
            "shrinkage": facts.get("shrinkage"),
            "temperature": facts.get("temperature"),
            "backbone": None if stored is None else vars(stored.backbone),
            "effort": self.effort,
            "moved": facts.get("moved", []),
            "history": [dict(event) for event in self.history],
            "can_undo": 0 if stored is None else len(stored.past),
            "bytes": self.path.stat().st_size if self.path is not None and self.path.is_file() else None,
        }

    def _dates(self, name: str) -> list[str]:
        return [e["date"] for e in self.history if name in e.get("classes", {})]

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
        announce: Callable[[Plan], None] | None = None,
        progress: Report = ignore,
        where: Any = None,
    ) -> Taught:
        """Learn classes from a folder, an archive, a table, or a list of images with labels. New classes are added,
        known ones get better. If anything goes wrong, the model stays as it was.

        effort: "instant" keeps sums of features and is exact; "good" also trains prompts, "best" the network. hold_out:
        if it is 0, accuracy is not measured. At effort instant, accuracy is measured by leaving out one image at a
        time, and the model learns from all images; at the others, this share of the images does not take part in
        training. skip_broken: leave out images that cannot be read. exclude: paths not to learn. seed: of the training.
        on_disk: decoded images may be put into a temporary file if there are many; otherwise all are kept in memory.
        announce: called with the plan before learning starts. where: a cluster that computes the features
        (`on_ray.classroom`); None: this machine.
        """
        started = time.monotonic()
        check_effort(effort, self.knowledge.trained)
        if not 0 <= hold_out < 1:
            raise UserError(f"hold_out={hold_out} must be a share from 0 up to, but not including, 1")
        from vqprompt.product.model import streaming  # slow to import, and not needed to ask
        from vqprompt.product.model.decoded import DecodedPictures
        from vqprompt.product.model.reading import features_of, records_with, scan

        pictures, notes = streaming.to_learn(source, labels, exclude)
        check_spelling(self.classes, streaming.labels_of(pictures))
        extractor = self.extractor
        assert self._stored is not None
        if where is not None or streaming.too_many(pictures, self._stored.backbone.side):
            streaming.check_possible(effort, where, self.knowledge.trained)
            place = where or streaming.ThisMachine()
            return streaming.learn_many(self, pictures, notes, place, hold_out, skip_broken, announce, progress)
        with closing(DecodedPictures(self._stored.backbone.side, on_disk)) as decoded:
            new = scan(list(pictures), self.knowledge.classes, decoded, skip_broken, progress)
            if not new.pictures:
                return nothing_new(new, self.accuracy, notes, started)
            if effort != "instant" and (reason := why_not_train(new.labels)) is not None:
                notes.append(f"nothing was trained: {reason}; learned as at effort instant")
                effort = "instant"
            fresh = tuple(name for name in sorted(set(new.labels)) if name not in self.knowledge.classes)
            if announce is not None:
                announce(self._plan(effort, new.labels, fresh, extractor))
            before, trained = self.knowledge, self.knowledge.trained
            moved = set(before.facts.get("moved", []))
            if effort == "instant":
                records = records_with(features_of(extractor, new, progress), new, before.classes)
                classes = {**before.classes, **records}
            else:
                from vqprompt.product.model.trained import retrain

                done = retrain(self._features, trained, effort, new, before.classes, hold_out, seed, progress)
                trained, classes, records = done.trained, done.classes, done.changed
                moved |= before.classes.keys()
        event = self._event("learned", records, before, effort=effort)
        self._change(classes, event, hold_out > 0, trained, moved)
        return summary(before, self.knowledge, records, new, hold_out > 0, notes, started, effort)

    def _plan(self, effort: str, labels: list[str], fresh: tuple[str, ...], extractor: Any) -> Plan:
        each = extractor.seconds_per_image()
        seconds = each * len(labels)
        if effort != "instant":
            seconds += seconds_of_training(effort, len(labels), self._features.seconds_per_image(), bool(self.classes))
        return Plan(len(labels), len(set(labels)), fresh, seconds, effort)

    # ------------------------------------------------------------------ change

    def forget(self, name: str, *, for_good: bool = False) -> None:
        """Remove a class: the model becomes what it would be if it had never learned it.

        for_good: also remove its name from the history, and the older versions that `undo` could bring back.
        """
        self._known(name)
        classes = {n: r for n, r in self.knowledge.classes.items() if n != name}
        history = self._event("forgot", {}, self.knowledge, "a class, for good" if for_good else name)
        if for_good:
            history = tuple(
                {**e, "classes": {n: c for n, c in e["classes"].items() if n != name}} if "classes" in e else
                {**e, "detail": "a class"} if name in e.get("detail", "") else e
                for e in history
            )  # fmt: skip
        self._change(
            classes, history, self.accuracy is not None, self.knowledge.trained, self.knowledge.facts.get("moved")
        )
        if for_good:
            assert self._stored is not None
            self._stored = replace(self._stored, past=())

    def rename(self, old: str, new: str) -> None:
        """Give a class another name. Naming it like a class that exists is refused."""
        self._known(old)
        new = clean_name(new)
        if new == old:
            return
        check_spelling([name for name in self.classes if name != old], [new])
        if new in self.knowledge.classes:
            raise UserError(f"there is already a class {new!r}; classes cannot be merged by renaming")
        event = self._event("renamed", {}, self.knowledge, f"{old} → {new}")
        assert self._stored is not None
        self._add_version(renamed(replace(self.knowledge, history=event), old, new), self._stored.gram)

    def undo(self) -> str:
        """Go back to the model before the last change. Returns what was undone."""
        if self._stored is None or not self._stored.past:
            raise UserError("there is nothing to undo: no earlier version of this model is kept")
        undone, last = self.knowledge, self._stored.past[-1]
        gram = updated_gram(self._stored.gram, undone.classes, last.classes)
        self._stored = Stored(
            self._stored.backbone, solved(last, gram), gram, self._stored.past[:-1], self._stored.settings
        )
        return describe(undone.history[-1]) if undone.history else "the last change"

    def _change(
        self,
        classes: dict[str, ClassRecord],
        history: tuple[dict[str, Any], ...],
        measure: bool,
        trained: Trained | None = None,
        moved: Iterable[str] | None = None,
    ) -> None:
        """Make a new version. moved: classes whose memory was moved when the network was trained on other classes."""
        ordered = {name: classes[name] for name in sorted(classes)}
        facts = {"measured": measure, "moved": sorted(ordered.keys() & set(moved or ()))}
        assert self._stored is not None
        gram = updated_gram(self._stored.gram, self.knowledge.classes, ordered)
        self._add_version(solved(Content(ordered, history, facts, trained=trained), gram), gram)

    def _add_version(self, content: Content, gram: np.ndarray) -> None:
        assert self._stored is not None
        past = (*self._stored.past, self.knowledge) if self.knowledge.history else self._stored.past
        self._stored = Stored(self._stored.backbone, content, gram, past[-files.VERSIONS_KEPT :], self._stored.settings)

    def _event(
        self, what: str, records: dict[str, ClassRecord], before: Content, detail: str = "", effort: str = "instant"
    ) -> tuple[dict[str, Any], ...]:
        event: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "what": what}
        if detail:
            event["detail"] = detail
        if effort != "instant":
            event["effort"] = effort
        if records:
            counts = {n: r.count - (before.classes[n].count if n in before.classes else 0) for n, r in records.items()}
            event |= {"classes": counts, "images": sum(counts.values())}
        return (*before.history, event)

    def _known(self, name: str) -> None:
        if name not in self.knowledge.classes:
            near = [n for n in self.classes if spelling(n) == spelling(name)]
            hint = f"; did you mean {near[0]!r}?" if near else f"; it knows {shorten(self.classes) or 'no class yet'}"
            raise UserError(f"the model knows no class {name!r}{hint}")

    # ------------------------------------------------------------------ backbone and file

    @property
    def extractor(self) -> Any:
        """Features under the model's network: its backbone, and what was trained."""
        plain, trained = self._open_backbone(), self.knowledge.trained
        if trained is None:
            return plain
        from vqprompt.product.model.trained import with_trained

        with self._opening:
            if self._trained_features is None or self._trained_features[0] is not trained:
                self._trained_features = trained, with_trained(plain, trained)
            return self._trained_features[1]

    def _open_backbone(self) -> Any:
        """The backbone, loaded when it is first needed and checked against the one the model was made with."""
        with self._opening:
            if self._features is None:
                from vqprompt.core.backbones.load import backbone_path
                from vqprompt.product.model.features import open_features

                features, fingerprint = open_features(self._given, self._size, self._crop, self.device)
                if self._stored is None:
                    size, width = features.vit.config.image_size, features.width
                    backbone = Backbone(backbone_path(self._given), fingerprint, size, self._crop, width)
                    self._stored = Stored(backbone, Content(), np.zeros((width, width)))
                elif fingerprint != self._stored.backbone.fingerprint:
                    raise ModelError(
                        f"the model was taught with the backbone {self._stored.backbone.name} "
                        f"({self._stored.backbone.fingerprint[:12]}), and {self._given} has other weights "
                        f"({fingerprint[:12]}); give the right ones with --backbone"
                    )
                self._features = features
            return self._features

    def save(self, path: str | Path | None = None, *, locked: bool = False) -> Path:
        """Write the model. At any moment, the file is the complete old one or the complete new one.

        path: where it was loaded from by default. locked: the caller holds the file's lock (see `file.locked`).
        """
        target = Path(path).expanduser() if path is not None else self.path
        if target is None:
            raise UserError("where to? Give a path, such as model.save('garden.vqp')")
        if target.is_dir():
            raise UserError(f"{target}: this is a folder; a model is one file, such as {target}/garden.vqp")
        if self._stored is None:
            raise UserError("the model has learned nothing yet; teach it with learn")
        with nullcontext() if locked else files.locked(target):
            if (
                target == self.path
                and target.is_file()
                and self._on_disk is not None
                and files.checksum_inside(target) != self._on_disk
            ):
                raise ModelError(
                    f"{target}: another process has taught this model since it was loaded; load it again and repeat, "
                    "or save under another name"
                )
            self._on_disk = files.write(target, self._stored)
        self.path = target
        return target

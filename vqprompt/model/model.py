"""The living model: teach it, ask it, rename, forget, undo, save.

model = Model()
model.learn("birds/")                       # one folder per class
model.predict("garden.jpg")                 # "kestrel", or "unknown"
model.save("garden.vqp")

model = Model.load("garden.vqp")            # next month
model.learn("autumn/")                      # new classes join, known ones get better
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vqprompt.errors import ImageError, UserError
from vqprompt.model import file as files
from vqprompt.model.answers import Answer, describe, share, shorten
from vqprompt.model.calibration import familiarity
from vqprompt.model.closed_form import probabilities
from vqprompt.model.efforts import check_effort
from vqprompt.model.file import Backbone, Content, ModelError, Stored
from vqprompt.model.hub import OnTheHub
from vqprompt.model.pictures import (
    UNKNOWN,
    ImageLike,
    check_spelling,
    clean_name,
    find_pictures,
    spelling,
)
from vqprompt.model.records import ClassRecord
from vqprompt.model.solving import background_of, calibration_of, renamed, solved, updated_gram
from vqprompt.model.teaching import Plan, Taught, expectations, nothing_new, scan, suffering, take_in, without
from vqprompt.progress import Report, ignore

CROP = 0.875


class Model(OnTheHub):
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
        self._features: Any = None
        self._opening = threading.Lock()
        self.path: Path | None = None
        self._on_disk: str | None = None

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", backbone: str | Path | None = None) -> Model:
        """backbone: where its weights are now, if not where they were."""
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
        return tuple(self._content.classes)

    @property
    def counts(self) -> dict[str, int]:
        """Images learned of each class."""
        return {name: record.count for name, record in self._content.classes.items()}

    @property
    def accuracy(self) -> float | None:
        """Share of right answers for images that it has not learned (left out one at a time), over classes alike."""
        return self._content.facts.get("accuracy")

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        return self._content.history

    @property
    def _content(self) -> Content:
        return self._stored.content if self._stored is not None else Content()

    def show(self) -> dict[str, Any]:
        """All there is to tell about the model, for people and programs."""
        facts = self._content.facts
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
                for name, record in self._content.classes.items()
            ],
            "images": sum(self.counts.values()),
            "accuracy": self.accuracy,
            "calibration_error": facts.get("calibration_error"),
            "shrinkage": facts.get("shrinkage"),
            "temperature": facts.get("temperature"),
            "backbone": None if stored is None else vars(stored.backbone),
            "effort": "instant",
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
        announce: Callable[[Plan], None] | None = None,
        progress: Report = ignore,
    ) -> Taught:
        """Learn classes from a folder, an archive, a table, or a list of images with labels. Classes that are new join,
        those that are known get better. If anything goes wrong, the model stays as it was.

        effort: "instant" keeps sums of features and is exact. hold_out: 0 leaves accuracy unmeasured; otherwise it is
        measured by leaving out one image at a time, and the model learns from all images all the same. skip_broken: go
        on without images that cannot be read. exclude: paths not to learn. announce: called with what is about to
        happen, before it does.
        """
        started = time.monotonic()
        check_effort(effort)
        if not 0 <= hold_out < 1:
            raise UserError(f"hold_out={hold_out} must be a share from 0 up to, but not including, 1")
        pictures, notes = find_pictures(source, labels)
        pictures = [replace(p, label=clean_name(p.label)) for p in without(pictures, exclude)]
        if not pictures:
            raise ImageError("no image to learn from is left")
        check_spelling(self.classes, {p.label for p in pictures})
        new = scan(pictures, self._content.classes, skip_broken, progress)
        if not new.pictures:
            return nothing_new(new, self.accuracy, notes, started)
        names = sorted({p.label for p in new.pictures})
        fresh = tuple(name for name in names if name not in self._content.classes)
        extractor = self._open_features()
        if announce is not None:
            seconds = extractor.seconds_per_image() * len(new.pictures)
            announce(Plan(len(new.pictures), len(names), fresh, seconds))
        records, broken = take_in(extractor, new, self._content.classes, skip_broken, progress)
        before = self._content
        counted = sum(r.count for r in records.values()) - sum(self.counts.get(name, 0) for name in records)
        self._change({**before.classes, **records}, self._event("learned", records, before), hold_out > 0)
        return Taught(
            images=counted,
            new_classes=tuple(name for name in fresh if name in records),
            grown_classes=tuple(name for name in records if name in before.classes),
            known_images=new.known,
            copies=new.copies,
            broken=(*new.broken, *broken),
            accuracy=self.accuracy if hold_out else None,
            accuracy_before=before.facts.get("accuracy"),
            suffering=suffering(before.facts, self._content.facts),
            notes=(*notes, *expectations(self.counts)),
            seconds=time.monotonic() - started,
        )

    # ------------------------------------------------------------------ change

    def forget(self, name: str, *, for_good: bool = False) -> None:
        """Take a class away: afterwards the model is what it would be had it never learned it.

        for_good: its name goes from the history too, and so do the versions that `undo` could bring back.
        """
        self._known(name)
        classes = {n: r for n, r in self._content.classes.items() if n != name}
        history = self._event("forgot", {}, self._content, "a class, for good" if for_good else name)
        if for_good:
            history = tuple(
                {**e, "classes": {n: c for n, c in e["classes"].items() if n != name}} if "classes" in e else
                {**e, "detail": "a class"} if name in e.get("detail", "") else e
                for e in history
            )  # fmt: skip
        self._change(classes, history, self.accuracy is not None)
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
        if new in self._content.classes:
            raise UserError(f"there is already a class {new!r}; classes cannot be merged by renaming")
        event = self._event("renamed", {}, self._content, f"{old} → {new}")
        assert self._stored is not None
        self._add_version(renamed(replace(self._content, history=event), old, new), self._stored.gram)

    def undo(self) -> str:
        """Go back to the model before the last change. Returns what was undone."""
        if self._stored is None or not self._stored.past:
            raise UserError("there is nothing to undo: no earlier version of this model is kept")
        undone, last = self._content, self._stored.past[-1]
        gram = updated_gram(self._stored.gram, undone.classes, last.classes)
        self._stored = Stored(
            self._stored.backbone, solved(last, gram), gram, self._stored.past[:-1], self._stored.settings
        )
        return describe(undone.history[-1]) if undone.history else "the last change"

    def _change(self, classes: dict[str, ClassRecord], history: tuple[dict[str, Any], ...], measure: bool) -> None:
        """Make a new version. The gram matrix is a sum of whole numbers, so that adding and taking away is exact."""
        ordered = {name: classes[name] for name in sorted(classes)}
        assert self._stored is not None
        gram = updated_gram(self._stored.gram, self._content.classes, ordered)
        self._add_version(solved(Content(ordered, history, {"measured": measure}), gram), gram)

    def _add_version(self, content: Content, gram: np.ndarray) -> None:
        assert self._stored is not None
        past = (*self._stored.past, self._content) if self._content.history else self._stored.past
        self._stored = Stored(self._stored.backbone, content, gram, past[-files.VERSIONS_KEPT :], self._stored.settings)

    def _event(
        self, what: str, records: dict[str, ClassRecord], before: Content, detail: str = ""
    ) -> tuple[dict[str, Any], ...]:
        event: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "what": what}
        if detail:
            event["detail"] = detail
        if records:
            counts = {n: r.count - (before.classes[n].count if n in before.classes else 0) for n, r in records.items()}
            event |= {"classes": counts, "images": sum(counts.values())}
        return (*before.history, event)

    def _known(self, name: str) -> None:
        if name not in self._content.classes:
            near = [n for n in self.classes if spelling(n) == spelling(name)]
            hint = f"; did you mean {near[0]!r}?" if near else f"; it knows {shorten(self.classes)}"
            raise UserError(f"the model knows no class {name!r}{hint}")

    # ------------------------------------------------------------------ predict

    def predict(
        self, pictures: ImageLike | Sequence[ImageLike], *, unknown: bool = True, strictness: float = 0.0
    ) -> Any:
        """The class of one image (a name), or of several (a list of names); "unknown" for what is like no class.

        unknown: False always names a class. strictness: moves the threshold; above 0 more is called unknown.
        """
        answers = self.answers(pictures, unknown=unknown, strictness=strictness)
        return answers[0].name if _is_one(pictures) else [a.name for a in answers]

    def predict_proba(self, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Probabilities [n, classes] of several images, or [classes] of one, in the order of `classes`."""
        shares = self._asked(pictures)[0]
        return shares[0] if _is_one(pictures) else shares

    def answers(
        self, pictures: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: bool = True, strictness: float = 0.0
    ) -> list[Answer]:
        """One answer per image, with the `top` best classes."""
        return self._answers(*self._asked(pictures), top, unknown, strictness)

    def try_answers(
        self, pictures: Sequence[ImageLike], *, top: int = 1, unknown: bool = True, strictness: float = 0.0
    ) -> list[Answer | Exception]:
        """As `answers`; an image that cannot be read has its error in place of an answer."""
        self._check_taught()
        features = self._embed(pictures)
        good = [f for f in features if not isinstance(f, Exception)]
        answers = iter(self._answers(*self.judge(np.stack(good)), top, unknown, strictness) if good else ())
        return [f if isinstance(f, Exception) else next(answers) for f in features]

    def _answers(
        self, shares: np.ndarray, margin: np.ndarray, top: int, unknown: bool, strictness: float
    ) -> list[Answer]:
        classes = self.classes
        found = []
        for row, known_by in zip(shares, margin.tolist(), strict=True):
            best = np.argsort(-row, kind="stable")[:top]
            strange = unknown and known_by < strictness
            named = tuple((classes[i], float(row[i])) for i in best)
            found.append(Answer(UNKNOWN if strange else named[0][0], named, known_by))
        return found

    def embed(self, pictures: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Features [n, D] of images under the model's backbone."""
        rows = []
        for feature in self._embed([pictures] if _is_one(pictures) else list(pictures)):  # type: ignore[list-item, arg-type]
            if isinstance(feature, Exception):
                raise feature
            rows.append(feature)
        return np.stack(rows) if rows else np.zeros((0, self._open_features().width), np.float32)

    def _embed(self, pictures: Sequence[ImageLike]) -> list[np.ndarray | Exception]:
        wrapped, _ = find_pictures(list(pictures), "picture")
        extractor = self._open_features()
        return [extractor.of_one(wrapped[0])] if len(wrapped) == 1 else list(extractor.of(wrapped))

    def judge(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features [n, D] to probabilities [n, classes] and how far above the threshold of the known they lie [n]."""
        content = self._content
        self._check_taught()
        assert content.solved is not None
        calibration = calibration_of(content.facts)
        scores = content.solved.scores(features)
        shares = probabilities(scores, calibration.temperature)
        if content.spread is None or not np.isfinite(calibration.threshold):
            return shares, np.full(len(features), np.inf)
        nearness = background_of(content).scores(features) + 2 * scores.max(1)
        return shares, familiarity(shares, nearness, calibration) - calibration.threshold

    def _asked(self, pictures: ImageLike | Sequence[ImageLike]) -> tuple[np.ndarray, np.ndarray]:
        self._check_taught()
        return self.judge(self.embed(pictures))

    def _check_taught(self) -> None:
        if self._content.solved is None:
            raise UserError("the model has learned nothing yet; teach it with learn")

    # ------------------------------------------------------------------ backbone and file

    def _open_features(self) -> Any:
        """The backbone, loaded when it is first needed and checked against the one the model was made with."""
        with self._opening:
            if self._features is None:
                from vqprompt.backbones.load import backbone_path
                from vqprompt.model.features import open_features

                features, print_of_weights = open_features(self._given, self._size, self._crop, self.device)
                if self._stored is None:
                    size, width = features.vit.config.image_size, features.width
                    backbone = Backbone(backbone_path(self._given), print_of_weights, size, self._crop, width)
                    self._stored = Stored(backbone, Content(), np.zeros((width, width)))
                elif print_of_weights != self._stored.backbone.fingerprint:
                    raise ModelError(
                        f"the model was taught with the backbone {self._stored.backbone.name} "
                        f"({self._stored.backbone.fingerprint[:12]}), and {self._given} has other weights "
                        f"({print_of_weights[:12]}); give the right ones with --backbone"
                    )
                self._features = features
            return self._features

    def save(self, path: str | Path | None = None, *, locked: bool = False) -> Path:
        """Write the model; the file is the old one or the whole new one at any moment.

        path: where it was loaded from by default. locked: the caller holds the file's lock (see `file.locked`).
        """
        target = Path(path).expanduser() if path is not None else self.path
        if target is None:
            raise UserError("where to? Give a path, such as model.save('garden.vqp')")
        if target.is_dir():
            raise UserError(f"{target}: a folder; a model is one file, such as {target}/garden.vqp")
        if self._stored is None:
            raise UserError("the model has learned nothing yet; teach it with learn")
        with nullcontext() if locked else files.locked(target):
            if (
                target == self.path
                and target.is_file()
                and self._on_disk is not None
                and files.digest(target) != self._on_disk
            ):
                raise ModelError(
                    f"{target}: another process has taught this model since it was loaded; load it again and repeat, "
                    "or save under another name"
                )
            self._on_disk = files.write(target, self._stored)
        self.path = target
        return target


def _is_one(pictures: Any) -> bool:
    array = isinstance(pictures, np.ndarray) and pictures.ndim < 4
    return array or isinstance(pictures, str | Path | bytes | Image.Image)

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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vqprompt.errors import ImageError, UserError
from vqprompt.model import file as files
from vqprompt.model.calibration import Background, Calibration, familiarity, solve
from vqprompt.model.closed_form import probabilities
from vqprompt.model.efforts import check_effort
from vqprompt.model.file import Backbone, Content, ModelError, Stored
from vqprompt.model.pictures import (
    UNKNOWN,
    ImageLike,
    Picture,
    check_spelling,
    clean_name,
    find_pictures,
    name_of,
    spelling,
)
from vqprompt.model.records import ClassRecord, gram_of, to_fixed_point
from vqprompt.progress import Progress, Report, Stage, ignore

FEW = 5  # images per class below which a word of warning is due
SUFFERS = 0.05  # a class whose accuracy falls by more than this is named
CROP = 0.875


@dataclass(frozen=True)
class Plan:
    """What `learn` is about to do, told before it starts."""

    images: int
    classes: int
    new_classes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Taught:
    """What a teaching did.

    accuracy: share of right answers for images that were left out one at a time, over all classes alike; None where it
    was not measured. suffering: classes that are recognized less often than before, with both shares.
    """

    images: int
    new_classes: tuple[str, ...]
    grown_classes: tuple[str, ...]
    known_images: int
    copies: int
    broken: tuple[str, ...]
    accuracy: float | None
    accuracy_before: float | None
    suffering: tuple[tuple[str, float, float], ...]
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Answer:
    """What is in one image. name: the best class, or "unknown". classes: the best ones with their probabilities.
    familiarity: how far above the threshold for known images it lies; below 0 is unknown."""

    name: str
    classes: tuple[tuple[str, float], ...]
    familiarity: float


@dataclass
class _New:
    """Pictures that are to be learned, by content."""

    pictures: list[Picture] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    known: int = 0
    copies: int = 0
    broken: list[str] = field(default_factory=list)


class Model:
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
                    "accuracy": _share(*per_class.get(name, (0, 0))),
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
        pictures = [replace(p, label=clean_name(p.label)) for p in _without(pictures, exclude)]
        if not pictures:
            raise ImageError("no image to learn from is left")
        check_spelling(self.classes, {p.label for p in pictures})
        new = self._scan(pictures, skip_broken, progress)
        if not new.pictures:
            return self._nothing_new(new, notes, started)
        names = sorted({p.label for p in new.pictures})
        fresh = tuple(name for name in names if name not in self._content.classes)
        extractor = self._open_features()
        if announce is not None:
            seconds = extractor.seconds_per_image() * len(new.pictures)
            announce(Plan(len(new.pictures), len(names), fresh, seconds))
        records, broken = self._take_in(extractor, new, skip_broken, progress)
        before = self._content
        counted = sum(r.count for r in records.values()) - sum(self.counts.get(name, 0) for name in records)
        self._change({**before.classes, **records}, self._event("learned", records, before), hold_out > 0)
        return Taught(
            counted, tuple(n for n in fresh if n in records), tuple(n for n in records if n in before.classes),
            new.known, new.copies, (*new.broken, *broken), self.accuracy if hold_out else None,
            before.facts.get("accuracy"),
            _suffering(before.facts, self._content.facts), (*notes, *self._expectations()), time.monotonic() - started,
        )  # fmt: skip

    def _scan(self, pictures: list[Picture], skip_broken: bool, progress: Report) -> _New:
        """Name every picture by its content; leave out what is known, refuse what is in two classes."""
        owner = {int(n): name for name, record in self._content.classes.items() for n in record.names}
        new, seen = _New(), dict[int, Picture]()
        for done, picture in enumerate(pictures, start=1):
            try:
                name = name_of(picture.open())
            except (OSError, ImageError, ValueError) as error:
                new.broken.append(
                    str(error) if isinstance(error, UserError) else f"{picture.where}: cannot be read ({error})"
                )
                if not skip_broken:
                    raise ImageError(
                        f"{new.broken[0]}; mend it, or go on without such images (--skip-broken)"
                    ) from None
                continue
            if name in seen:
                if seen[name].label != picture.label:
                    raise ImageError(
                        f"the same picture is in two classes: {seen[name].where} ({seen[name].label}) and "
                        f"{picture.where} ({picture.label}); take it out of one of them"
                    )
                new.copies += 1
            elif name in owner:
                if owner[name] != picture.label:
                    raise ImageError(
                        f"{picture.where}: the model has learned this picture as {owner[name]!r}, not "
                        f"{picture.label!r}; take it out, or forget that class first"
                    )
                new.known += 1
            else:
                new.pictures.append(picture)
                new.names.append(name)
            seen[name] = picture
            progress(Progress(Stage.STARTING, done, len(pictures), detail="looking through the files"))
        return new

    def _take_in(
        self, extractor: Any, new: _New, skip_broken: bool, progress: Report
    ) -> tuple[dict[str, ClassRecord], list[str]]:
        """The records of all classes that change, with the new images in them."""
        rows: dict[str, tuple[list[int], list[np.ndarray]]] = {}
        broken = []
        found = extractor.of(new.pictures)
        for done, (picture, name, feature) in enumerate(zip(new.pictures, new.names, found, strict=True), start=1):
            if isinstance(feature, UserError | OSError):
                message = str(feature)
                if not skip_broken:
                    found.close()
                    raise ImageError(f"{message} (or go on without such images: --skip-broken)")
                broken.append(message)
            elif isinstance(feature, Exception):
                raise feature
            else:
                held = rows.setdefault(picture.label, ([], []))
                held[0].append(name)
                held[1].append(to_fixed_point(feature))
            progress(Progress(Stage.LEARNING, done, len(new.pictures)))
        if not rows:
            raise ImageError(f"none of the {len(new.pictures)} images can be read, so nothing was learned")
        records = {}
        for label in sorted(rows):
            record = ClassRecord.of(np.array(rows[label][0], np.uint64), np.stack(rows[label][1]))
            known = self._content.classes.get(label)
            records[label] = record if known is None else known.merged(record)
        return records, broken

    def _nothing_new(self, new: _New, notes: list[str], started: float) -> Taught:
        if new.broken and not new.known:
            raise ImageError(f"none of the {len(new.broken)} images can be read, so nothing was learned")
        return Taught(
            0, (), (), new.known, new.copies, tuple(new.broken), self.accuracy, self.accuracy, (),
            (*notes, "nothing new: the model knows all of these images"), time.monotonic() - started,
        )  # fmt: skip

    def _expectations(self) -> list[str]:
        few = [name for name, count in self.counts.items() if count < FEW]
        if not few:
            return []
        least = min(self.counts[name] for name in few)
        named = ", ".join(few[:3]) + (" …" if len(few) > 3 else "")
        return [
            f"{len(few)} classes have fewer than {FEW} images ({named}; the least has {least}). Expect more mistakes: "
            "with 1 image per class about a third, with 5 about three quarters of the right answers that 20 images give"
        ]

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
        classes = {new if n == old else n: r for n, r in self._content.classes.items()}
        event = self._event("renamed", {}, self._content, f"{old} → {new}")
        history = tuple(
            {**e, "classes": {new if n == old else n: c for n, c in e["classes"].items()}} if "classes" in e else e
            for e in event
        )
        self._change(classes, history, self.accuracy is not None)

    def undo(self) -> str:
        """Go back to the model before the last change. Returns what was undone."""
        if self._stored is None or not self._stored.past:
            raise UserError("there is nothing to undo: no earlier version of this model is kept")
        undone, last = self._content, self._stored.past[-1]
        gram = self._gram_for(last.classes)
        self._stored = Stored(
            self._stored.backbone, _solved(last, gram), gram, self._stored.past[:-1], self._stored.settings
        )
        return _told(undone.history[-1]) if undone.history else "the last change"

    def _change(self, classes: dict[str, ClassRecord], history: tuple[dict[str, Any], ...], measure: bool) -> None:
        """Make a new version. The gram matrix is a sum of whole numbers, so that adding and taking away is exact."""
        assert self._stored is not None
        ordered = {name: classes[name] for name in sorted(classes)}
        gram = self._gram_for(ordered)
        content = _solved(Content(ordered, history, {"measured": measure}), gram)
        past = (*self._stored.past, self._content) if self._content.history else self._stored.past
        self._stored = Stored(self._stored.backbone, content, gram, past[-files.VERSIONS_KEPT :], self._stored.settings)

    def _gram_for(self, classes: dict[str, ClassRecord]) -> np.ndarray:
        assert self._stored is not None
        now = {id(r): r for r in self._content.classes.values()}
        then = {id(r): r for r in classes.values()}
        gram = self._stored.gram.copy()
        for key in now.keys() - then.keys():
            gram -= gram_of(now[key])
        for key in then.keys() - now.keys():
            gram += gram_of(then[key])
        return gram

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
            hint = f"; did you mean {near[0]!r}?" if near else f"; it knows {_some(self.classes)}"
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
        calibration = _calibration(content.facts)
        scores = content.solved.scores(features)
        shares = probabilities(scores, calibration.temperature)
        if content.spread is None or not np.isfinite(calibration.threshold):
            return shares, np.full(len(features), np.inf)
        nearness = _background(content).scores(features) + 2 * scores.max(1)
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

    # ------------------------------------------------------------------ the hub

    @classmethod
    def from_pretrained(cls, name: str | Path, **settings: Any) -> Model:
        """A model from the Hugging Face hub ("somebody/garden"), or from a folder that `save_pretrained` wrote."""
        from vqprompt.export.hub import from_pretrained

        return from_pretrained(name, **settings)

    def save_pretrained(self, folder: str | Path, **settings: Any) -> Path:
        """Write the model with a card into a folder, as the hub has it."""
        from vqprompt.export.hub import save_pretrained

        return save_pretrained(self, folder, **settings)

    def push_to_hub(self, repo_id: str, **settings: Any) -> str:
        """Upload the model with a card. Returns its address."""
        from vqprompt.export.hub import push_to_hub

        return push_to_hub(self, repo_id, **settings)


# ---------------------------------------------------------------------------------------------- small things


def _solved(content: Content, gram: np.ndarray) -> Content:
    """The content with its classifier and what was found out about it."""
    measure = content.facts.get("measured", True)
    if not content.classes:
        return Content({}, content.history, {"measured": measure})
    names, records = list(content.classes), list(content.classes.values())
    found = solve(records, gram)
    c = found.calibration
    facts: dict[str, Any] = {
        "measured": measure,
        "shrinkage": found.shrinkage,
        "temperature": c.temperature,
        "certainty": list(c.certainty),
        "nearness": list(c.nearness),
        "threshold": c.threshold if np.isfinite(c.threshold) else None,
        "background": found.background.constant,
    }
    testable = found.tested > 0
    if measure and testable.any() and len(names) > 1:
        facts["accuracy"] = float((found.right[testable] / found.tested[testable]).mean())
        facts["per_class"] = {n: [int(r), int(t)] for n, r, t in zip(names, found.right, found.tested, strict=True)}
        facts["calibration_error"] = list(found.calibration_error)
    spread = np.concatenate([found.background.matrix, found.background.vector[None]])
    return Content(content.classes, content.history, facts, found.discriminant, spread)


def _calibration(facts: dict[str, Any]) -> Calibration:
    threshold = facts["threshold"]
    return Calibration(
        facts["temperature"], tuple(facts["certainty"]), tuple(facts["nearness"]),
        -np.inf if threshold is None else threshold,
    )  # fmt: skip


def _background(content: Content) -> Background:
    assert content.spread is not None
    return Background(content.spread[:-1], content.spread[-1], content.facts["background"])


def _suffering(before: dict[str, Any], now: dict[str, Any]) -> tuple[tuple[str, float, float], ...]:
    old, new = before.get("per_class", {}), now.get("per_class", {})
    found = [(n, old[n][0] / old[n][1], new[n][0] / new[n][1]) for n in old if old[n][1] and new.get(n, (0, 0))[1]]
    worse = [f for f in found if f[1] - f[2] > SUFFERS]
    return tuple(sorted(worse, key=lambda f: f[2] - f[1]))


def _without(pictures: list[Picture], exclude: Iterable[str | Path]) -> list[Picture]:
    out = {str(Path(p).expanduser().resolve()) for p in exclude}
    return [p for p in pictures if str(Path(p.where).resolve()) not in out] if out else pictures


def _is_one(pictures: Any) -> bool:
    return isinstance(pictures, str | Path | Image.Image) or (isinstance(pictures, np.ndarray) and pictures.ndim < 4)


def _share(right: int, tested: int) -> float | None:
    return right / tested if tested else None


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (f" … ({len(names)} in all)" if len(names) > most else "") or "none yet"


def _told(event: dict[str, Any]) -> str:
    if event["what"] == "learned":
        return f"learned {event['images']} images of {_some(list(event['classes']), 3)} ({event['date'][:10]})"
    return f"{event['what']} {event.get('detail', '')} ({event['date'][:10]})"

"""Tests a model with images whose classes are known.

What is notable about this implementation:
- The main figure is balanced: every class counts the same, however many images it has. So 5,000 dogs do not hide that
  half of 30 horses are missed.
- Every share comes with its counts and an interval (Wilson, 95 %), because 3 of 3 does not prove 100 %.
- "unknown" is an answer. It is a mistake for a class that the model knows, and right for any other class.
- Images are read and shown to the network once, even if the model is compared with the one before its last teaching.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.metrics import ReliabilityBin, balanced_interval, calibration_error, reliability, wilson
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.words import counted
from vqprompt.product.model.extractor import unless_error
from vqprompt.product.model.model import Model
from vqprompt.product.model.pictures import (
    UNKNOWN,
    Picture,
    clean_name,
    content_id,
    find_pictures,
    own_test_pictures,
    spelling,
)
from vqprompt.product.model.predicting import answers_to
from vqprompt.product.model.records import ids_of

BINS = 10


@dataclass(frozen=True)
class Share:
    """`hits` of `total`, with an interval that holds the true share 19 times in 20 (Wilson)."""

    hits: int
    total: int

    @property
    def value(self) -> float | None:
        return self.hits / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.value or 0.0, self.total)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {"hits": self.hits, "total": self.total, "share": self.value, "low": low, "high": high}


@dataclass(frozen=True)
class PerClass:
    """recall: how many images of this class were recognized. precision: how many images named so are of this class."""

    name: str
    recall: Share
    precision: Share
    recall_before: Share | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: part.to_json() if isinstance(part, Share) else part for name, part in vars(self).items()}


@dataclass(frozen=True)
class ImageAnswer:
    """One image and what the model says. probability: of the most likely class, `best`. note: why that is not known."""

    where: str
    label: str
    answer: str
    best: str
    probability: float
    familiarity: float
    note: str = ""

    @property
    def right(self) -> bool:
        return self.answer == self.label


@dataclass(frozen=True)
class Evaluation:
    """The result of a test. images: of classes that the model knows. others: images of other classes. earlier: what the
    model before its last teaching recognized, by class; empty if there is nothing to compare with."""

    classes: tuple[str, ...]
    images: tuple[ImageAnswer, ...]
    others: tuple[ImageAnswer, ...] = ()
    unreadable: tuple[str, ...] = ()
    earlier: Mapping[str, Share] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    opened: dict[str, Callable[[], Any]] = field(default_factory=dict, repr=False)

    @cached_property
    def confusion(self) -> np.ndarray:
        """Counts [classes, classes + 1]; the last column is "unknown"."""
        place = {name: number for number, name in enumerate((*self.classes, UNKNOWN))}
        counts = np.zeros((len(self.classes), len(place)), int)
        for a in self.images:
            counts[place[a.label], place[a.answer]] += 1
        return counts

    @cached_property
    def per_class(self) -> tuple[PerClass, ...]:
        hits, of, named = (
            c.tolist() for c in (self.confusion.diagonal(), self.confusion.sum(1), self.confusion.sum(0))
        )
        return tuple(
            PerClass(name, Share(hits[c], of[c]), Share(hits[c], named[c]), self.earlier.get(name))
            for c, name in enumerate(self.classes)
        )

    @cached_property
    def reliability(self) -> tuple[ReliabilityBin, ...]:
        """Per bin of certainty, the images, their average certainty and the share that was right (without the threshold
        for unknown)."""
        right = np.array([a.best == a.label for a in self.images], float)
        return reliability(np.array([a.probability for a in self.images]), right, BINS)

    @property
    def accuracy(self) -> Share:
        """Of all images, each weighted equally."""
        return Share(sum(a.right for a in self.images), len(self.images))

    @property
    def balanced_accuracy(self) -> float | None:
        """The average over classes of the share that was recognized."""
        return _balanced(c.recall for c in self.per_class)

    @property
    def balanced_accuracy_before(self) -> float | None:
        return _balanced(self.earlier.values())

    @property
    def balanced_accuracy_interval(self) -> tuple[float, float]:
        """95 % (Wilson)."""
        return balanced_interval(self.balanced_accuracy or 0.0, [c.recall.total for c in self.per_class])

    @property
    def called_unknown(self) -> Share:
        """Images of known classes that were called unknown."""
        return Share(sum(a.answer == UNKNOWN for a in self.images), len(self.images))

    @property
    def without_unknown(self) -> Share:
        """Of all images, if the model had to name a class; the accuracy of a teaching is measured like this."""
        return Share(sum(a.best == a.label for a in self.images), len(self.images))

    @property
    def others_refused(self) -> Share:
        """Images of other classes that were called unknown."""
        return Share(sum(a.answer == UNKNOWN for a in self.others), len(self.others))

    @property
    def calibration_error(self) -> float | None:
        return calibration_error(self.reliability) if self.images else None

    def to_json(self) -> dict[str, Any]:
        """The same for the command line and for programs."""
        low, high = self.balanced_accuracy_interval
        balanced = {"share": self.balanced_accuracy, "low": low, "high": high, "before": self.balanced_accuracy_before}
        return {
            "images": len(self.images),
            "balanced_accuracy": balanced,
            "accuracy": self.accuracy.to_json(),
            "unknown": self.called_unknown.to_json(),
            "images_of_other_classes": self.others_refused.to_json(),
            "calibration_error": self.calibration_error,
            "classes": [c.to_json() for c in self.per_class],
            "confusion": {"columns": [*self.classes, "unknown"], "rows": self.confusion.tolist()},
            "confused_pairs": [{"class": a, "taken_for": b, "times": n} for a, b, n in self.confused_pairs()],
            "reliability": [{"images": n, "certainty": s, "right": r} for n, s, r in self.reliability],
            "mistakes": [
                vars(m) | ({} if np.isfinite(m.familiarity) else {"familiarity": None}) for m in self.mistakes()
            ],
            "unreadable": list(self.unreadable),
            "notes": list(self.notes),
        }

    def mistakes(self) -> list[ImageAnswer]:
        """Wrong answers, the most certain first."""
        wrong = (a for a in self.images if not a.right)
        return sorted(wrong, key=lambda m: (m.answer == UNKNOWN, -m.probability, m.where))

    def confused_pairs(self) -> list[tuple[str, str, int]]:
        """A class, the class it was taken for, and how often; most often first, then by share of the class's images."""
        pairs = Counter((a.label, a.answer) for a in self.images if not a.right and a.answer != UNKNOWN)
        totals = Counter(a.label for a in self.images)
        return [(*pair, n) for pair, n in sorted(pairs.items(), key=lambda f: (-f[1], -f[1] / totals[f[0][0]], f[0]))]


def evaluate(
    model: Model,
    source: Any,
    labels: Sequence[str] | str | None = None,
    *,
    classes: str = "",
    before: Model | None = None,
    refuse_unknown_classes: bool = False,
    unknown: bool = True,
    strictness: float = 0.0,
    progress: Report = ignore,
) -> Evaluation:
    """Test with a folder of one folder per class, a table, or a list of images with labels.

    classes: as in `Model.learn`. before: the same model before its last teaching, to compare with.
    refuse_unknown_classes: raise an error instead of counting images of classes that the model does not know.
    """
    model.check_taught()
    if isinstance(source, str | Path) and labels is None:
        path = Path(source).expanduser()
        source = path / "test" if (path / "test").is_dir() else own_test_pictures(path, classes) or path
    pictures, notes = find_pictures(source, labels, classes)
    spelled = {spelling(c): c for c in model.classes}  # the model's spelling of its classes
    names = [spelled.get(spelling(name), name) for name in (clean_name(p.label) for p in pictures)]
    if strange := sorted({n for n in names if n not in model.classes}):
        if refuse_unknown_classes:
            raise UserError(
                f"the model does not know {', '.join(map(repr, strange[:5]))}{' …' if len(strange) > 5 else ''}; "
                "teach it these classes, remove their folders, or leave out --known-only to count them as unknown"
            )
        are = "is" if len(strange) == 1 else "are"
        notes.append(f"{counted(len(strange), 'class')} {are} not known to the model; the right answer is unknown")
    contents: list[int] = []
    features, kept, broken = _embed(model, [_noting(p, contents) for p in pictures], progress)
    if taught := int(np.isin(np.array(contents, np.uint64), ids_of(model.knowledge.records.values())).sum()):
        notes.append(f"{taught} of {counted(len(pictures), 'image')} were taught to this model; others tell more")
    if not kept:
        raise ImageError(f"none of the images can be read, so there is nothing to test with ({broken[0]})")
    told = [(pictures[number].where, names[number]) for number in kept]
    asked = _answers(model, features, told, unknown, strictness)
    earlier = {}
    if before is not None:
        known_before = [a for a in _answers(before, features, told, unknown, strictness) if a.label in before.classes]
        recalls = Evaluation(before.classes, tuple(known_before)).per_class
        earlier = {c.name: c.recall for c in recalls if c.recall.total}
    known, others = ([a for a in asked if (a.label in model.classes) is part] for part in (True, False))
    opened = {p.where: p.open for p in pictures}
    return Evaluation(model.classes, tuple(known), tuple(others), tuple(broken), earlier, tuple(notes), opened)


def _embed(model: Model, pictures: list[Picture], progress: Report) -> tuple[np.ndarray, list[int], list[str]]:
    rows, kept, broken = [], [], []
    for number, feature in enumerate(model.extractor.of(pictures)):
        if isinstance(feature, UserError | OSError):
            broken.append(str(feature))
        else:
            rows.append(unless_error(feature))
            kept.append(number)
        progress(Progress(Stage.TESTING, number + 1, len(pictures)))
    return np.array(rows, np.float32), kept, broken


def _noting(picture: Picture, contents: list[int]) -> Picture:
    """The same picture, whose content is identified when it is opened."""

    def opened() -> Any:
        content = picture.open()
        contents.append(content_id(content))
        return content

    return replace(picture, open=opened)


def _answers(
    model: Model, features: np.ndarray, told: list[tuple[str, str]], unknown: bool, strictness: float
) -> list[ImageAnswer]:
    """told: where each image is, and its class."""
    answers = answers_to(model.knowledge, features, 1, unknown, strictness)
    pairs = zip(told, answers, strict=True)
    return [ImageAnswer(*place, a.name, *a.classes[0], a.familiarity, a.note) for place, a in pairs]


def _balanced(recalls: Iterable[Share]) -> float | None:
    tested = [recall.value for recall in recalls if recall.value is not None]
    return float(np.mean(tested)) if tested else None

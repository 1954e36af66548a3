"""What a teaching is about to do, what it did, and words about it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vqprompt.core.metrics import wilson
from vqprompt.core.words import counted, shorten
from vqprompt.product.model.calibration import Measurements
from vqprompt.product.model.efforts import REMOVED, SECONDS_PER_POINT, WORTH, why_not_train
from vqprompt.product.model.knowledge import Event, Knowledge
from vqprompt.product.model.left_out import Changes
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.model.predicting import answers_to

if TYPE_CHECKING:
    from vqprompt.product.model.ingest import NewPictures
    from vqprompt.product.model.records import ClassRecord

FEW = 5  # a class with fewer images gets a warning
SUFFERS = 0.05  # a class whose accuracy falls by more than this is named, and one that takes more from another class
UNLIKE, MANY = 0.75, 10  # a class gets a warning if more of its new images, of so many, looked like something else
TAKES = 0.03  # a class that takes more than this share of the world's images away from "unknown" gets a warning


@dataclass(frozen=True)
class Plan:
    """What `learn` is about to do; announced before it starts."""

    images: int
    classes: int
    new_classes: tuple[str, ...]
    seconds: float
    effort: str = "instant"
    gain: float | None = None  # expected from training, in accuracy; only at effort auto


@dataclass(frozen=True)
class TaughtClass:
    """A class in a teaching. images: that were learned now. new: whether the model did not know the class before."""

    name: str
    images: int
    new: bool


@dataclass(frozen=True)
class Suffering:
    """A class that is recognized less often than before a teaching. before, now: shares of right answers."""

    name: str
    before: float
    now: float


@dataclass(frozen=True)
class LostAnswers:
    """Answers that a class, or "unknown", takes away in a change of the model. source: from which class; None: from
    "unknown". images: how many, out of `of`: left-out images of the source, or images of the world. looked: what new
    images of the class looked like before, if they are its own that are counted, and mostly looked like the source."""

    name: str
    source: str | None
    images: int
    of: int
    looked: str = ""

    def __str__(self) -> str:
        if self.looked:
            return f"{self.images} of {self.of} new images of {self.name} did not look like it before: {self.looked}"
        what = "ordinary images that were unknown" if self.source is None else f"left-out images of {self.source}"
        return f"{self.name} takes {self.images} of {self.of} {what}"

    def to_json(self) -> dict[str, Any]:
        return {"class": self.name, "from": self.source, "images": self.images, "of": self.of, "text": str(self)}


@dataclass(frozen=True)
class Taught:
    """What a teaching did. effort: what was really done; with too few images nothing is trained.

    known_images, copies: images that were left out because the model knew them, or because they were repeated. broken:
    a message for each image that cannot be read. accuracy: share of right answers for images that were left out one at
    a time, every class weighted equally; None if it was not measured. changes: of answers, if it was only a preview.
    accuracy_interval: 95 % (Wilson). warnings: of answers that the teaching took away, worst first.
    """

    classes: tuple[TaughtClass, ...]
    known_images: int
    copies: int
    broken: tuple[str, ...]
    accuracy: float | None
    accuracy_before: float | None
    suffering: tuple[Suffering, ...]
    notes: tuple[str, ...]
    seconds: float
    effort: str = "instant"
    changes: Changes | None = None
    accuracy_interval: tuple[float, float] | None = None
    warnings: tuple[LostAnswers, ...] = ()

    @property
    def images(self) -> int:
        return sum(taught.images for taught in self.classes)

    @property
    def new_classes(self) -> tuple[str, ...]:
        return tuple(taught.name for taught in self.classes if taught.new and taught.name != UNKNOWN)

    @property
    def grown_classes(self) -> tuple[str, ...]:
        return tuple(taught.name for taught in self.classes if not taught.new and taught.name != UNKNOWN)

    @property
    def counterexamples(self) -> int:
        """Images that were learned as none of the classes."""
        return sum(taught.images for taught in self.classes if taught.name == UNKNOWN)

    def to_json(self) -> dict[str, Any]:
        """For programs: the same on the command line and over HTTP (docs/teaching.md)."""
        return {
            "images": self.images,
            **asdict(self),
            "warnings": [warning.to_json() for warning in self.warnings],
            "seconds": round(self.seconds, 2),
            "changes": None if self.changes is None else self.changes.to_json(),
        }


def summary(
    before: Knowledge, now: Knowledge, new: NewPictures, notes: list[str], started: float, effort: str = "instant",
    preview: bool = False,
) -> Taught:  # fmt: skip
    """What a teaching did, from the model before and after it."""
    suffering = _suffering(before.measurements, now.measurements)
    learned = {} if now is before else now.history[-1].classes
    changes = Changes.between(before, now) if preview or suffering or UNKNOWN in learned else None
    taught = tuple(TaughtClass(name, images, name not in before.records) for name, images in learned.items())
    expected = [] if now is before else _expectations(now.counts)
    return Taught(
        taught, new.known, new.copies, tuple(new.broken), now.accuracy, before.accuracy, suffering,
        (*notes, *expected), time.monotonic() - started, effort, changes if preview else None, now.accuracy_interval,
        (*_unlike(before, now, learned), *lost_answers(before, now, changes)),
    )  # fmt: skip


def decided(plan: Plan, before: Knowledge, records: Mapping[str, ClassRecord], labels: Sequence[str]) -> Plan:
    """At effort auto: what training is expected to bring, and whether it is worth its time. plan: of the training.
    records: what would be known without it; the accuracy that is measured then tells how much is wrong."""
    now = before.changed(Event.now("learned"), records=records, measured=True)
    gain = 0.0
    if now.accuracy is not None and why_not_train(labels) is None:
        gain = REMOVED * (1 - now.accuracy) * len(set(labels)) / len(now.classes)
    worth = gain >= WORTH and plan.seconds <= SECONDS_PER_POINT * 100 * gain
    return replace(plan, gain=gain, effort=plan.effort if worth else "instant")


def about_training(kept: float, expected: tuple[float, float] | None) -> list[str]:
    """What users should know about a training. kept: the share of it that was kept. expected: accuracy on held-out
    images without and with it."""
    if kept == 1 or expected is None:
        return []
    if kept:
        return [f"{kept:.0%} of the training was kept: the memory of other classes does not bear more"]
    without, trained = expected
    return [
        f"nothing was trained: of the held-out images {trained:.0%} were recognized with the training and "
        f"{without:.0%} without it; learned as at effort instant"
    ]


def _suffering(before: Measurements | None, now: Measurements | None) -> tuple[Suffering, ...]:
    """Worst first."""
    if before is None or now is None:
        return ()
    shares = ((name, before.share(name), now.share(name)) for name in before.per_class)
    worse = [Suffering(n, b, a) for n, b, a in shares if b is not None and a is not None and b - a > SUFFERS]
    return tuple(sorted(worse, key=lambda one: one.now - one.before))


def lost_answers(before: Knowledge, now: Knowledge, changes: Changes | None) -> tuple[LostAnswers, ...]:
    """Answers that a change takes away from "unknown", and from classes, if its changes are known; worst first."""
    lost = _from_unknown(before, now)
    if changes is not None:
        found = [(*pair, n, changes.per_class[pair[0]]) for pair, n in changes.lost().most_common()]
        lost += [LostAnswers(name, source, n, of) for source, name, n, of in found if n > max(1, SUFFERS * of)]
    return tuple(lost)


def _unlike(before: Knowledge, now: Knowledge, learned: Mapping[str, int]) -> list[LostAnswers]:
    """Classes whose new images mostly looked like something else, while the model knew their other images well."""
    found, measured = list[LostAnswers](), before.measurements
    for name in [name for name in learned if name in before.classes and before.trained is now.trained]:
        record, (right, tested) = now.classes[name], (0, 0) if measured is None else measured.per_class[name]
        new = record.features[~np.isin(record.ids[: len(record.kept)], before.classes[name].ids)]
        looked = Counter(answer.name for answer in answers_to(before, new, 1, True, 0.0))
        own, of, recognized = looked.pop(name, 0), len(new), wilson(right / max(tested, 1), tested)
        if of >= MANY and of - own > UNLIKE * of and wilson(own / of, of)[1] < recognized[0]:
            told = ", ".join(f"{other} {images}" for other, images in looked.most_common(3))
            found.append(LostAnswers(name, looked.most_common(1)[0][0], of - own, of, told))
    return found


def _from_unknown(before: Knowledge, now: Knowledge) -> list[LostAnswers]:
    """Classes that many ordinary images are taken for which the model did not know before."""
    solved = [s for known in (before, now) if (s := known.solution) is not None and s.rivals is not None]
    if now is before or now.world is None or len(solved) < 2:
        return []
    (_, familiar), (shares, still) = (solution.judge(now.world.examples, examples=True) for solution in solved)
    taken = np.bincount(shares.argmax(1)[(familiar < 0) & (still >= 0)], minlength=len(now.classes))
    names, most = list(now.classes), TAKES * len(now.world)
    return [LostAnswers(names[c], None, int(taken[c]), len(now.world)) for c in np.argsort(-taken) if taken[c] > most]


def _expectations(counts: dict[str, int]) -> list[str]:
    """What to expect of a single class, and of classes with few images."""
    if len(counts) == 1:
        return [f"the model knows only {next(iter(counts))!r} and cannot tell it from others; teach a second class"]
    few = [name for name, count in counts.items() if count < FEW]
    told = f"{counted(len(few), 'class')} with fewer than {FEW} images ({shorten(few, 3)}; the smallest has "
    return [f"{told}{min(counts.values())}): expect more mistakes there"] if few else []

"""What a teaching is about to do, what it did, and words about it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.words import counted
from vqprompt.product.model.efforts import REMOVED, SECONDS_PER_POINT, WORTH, why_not_train
from vqprompt.product.model.knowledge import Event, Knowledge, Measurements
from vqprompt.product.model.pictures import UNKNOWN

if TYPE_CHECKING:
    from vqprompt.product.model.ingest import NewPictures
    from vqprompt.product.model.left_out import Changes
    from vqprompt.product.model.records import ClassRecord

FEW = 5  # a class with fewer images gets a warning
SUFFERS = 0.05  # a class whose accuracy falls by more than this is named


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
class Taught:
    """What a teaching did. effort: what was really done; with too few images nothing is trained.

    known_images, copies: images that were left out because the model knew them, or because they were repeated. broken:
    a message for each image that cannot be read. accuracy: share of right answers for images that were left out one at
    a time, every class weighted equally; None if it was not measured. changes: of answers, if it was only a preview.
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
            "classes": [vars(taught) for taught in self.classes],
            "known_images": self.known_images,
            "copies": self.copies,
            "broken": list(self.broken),
            "accuracy": self.accuracy,
            "accuracy_before": self.accuracy_before,
            "suffering": [vars(one) for one in self.suffering],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "effort": self.effort,
            "changes": None if self.changes is None else self.changes.to_json(),
        }


def check_unknown(labels: object, effort: str) -> None:
    """Refuse what does not go with teaching images as unknown."""
    if labels is not None:
        raise UserError("images that are none of the classes have no class; leave out --as, or leave out --as-unknown")
    if effort != "instant":
        raise UserError(f"effort {effort} trains with classes only; teach what is unknown at effort instant")


def summary(
    before: Knowledge,
    now: Knowledge,
    new: NewPictures,
    notes: list[str],
    started: float,
    effort: str = "instant",
    changes: Changes | None = None,
) -> Taught:
    """What a teaching did, from the model before and after it."""
    counts = [{name: record.count for name, record in known.records.items()} for known in (before, now)]
    grown = ((name, count - counts[0].get(name, 0)) for name, count in counts[1].items())
    return Taught(
        classes=tuple(TaughtClass(name, images, name not in counts[0]) for name, images in grown if images),
        known_images=new.known,
        copies=new.copies,
        broken=tuple(new.broken),
        accuracy=None if now.measurements is None else now.measurements.accuracy,
        accuracy_before=None if before.measurements is None else before.measurements.accuracy,
        suffering=_suffering(before.measurements, now.measurements),
        notes=tuple(notes if now is before else [*notes, *_expectations(now.counts)]),
        seconds=time.monotonic() - started,
        effort=effort,
        changes=changes,
    )


def decided(plan: Plan, before: Knowledge, changed: Mapping[str, ClassRecord], labels: Sequence[str]) -> Plan:
    """At effort auto: what training is expected to bring, and whether it is worth its time. plan: of the training.
    changed: what the images would make known without it; the accuracy that is measured then tells how much is wrong."""
    now = before.changed(Event.now("learned"), records={**before.records, **changed}, measured=True)
    gain = 0.0
    if now.measurements is not None and why_not_train(labels) is None:
        gain = REMOVED * (1 - now.measurements.accuracy) * len(set(labels)) / len(now.classes)
    worth = gain >= WORTH and plan.seconds <= SECONDS_PER_POINT * 100 * gain
    return replace(plan, gain=gain, effort=plan.effort if worth else "instant")


def nothing_new(before: Knowledge, new: NewPictures, notes: list[str], started: float) -> Taught:
    if new.broken and not new.known:
        raise nothing_readable(new.broken)
    return summary(before, before, new, [*notes, "nothing new: the model knows all of these images"], started)


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


def nothing_readable(broken: list[str]) -> ImageError:
    """broken: one message per image."""
    first = f" ({broken[0]})" if broken else ""
    return ImageError(f"none of the images can be read, so nothing was learned{first}")


def _suffering(before: Measurements | None, now: Measurements | None) -> tuple[Suffering, ...]:
    """Worst first."""
    if before is None or now is None:
        return ()
    shares = ((name, before.share(name), now.share(name)) for name in before.per_class)
    worse = [Suffering(n, b, a) for n, b, a in shares if b is not None and a is not None and b - a > SUFFERS]
    return tuple(sorted(worse, key=lambda one: one.now - one.before))


def _expectations(counts: dict[str, int]) -> list[str]:
    """What to expect of a single class, and of classes with few images."""
    few = [name for name, count in counts.items() if count < FEW]
    alone = [f"the model knows only {name!r} and cannot tell it from others; teach a second class" for name in counts]
    if len(alone) == 1:
        return alone
    if not few:
        return []
    least = min(counts[name] for name in few)
    named = ", ".join(few[:3]) + (" …" if len(few) > 3 else "")
    have, them = ("has", "it") if len(few) == 1 else ("have", "them")
    smallest = "" if len(few) == 1 else f"; the smallest has {least}"
    return [
        f"{counted(len(few), 'class')} {have} fewer than {FEW} images ({named}{smallest}). Expect more mistakes with "
        f"{them}. To compare: with drawings of 50 things, 1, 5 and 20 images of each gave 22, 51 and 70 % right answers"
    ]

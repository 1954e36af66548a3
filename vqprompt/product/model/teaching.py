"""What a teaching is about to do, what it did, and words about it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt.core.errors import ImageError
from vqprompt.core.words import counted
from vqprompt.product.model.pictures import Picture

if TYPE_CHECKING:
    from vqprompt.product.model.file import Content
    from vqprompt.product.model.reading import NewPictures
    from vqprompt.product.model.records import ClassRecord
    from vqprompt.product.model.streaming import NamedPictures

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


@dataclass(frozen=True)
class Taught:
    """What a teaching did. effort: what was really done; with too few images nothing is trained.

    accuracy: share of right answers for images that were left out one at a time, every class weighted equally; None if
    it was not measured. suffering: classes that are recognized less often than before: name, share before, share now.
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
    effort: str = "instant"


def summary(
    before: Content, now: Content, records: dict[str, ClassRecord], new: NewPictures | NamedPictures, measured: bool,
    notes: list[str], started: float, effort: str = "instant",
) -> Taught:  # fmt: skip
    """What a teaching did, from the model before and after it. records: of the classes that it changed."""
    known = {name: before.classes[name].count for name in records if name in before.classes}
    return Taught(
        images=sum(record.count for record in records.values()) - sum(known.values()),
        new_classes=tuple(sorted(records.keys() - known.keys())),
        grown_classes=tuple(known),
        known_images=new.known,
        copies=new.copies,
        broken=tuple(new.broken),
        accuracy=now.facts.get("accuracy") if measured else None,
        accuracy_before=before.facts.get("accuracy"),
        suffering=_suffering(before.facts, now.facts),
        notes=(*notes, *_expectations({name: record.count for name, record in now.classes.items()})),
        seconds=time.monotonic() - started,
        effort=effort,
    )


def nothing_readable(broken: Sequence[str]) -> ImageError:
    """broken: one message per image."""
    first = f" ({broken[0]})" if broken else ""
    return ImageError(f"none of the images can be read, so nothing was learned{first}")


def nothing_new(new: NewPictures | NamedPictures, accuracy: float | None, notes: list[str], started: float) -> Taught:
    if new.broken and not new.known:
        raise nothing_readable(new.broken)
    return Taught(
        0, (), (), new.known, new.copies, tuple(new.broken), accuracy, accuracy, (),
        (*notes, "nothing new: the model knows all of these images"), time.monotonic() - started,
    )  # fmt: skip


def _expectations(counts: dict[str, int]) -> list[str]:
    """What to expect of classes with few images."""
    few = [name for name, count in counts.items() if count < FEW]
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


def _suffering(before: dict[str, Any], now: dict[str, Any]) -> tuple[tuple[str, float, float], ...]:
    old, new = before.get("per_class", {}), now.get("per_class", {})
    shares = [(n, old[n][0] / old[n][1], new[n][0] / new[n][1]) for n in old if old[n][1] and new.get(n, (0, 0))[1]]
    worse = [s for s in shares if s[1] - s[2] > SUFFERS]
    return tuple(sorted(worse, key=lambda s: s[2] - s[1]))


def without(pictures: list[Picture], exclude: Iterable[str | Path]) -> list[Picture]:
    out = {str(Path(p).expanduser().resolve()) for p in exclude}
    return [p for p in pictures if str(Path(p.where).resolve()) not in out] if out else pictures

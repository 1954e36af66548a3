"""What a teaching goes through: name pictures by their content, refuse what contradicts itself, take features in."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.errors import ImageError, UserError
from vqprompt.model.pictures import Picture, name_of
from vqprompt.model.records import ClassRecord, to_fixed_point
from vqprompt.progress import Progress, Report, Stage

FEW = 5  # images per class below which a word of warning is due
SUFFERS = 0.05  # a class whose accuracy falls by more than this is named


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


@dataclass
class NewPictures:
    """Pictures that are to be learned, by content."""

    pictures: list[Picture] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    known: int = 0
    copies: int = 0
    broken: list[str] = field(default_factory=list)


def scan(pictures: list[Picture], known: dict[str, ClassRecord], skip_broken: bool, progress: Report) -> NewPictures:
    """Name every picture by its content; leave out what is known, refuse what is in two classes."""
    owner = {int(n): name for name, record in known.items() for n in record.names}
    new, seen = NewPictures(), dict[int, Picture]()
    for done, picture in enumerate(pictures, start=1):
        try:
            name = name_of(picture.open())
        except (OSError, ImageError, ValueError) as error:
            new.broken.append(
                str(error) if isinstance(error, UserError) else f"{picture.where}: cannot be read ({error})"
            )
            if not skip_broken:
                raise ImageError(f"{new.broken[0]}; mend it, or go on without such images (--skip-broken)") from None
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


def take_in(
    extractor: Any, new: NewPictures, known: dict[str, ClassRecord], skip_broken: bool, progress: Report
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
        records[label] = record if label not in known else known[label].merged(record)
    return records, broken


def nothing_new(new: NewPictures, accuracy: float | None, notes: list[str], started: float) -> Taught:
    if new.broken and not new.known:
        raise ImageError(f"none of the {len(new.broken)} images can be read, so nothing was learned")
    return Taught(
        0, (), (), new.known, new.copies, tuple(new.broken), accuracy, accuracy, (),
        (*notes, "nothing new: the model knows all of these images"), time.monotonic() - started,
    )  # fmt: skip


def expectations(counts: dict[str, int]) -> list[str]:
    """What to expect of classes with few images."""
    few = [name for name, count in counts.items() if count < FEW]
    if not few:
        return []
    least = min(counts[name] for name in few)
    named = ", ".join(few[:3]) + (" …" if len(few) > 3 else "")
    return [
        f"{len(few)} classes have fewer than {FEW} images ({named}; the least has {least}). Expect more mistakes: "
        "with 1 image per class about a third, with 5 about three quarters of the right answers that 20 images give"
    ]


def suffering(before: dict[str, Any], now: dict[str, Any]) -> tuple[tuple[str, float, float], ...]:
    old, new = before.get("per_class", {}), now.get("per_class", {})
    found = [(n, old[n][0] / old[n][1], new[n][0] / new[n][1]) for n in old if old[n][1] and new.get(n, (0, 0))[1]]
    worse = [f for f in found if f[1] - f[2] > SUFFERS]
    return tuple(sorted(worse, key=lambda f: f[2] - f[1]))


def without(pictures: list[Picture], exclude: Iterable[str | Path]) -> list[Picture]:
    out = {str(Path(p).expanduser().resolve()) for p in exclude}
    return [p for p in pictures if str(Path(p.where).resolve()) not in out] if out else pictures

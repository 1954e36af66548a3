"""What a teaching goes through: name pictures by their content, refuse what contradicts itself, take features in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.errors import ImageError, UserError
from vqprompt.model.many import Chosen, Growing, ShardPictures, shard_pictures
from vqprompt.model.pictures import Picture, clean_name, find_pictures, name_of
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
    """Pictures that are to be learned, by content. names: uint64 [n]."""

    pictures: Sequence[Picture]
    names: np.ndarray
    known: int = 0
    copies: int = 0
    broken: list[str] = field(default_factory=list)


def name_all(
    pictures: Sequence[Picture], skip_broken: bool, progress: Report
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Name every picture by its content: names [n], which can be read [n], and messages about the others."""
    names, readable = np.zeros(len(pictures), np.uint64), np.ones(len(pictures), bool)
    broken: list[str] = []
    for place, picture in enumerate(pictures):
        try:
            names[place] = name_of(picture.open())
        except (OSError, ImageError, ValueError) as error:
            broken.append(str(error) if isinstance(error, UserError) else f"{picture.where}: cannot be read ({error})")
            if not skip_broken:
                raise ImageError(f"{broken[0]}; mend it, or go on without such images (--skip-broken)") from None
            readable[place] = False
        progress(Progress(Stage.STARTING, place + 1, len(pictures), detail="looking through the files"))
    return names, readable, broken


def sift(
    pictures: Sequence[Picture], names: np.ndarray, readable: np.ndarray, broken: list[str],
    known: dict[str, ClassRecord],
) -> NewPictures:  # fmt: skip
    """Leave out what is known and what is there twice; refuse what is in two classes. Of a picture only its name and
    its place are remembered: 16 bytes."""
    places = np.flatnonzero(readable)
    first = refuse_two_classes(pictures, places, names[places])
    taught = refuse_other_class(pictures, places[first], names[places][first], known)
    new = places[first][~taught]
    return NewPictures(Chosen(pictures, new), names[new], int(taught.sum()), len(places) - int(first.sum()), broken)


def refuse_two_classes(pictures: Sequence[Picture], places: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Which pictures are the first ones of their content [n]; refuses one that is there in another class as well."""
    first = np.zeros(len(names), bool)
    first[np.unique(names, return_index=True)[1]] = True
    if first.all():
        return first
    order = np.argsort(names, kind="stable")
    again = np.sort(order[1:][names[order[1:]] == names[order[:-1]]])  # in the order in which they came
    repeated = set(names[again].tolist())
    before = {int(names[i]): int(places[i]) for i in np.flatnonzero(first) if int(names[i]) in repeated}
    for i in again:
        one, other = pictures[before[int(names[i])]], pictures[int(places[i])]
        if one.label != other.label:
            raise ImageError(
                f"the same picture is in two classes: {one.where} ({one.label}) and "
                f"{other.where} ({other.label}); take it out of one of them"
            )
    return first


def refuse_other_class(
    pictures: Sequence[Picture], places: np.ndarray, names: np.ndarray, known: dict[str, ClassRecord]
) -> np.ndarray:
    """Which pictures the model has learned already [n]; refuses one that it has learned as another class."""
    if not known:
        return np.zeros(len(names), bool)
    learned = np.concatenate([record.names for record in known.values()])
    owners = np.repeat(np.arange(len(known)), [record.count for record in known.values()])
    order = np.argsort(learned, kind="stable")
    spot = np.minimum(np.searchsorted(learned[order], names), len(learned) - 1)
    taught = learned[order][spot] == names
    classes = list(known)
    for i in np.flatnonzero(taught):
        picture, owner = pictures[int(places[i])], classes[owners[order[spot[i]]]]
        if owner != picture.label:
            raise ImageError(
                f"{picture.where}: the model has learned this picture as {owner!r}, not "
                f"{picture.label!r}; take it out, or forget that class first"
            )
    return taught


def take_in(
    extractor: Any, new: NewPictures, known: dict[str, ClassRecord], skip_broken: bool, progress: Report
) -> tuple[dict[str, ClassRecord], list[str]]:
    """The records of all classes that change, with the new images in them."""
    growing: dict[str, Growing] = {}
    broken: list[str] = []
    for picture, name, feature in features_of(extractor, new, skip_broken, broken, progress):
        growing.setdefault(picture.label, Growing()).add(name, feature)
    if not growing:
        raise ImageError(f"none of the {len(new.pictures)} images can be read, so nothing was learned")
    return joined(growing, known), broken


def joined(growing: dict[str, Growing], known: dict[str, ClassRecord]) -> dict[str, ClassRecord]:
    """The records of classes that have grown, with what was known of them before."""
    records = {}
    for label in sorted(growing):
        record = growing[label].record()
        records[label] = record if label not in known else known[label].merged(record)
    return records


def features_of(
    extractor: Any, new: NewPictures, skip_broken: bool, broken: list[str], progress: Report
) -> Iterator[tuple[Picture, int, np.ndarray]]:
    """Each new picture with its name and its features in fixed point. What cannot be decoded is refused, or is added
    to `broken`."""
    pictures, waiting = iter(new.pictures), deque[Picture]()

    def passing() -> Iterator[Picture]:
        for picture in pictures:
            waiting.append(picture)  # a lazy sequence makes each one once
            yield picture

    found = extractor.of(passing())
    for done, (name, feature) in enumerate(zip(new.names, found, strict=True), start=1):
        picture = waiting.popleft()
        if isinstance(feature, UserError | OSError):
            message = str(feature)
            if not skip_broken:
                found.close()
                raise ImageError(f"{message} (or go on without such images: --skip-broken)")
            broken.append(message)
        elif isinstance(feature, Exception):
            raise feature
        else:
            yield picture, int(name), to_fixed_point(feature)
        progress(Progress(Stage.LEARNING, done, len(new.pictures)))


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


def to_learn(
    source: Any, labels: Sequence[str] | str | None, exclude: Iterable[str | Path]
) -> tuple[Sequence[Picture], list[str]]:
    """The pictures of any source, with clean class names. Those of shards are made when they are asked for."""
    if labels is None and isinstance(source, str | Path) and (many := shard_pictures(source)) is not None:
        if any(True for _ in exclude):
            raise UserError(f"{source}: images in shards have no paths of their own; leave out --exclude")
        left_out = len(many.shards.labels) - len(many)
        return many, [f"{left_out} images to test with were left out"] if left_out else []
    pictures, notes = find_pictures(source, labels)
    pictures = [replace(p, label=clean_name(p.label)) for p in without(pictures, exclude)]
    if not pictures:
        raise ImageError("no image to learn from is left")
    return pictures, notes


def labels_of(pictures: Sequence[Picture]) -> set[str]:
    if isinstance(pictures, Chosen) and isinstance(pictures.pictures, ShardPictures):
        return pictures.pictures.labels_at(pictures.places)
    return pictures.labels if isinstance(pictures, ShardPictures) else {p.label for p in pictures}


def without(pictures: list[Picture], exclude: Iterable[str | Path]) -> list[Picture]:
    out = {str(Path(p).expanduser().resolve()) for p in exclude}
    return [p for p in pictures if str(Path(p.where).resolve()) not in out] if out else pictures

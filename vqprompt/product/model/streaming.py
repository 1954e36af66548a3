"""Learning from more images than fit: shards, archives and folders of any size, on this machine or on a cluster.

First, images are named by their content, to find copies and known ones. Then each is decoded, its features are added to
the sums of its class, and it is dropped. Memory holds a few bytes per image, and what is remembered of the classes. So
every file is read twice: once to name it, once to learn it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vqprompt.core.data.limits import CACHE_GB
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.words import counted
from vqprompt.product.model.many import Chosen, Growing, ShardPictures, shard_pictures
from vqprompt.product.model.pictures import Picture, clean_name, find_pictures, name_of
from vqprompt.product.model.records import ClassRecord, to_fixed_point
from vqprompt.product.model.teaching import Plan, Taught, nothing_new, nothing_readable, summary, without


class Classroom(Protocol):
    """Where images are named and their features computed: this machine, or a cluster (on_ray.py)."""

    def name_all(
        self, pictures: Sequence[Picture], skip_broken: bool, progress: Report
    ) -> tuple[np.ndarray, np.ndarray, list[str]]: ...

    def take_in(
        self, extractor: Any, new: NamedPictures, known: dict[str, ClassRecord], skip_broken: bool, progress: Report
    ) -> tuple[dict[str, ClassRecord], list[str]]: ...


class ThisMachine:
    def name_all(
        self, pictures: Sequence[Picture], skip_broken: bool, progress: Report
    ) -> tuple[np.ndarray, np.ndarray, list[str]]:
        return name_all(pictures, skip_broken, progress)

    def take_in(
        self, extractor: Any, new: NamedPictures, known: dict[str, ClassRecord], skip_broken: bool, progress: Report
    ) -> tuple[dict[str, ClassRecord], list[str]]:
        return take_in(extractor, new, known, skip_broken, progress)


def too_many(pictures: Sequence[Picture], side: int) -> bool:
    """Whether pictures cannot be decoded all at once: pictures of shards, or more than VQPROMPT_CACHE_GB."""
    return isinstance(pictures, ShardPictures) or 3 * side * side * len(pictures) > CACHE_GB.value * 1e9


def check_possible(effort: str, where: Classroom | None, trained: Any) -> None:
    """Refuse what needs all images at once."""
    if effort != "instant":
        raise UserError(
            f"effort {effort} needs all images at once. It cannot be used with shards, with --on ray, or with more "
            "images than VQPROMPT_CACHE_GB allows; use effort instant"
        )
    if where is not None and trained is not None:
        raise UserError("--on ray needs a model at effort instant; learn on this machine, or make a new model")


def learn_many(
    model: Any, pictures: Sequence[Picture], notes: list[str], where: Classroom, hold_out: float, skip_broken: bool,
    announce: Callable[[Plan], None] | None, progress: Report,
) -> Taught:  # fmt: skip
    """What `Model.learn` does at effort instant, for any number of pictures."""
    started, before = time.monotonic(), model.knowledge
    extractor = model.extractor
    new = sift(pictures, *where.name_all(pictures, skip_broken, progress), before.classes)
    if not len(new.names):
        return nothing_new(new, model.accuracy, notes, started)
    names = sorted(labels_of(new.pictures))
    fresh = tuple(name for name in names if name not in before.classes)
    if announce is not None:
        announce(Plan(len(new.names), len(names), fresh, extractor.seconds_per_image() * len(new.names)))
    records, broken = where.take_in(extractor, new, before.classes, skip_broken, progress)
    event = model._event("learned", records, before, effort="instant")
    model._change(
        {**before.classes, **records}, event, hold_out > 0, before.trained, set(before.facts.get("moved", []))
    )
    new.broken += broken
    return summary(before, model.knowledge, records, new, hold_out > 0, notes, started)


@dataclass
class NamedPictures:
    """Pictures that are to be learned, named by their content. names: uint64 [n]."""

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
                raise ImageError(f"{broken[0]}; repair it, or leave out such images (--skip-broken)") from None
            readable[place] = False
        progress(Progress(Stage.STARTING, place + 1, len(pictures), detail="looking through the files"))
    return names, readable, broken


def sift(
    pictures: Sequence[Picture], names: np.ndarray, readable: np.ndarray, broken: list[str],
    known: dict[str, ClassRecord],
) -> NamedPictures:  # fmt: skip
    """Leave out pictures that are known or repeated; refuse a picture in two classes. Only the name and the position of
    each picture are in memory: 16 bytes."""
    places = np.flatnonzero(readable)
    first = refuse_two_classes(pictures, places, names[places])
    taught = refuse_other_class(pictures, places[first], names[places][first], known)
    new = places[first][~taught]
    return NamedPictures(Chosen(pictures, new), names[new], int(taught.sum()), len(places) - int(first.sum()), broken)


def refuse_two_classes(pictures: Sequence[Picture], places: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Which pictures are the first with their content [n]. Refuses a picture that is in two classes."""
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
                f"{other.where} ({other.label}); remove it from one of them"
            )
    return first


def refuse_other_class(
    pictures: Sequence[Picture], places: np.ndarray, names: np.ndarray, known: dict[str, ClassRecord]
) -> np.ndarray:
    """Which pictures the model has already learned [n]. Refuses one that it has learned as another class."""
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
                f"{picture.label!r}; remove it, or forget that class first"
            )
    return taught


def take_in(
    extractor: Any, new: NamedPictures, known: dict[str, ClassRecord], skip_broken: bool, progress: Report
) -> tuple[dict[str, ClassRecord], list[str]]:
    """The records of all classes that change, with the new images in them."""
    growing: dict[str, Growing] = {}
    broken: list[str] = []
    for picture, name, feature in features_of(extractor, new, skip_broken, broken, progress):
        growing.setdefault(picture.label, Growing()).add(name, feature)
    if not growing:
        raise nothing_readable(broken)
    return joined(growing, known), broken


def joined(growing: dict[str, Growing], known: dict[str, ClassRecord]) -> dict[str, ClassRecord]:
    """The records of classes that have grown, with what was known of them before."""
    records = {}
    for label in sorted(growing):
        record = growing[label].record()
        records[label] = record if label not in known else known[label].merged(record)
    return records


def features_of(
    extractor: Any, new: NamedPictures, skip_broken: bool, broken: list[str], progress: Report
) -> Iterator[tuple[Picture, int, np.ndarray]]:
    """Each new picture with its name and its features in fixed point. What cannot be decoded is refused, or is added
    to `broken`."""
    pictures, waiting = iter(new.pictures), deque[Picture]()

    def passing() -> Iterator[Picture]:
        for picture in pictures:
            waiting.append(picture)  # so that a lazy sequence makes each one only once
            yield picture

    features = extractor.of(passing())
    for done, (name, feature) in enumerate(zip(new.names, features, strict=True), start=1):
        picture = waiting.popleft()
        if isinstance(feature, UserError | OSError):
            message = str(feature)
            if not skip_broken:
                features.close()
                raise ImageError(f"{message} (or leave out such images: --skip-broken)")
            broken.append(message)
        elif isinstance(feature, Exception):
            raise feature
        else:
            yield picture, int(name), to_fixed_point(feature)
        progress(Progress(Stage.LEARNING, done, len(new.pictures)))


def to_learn(
    source: Any, labels: Sequence[str] | str | None, exclude: Iterable[str | Path]
) -> tuple[Sequence[Picture], list[str]]:
    """The pictures of any source, with clean class names. Pictures of shards are made on demand."""
    if labels is None and isinstance(source, str | Path) and (many := shard_pictures(source)) is not None:
        if list(exclude):
            raise UserError(f"{source}: images in shards have no paths of their own; leave out --exclude")
        left_out = len(many.shards.labels) - len(many)
        return many, [f"{counted(left_out, 'test image')} left out"] if left_out else []
    pictures, notes = find_pictures(source, labels)
    pictures = [replace(p, label=clean_name(p.label)) for p in without(pictures, exclude)]
    if not pictures:
        raise ImageError("no image is left to learn from")
    return pictures, notes


def labels_of(pictures: Sequence[Picture]) -> set[str]:
    if isinstance(pictures, Chosen) and isinstance(pictures.pictures, ShardPictures):
        return pictures.pictures.labels_at(pictures.places)
    return pictures.labels if isinstance(pictures, ShardPictures) else {p.label for p in pictures}

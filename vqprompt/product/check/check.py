"""Finds what is doubtful in a folder of images, before it is taught. Nothing is moved, changed or deleted.

What is notable about this implementation:
- Each file is read once: named by its content, decoded for a small grey version and for what it looks like, and shown
  to the frozen backbone. Only 2 kB of pixels and its features are kept, so memory grows by 6 kB per image.
- Neighbours come from random trees; everything else takes one pass over the images. Time grows as n·log n.
- With a model, the images that it remembers of its classes vote too, so that even three new images can be judged.
"""

from __future__ import annotations

import io
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vqprompt.core.data import decode as decoding
from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.statistics.discriminant import Array
from vqprompt.product.check import copies, doubts, pixels
from vqprompt.product.check.findings import CheckResult, Finding, Kind
from vqprompt.product.check.neighbours import nearest
from vqprompt.product.model.model import Model
from vqprompt.product.model.pictures import (
    FROM_TRAINING,
    Picture,
    clean_name,
    content_id,
    find_pictures,
    own_test_pictures,
    spelling,
)

TINY = 32  # px of the shorter side
FEW = 5  # classes with fewer images are named
MOST_FAR, MOST_FOREIGN = 10.0, 20.0  # an image this far away is certainly an outlier


@dataclass(eq=False)
class _Rows:
    """What is kept of the images that could be read."""

    pictures: list[Picture]
    is_test: Array
    names: Array
    grey: Array
    looks: list[pixels.Look]
    features: Array
    sides: Array


def check(
    source: Any,
    labels: Sequence[str] | str | None = None,
    *,
    classes: str = "",
    test: Any = None,
    model: Model | None = None,
    backbone: str | Path = "vit-s14",
    size: int | None = None,
    device: str = "auto",
    progress: Report = ignore,
) -> CheckResult:
    """Check images, given as for `Model.learn`. test: a second source, whose images must not be in the first; by
    default, the test/ of a folder or archive. model: what it remembers votes too, and its backbone is used."""
    started = time.monotonic()
    pictures, notes = find_pictures(source, labels, classes)
    held_out = find_pictures(test)[0] if test is not None else _own_test(source)
    if held_out:  # the note says that test/ is left out, which is not true of a check
        notes = [note for note in notes if not note.startswith(FROM_TRAINING)]
    everything = [replace(p, label=_name(p.label)) for p in (*pictures, *held_out)]
    known = model if model is not None else Model(backbone, size=size, device=device)
    rows, broken = _look(everything, len(pictures), known, progress)
    found = [*broken, *_spelled_twice(everything)]
    alike: list[tuple[str, str, float]] = []
    if len(rows.pictures):
        exact, repeated = _exact(rows, model)
        bad = _bad_pictures(rows)
        found += [*exact, *_tiny(rows), *bad, *_near(rows, repeated)]
        judged, alike = _judge(rows, repeated, model, {f.where for f in bad})
        found += judged
    learned = Counter(p.label for p in everything[: len(pictures)])
    few = sorted(((name, n + _known_images(model, name)) for name, n in learned.items()), key=lambda pair: pair[1])
    return CheckResult(
        len(everything), dict(learned), tuple(sorted(found, key=lambda f: (-f.doubt, f.where))), tuple(alike),
        tuple(pair for pair in few if pair[1] < FEW), tuple(notes), time.monotonic() - started,
        {p.where: p.open for p in everything},
    )  # fmt: skip


def _own_test(source: Any) -> list[Picture]:
    return own_test_pictures(Path(source).expanduser()) if isinstance(source, str | Path) else []


def _name(label: str) -> str:
    try:
        return clean_name(label)
    except UserError:
        return label  # `learn` will refuse this name; the check can use it


def _known_images(model: Model | None, name: str) -> int:
    return 0 if model is None else model.counts.get(name, 0)


# ---------------------------------------------------------------------------------------------- reading


def _look(pictures: list[Picture], training: int, model: Model, progress: Report) -> tuple[_Rows, list[Finding]]:
    """Read every image once: its name, its small grey version and its features."""
    extractor = model.extractor
    broken, seen = [], dict[int, tuple[int, Array, int, pixels.Look]]()

    def remembering(number: int, picture: Picture) -> Picture:
        def read() -> Any:
            content = picture.open()
            image = (
                decoding.decode(content, picture.where) if isinstance(content, bytes) else decoding.open_image(content)
            )
            side = min(_size(content, image))
            seen[number] = (content_id(content), copies.small_grey(image), side, pixels.look_at(image))
            return image

        return replace(picture, open=read)

    wrapped = (remembering(number, picture) for number, picture in enumerate(pictures))
    features, kept = [], []
    for number, feature in enumerate(extractor.of(wrapped)):
        picture = pictures[number]
        if isinstance(feature, UserError | OSError):
            text = str(feature)
            says = text.removeprefix(f"{picture.where}: ")
            broken.append(Finding(picture.where, picture.label, Kind.UNREADABLE, 1.0, says))
        elif isinstance(feature, Exception):
            raise feature
        else:
            kept.append(number)
            features.append(feature.astype(np.float32))
        progress(Progress(Stage.TESTING, number + 1, len(pictures), detail="looking at the images"))
    chosen = [seen[number] for number in kept]
    rows = _Rows(
        [pictures[number] for number in kept], np.array([number >= training for number in kept], bool),
        np.array([c[0] for c in chosen], np.uint64), np.array([c[1] for c in chosen], np.uint8),
        [c[3] for c in chosen], np.array(features, np.float32), np.array([c[2] for c in chosen]),
    )  # fmt: skip
    return rows, broken


def _size(content: Any, image: Image.Image) -> tuple[int, int]:
    if isinstance(content, bytes):
        return Image.open(io.BytesIO(content)).size
    return image.size


# ---------------------------------------------------------------------------------------------- findings


def _spelled_twice(pictures: list[Picture]) -> list[Finding]:
    by_spelling = defaultdict(set)
    for picture in pictures:
        by_spelling[spelling(picture.label)].add(picture.label)
    odd = {name: sorted(names) for names in by_spelling.values() if len(names) > 1 for name in names}
    counts = Counter(p.label for p in pictures)
    found = []
    for label in sorted(odd):
        others = [name for name in odd[label] if name != label]
        if counts[label] <= max(counts[name] for name in others) and label != odd[label][0]:
            first = next(p for p in pictures if p.label == label)
            says = f"the class {label!r} is spelled differently from {others[0]!r}; learn will ask you to rename one"
            found.append(Finding(first.where, label, Kind.LABEL, 0.99, says, likelier=others[0], leave_out=False))
    return found


def _exact(rows: _Rows, model: Model | None) -> tuple[list[Finding], Array]:
    """Exact copies; and which rows [n] repeat another row, so that they need no further check."""
    repeated = np.zeros(len(rows.pictures), bool)
    found = []
    groups = defaultdict(list)
    for row, name in enumerate(rows.names.tolist()):
        groups[name].append(row)
    owner = {} if model is None else {int(n): c for c, r in model.knowledge.classes.items() for n in r.ids}
    for name, same in groups.items():
        first = rows.pictures[same[0]]
        learned_as = owner.get(name)
        if learned_as is not None and learned_as != first.label:
            says = f"the model has already learned this picture as {learned_as!r}"
            found.append(Finding(first.where, first.label, Kind.SAME_TWO_CLASSES, 1.0, says, likelier=learned_as))
        labels = {rows.pictures[r].label for r in same if not rows.is_test[r]}
        for row in same[1:]:
            repeated[row] = True
            found.append(_copy(rows, same[0], row, len(labels) > 1, Kind.SAME))
        if len(labels) > 1:  # it is not known which class is right, so the list leaves out all of them
            others = rows.pictures[same[1]]
            says = f"the same file as {others.where} ({others.label})"
            found.append(Finding(first.where, first.label, Kind.SAME_TWO_CLASSES, 1.0, says, others.where))
    return found, repeated


def _copy(rows: _Rows, one: int, other: int, two_classes: bool, kind: Kind) -> Finding:
    """A finding about `other`, a copy of `one`. If one of them is a test image, the finding is about the other one."""
    across = rows.is_test[one] != rows.is_test[other]
    if across and rows.is_test[other]:
        one, other = other, one
    first, second = rows.pictures[one], rows.pictures[other]
    exact = kind is Kind.SAME
    named = f"{'the same file as' if exact else 'compare with'} {first.where} ({first.label})"
    if across:
        return Finding(second.where, second.label, Kind.SAME_TEST if exact else Kind.NEAR_TEST, 0.98 if exact else 0.9,
                       named + "; a test with it would make the model look better than it is", first.where)  # fmt: skip
    if two_classes and not rows.is_test[one]:
        return Finding(second.where, second.label, Kind.SAME_TWO_CLASSES if exact else Kind.NEAR_TWO_CLASSES,
                       1.0 if exact else 0.95, named, first.where)  # fmt: skip
    return Finding(second.where, second.label, kind, 0.6 if exact else 0.5, named, first.where,
                   leave_out=not rows.is_test[other])  # fmt: skip


def _tiny(rows: _Rows) -> list[Finding]:
    """Images that are much smaller than the others. If most images are tiny, none is doubtful."""
    tiny = (rows.sides < TINY) & (rows.sides < np.median(rows.sides) / 2)
    return [
        Finding(rows.pictures[r].where, rows.pictures[r].label, Kind.TINY, 0.4,
                f"its shorter side has {rows.sides[r]} px, others have {np.median(rows.sides):.0f}", leave_out=False)
        for r in np.flatnonzero(tiny)
    ]  # fmt: skip


def _bad_pictures(rows: _Rows) -> list[Finding]:
    return [
        Finding(rows.pictures[row].where, rows.pictures[row].label, kind, 0.8, says)
        for row, kind, says in pixels.faults(rows.looks)
    ]


def near_pairs(features: Array, grey: Array, least: float = copies.ALIKE) -> list[tuple[int, int, float]]:
    """Pairs of rows that show the same picture (the lower row first), and how similar they are. features: [n, D]. grey:
    their small versions. least: how similar the pictures of a pair must be."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    places, similar = nearest(unit.astype(np.float32), copies.NEIGHBOURS)
    rows, columns = np.nonzero((similar >= copies.NEAR) & (places >= 0))
    pairs = sorted({(min(a, b), max(a, b)) for a, b in zip(rows.tolist(), places[rows, columns].tolist(), strict=True)})
    scored = ((a, b, copies.likeness(grey[a], grey[b])) for a, b in pairs)
    return [pair for pair in scored if pair[2] >= least]


def _near(rows: _Rows, repeated: Array) -> list[Finding]:
    left = np.flatnonzero(~repeated)
    found = []
    for a, b, alike in near_pairs(rows.features[left], rows.grey[left]):
        one, other = int(left[a]), int(left[b])
        two = rows.pictures[one].label != rows.pictures[other].label
        finding = _copy(rows, one, other, two, Kind.NEAR)
        found.append(replace(finding, says=f"{finding.says}: {alike:.0%} alike"))
        if finding.kind is Kind.NEAR_TWO_CLASSES:
            found.append(_copy(rows, other, one, two, Kind.NEAR))
    return found


def _judge(
    rows: _Rows, repeated: Array, model: Model | None, bad: set[str]
) -> tuple[list[Finding], list[tuple[str, str, float]]]:
    """Labels and images that do not fit, and classes that look alike. bad: images whose pixels are known to be bad."""
    left = np.flatnonzero(~repeated)
    features, labels = [rows.features[left]], [rows.pictures[r].label for r in left]
    if model is not None:
        new = set(rows.names[left].tolist())
        for name, record in model.knowledge.classes.items():
            old = np.array([int(n) not in new for n in record.ids[: len(record.kept)]], bool)
            features.append(record.features[old].astype(np.float32))
            labels += [name] * int(old.sum())
    names = sorted(set(labels))
    place = {name: number for number, name in enumerate(names)}
    codes = np.array([place[label] for label in labels])
    if len(names) == 1 and len(codes) < 3:
        return [], []
    every = np.concatenate(features)
    seen = doubts.find_doubts(every, codes, len(names))
    wrong, strange = seen.mislabelled, seen.strange
    odd = pixels.unusual([rows.looks[r] for r in left]) * np.maximum(doubts.strangeness(every, codes)[: len(left)], 0)
    found = []
    for row, picture in enumerate(rows.pictures[r] for r in left):
        likelier = names[seen.likelier[row]]
        if wrong[row]:
            doubt = 0.7 + 0.25 * (1 - seen.probability[row]) * seen.rival[row]
            says = f"most similar images are {likelier!r}, almost none are {picture.label!r}"
            found.append(Finding(picture.where, picture.label, Kind.LABEL, float(doubt), says, likelier=likelier))
        if odd[row] > pixels.FOREIGN and picture.where not in bad:
            doubt, says = (
                0.65 + 0.3 * min(odd[row] / MOST_FOREIGN, 1),
                "its pixels and its features are unlike all others",
            )
            found.append(Finding(picture.where, picture.label, Kind.FOREIGN, float(doubt), says))
        elif strange[row] and picture.where not in bad:
            doubt = 0.65 + 0.3 * min(seen.distance[row] / MOST_FAR, 1)
            says = f"unlike the other images of {picture.label!r}: {seen.distance[row]:.1f} times the usual spread away"
            found.append(Finding(picture.where, picture.label, Kind.UNLIKE, float(doubt), says))
    both = np.minimum(seen.mixed + seen.mixed.T, 1)
    pairs = [(names[a], names[b], float(both[a, b] / 2)) for a, b in np.argwhere(np.triu(both / 2 >= doubts.ALIKE, 1))]
    return found, sorted(pairs, key=lambda pair: -pair[2])

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
from dataclasses import dataclass, field, replace
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
from vqprompt.product.model.extractor import unless_error
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


@dataclass(frozen=True, eq=False)
class _Image:
    """What is kept of an image that could be read. id: of its content. grey: its small version. side: the shorter one,
    in px."""

    picture: Picture
    is_test: bool
    id: int
    grey: Array
    look: pixels.Look
    side: int
    feature: Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def label(self) -> str:
        return self.picture.label

    @property
    def named(self) -> str:
        return f"{self.picture.where} ({self.label})"

    def finding(self, kind: Kind, doubt: float, says: str, **more: Any) -> Finding:
        return Finding(self.picture.where, self.label, kind, doubt, says, **more)


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
    held_out = find_pictures(test, classes=classes or "outer")[0] if test is not None else []
    if test is None and isinstance(source, str | Path):
        held_out = own_test_pictures(Path(source).expanduser(), classes or "outer")
    if held_out:  # the note says that test/ is left out, which is not true of a check
        notes = [note for note in notes if not note.startswith(FROM_TRAINING)]
    everything = [replace(p, label=_name(p.label)) for p in (*pictures, *held_out)]
    known = model if model is not None else Model(backbone, size=size, device=device)
    images, findings = _look(everything, len(pictures), known, progress)
    findings += _spelled_twice(everything)
    alike: list[tuple[str, str, float]] = []
    if images:
        exact, different = _exact(images, model)
        bad = [images[row].finding(kind, 0.8, says) for row, kind, says in pixels.faults([i.look for i in images])]
        judged, alike = _judge(different, model, {f.where for f in bad})
        findings += [*exact, *_tiny(images), *bad, *_near(different), *judged]
    learned, taught = Counter(p.label for p in everything[: len(pictures)]), {} if model is None else model.counts
    few = sorted(((name, n + taught.get(name, 0)) for name, n in learned.items()), key=lambda pair: pair[1])
    return CheckResult(
        len(everything), dict(learned), tuple(sorted(findings, key=lambda f: (-f.doubt, f.where))), tuple(alike),
        tuple(pair for pair in few if pair[1] < FEW), tuple(notes), time.monotonic() - started,
        {p.where: p.open for p in everything},
    )  # fmt: skip


def _name(label: str) -> str:
    try:
        return clean_name(label)
    except UserError:
        return label  # `learn` will refuse this name; the check can use it


def _look(pictures: list[Picture], training: int, model: Model, progress: Report) -> tuple[list[_Image], list[Finding]]:
    """Read every image once. Also returns what cannot be read."""
    seen, images, broken = dict[int, _Image](), [], []

    def remembering(number: int, picture: Picture) -> Picture:
        def read() -> Image.Image:
            content = picture.open()
            image = decoding.decode(content, picture.where)
            size = Image.open(io.BytesIO(content)).size if isinstance(content, bytes) else image.size
            seen[number] = _Image(
                picture, number >= training, content_id(content), copies.small_grey(image), pixels.look_at(image),
                min(size),
            )  # fmt: skip
            return image

        return replace(picture, open=read)

    wrapped = (remembering(number, picture) for number, picture in enumerate(pictures))
    for number, feature in enumerate(model.extractor.of(wrapped)):
        picture = pictures[number]
        if isinstance(feature, UserError | OSError):
            says = str(feature).removeprefix(f"{picture.where}: ")
            broken.append(Finding(picture.where, picture.label, Kind.UNREADABLE, 1.0, says))
        else:
            images.append(replace(seen.pop(number), feature=unless_error(feature).astype(np.float32)))
        progress(Progress(Stage.TESTING, number + 1, len(pictures), detail="looking at the images"))
    return images, broken


# ---------------------------------------------------------------------------------------------- findings


def _spelled_twice(pictures: list[Picture]) -> list[Finding]:
    by_spelling = defaultdict(set)
    for picture in pictures:
        by_spelling[spelling(picture.label)].add(picture.label)
    odd = {name: sorted(names) for names in by_spelling.values() if len(names) > 1 for name in names}
    counts = Counter(p.label for p in pictures)
    findings = []
    for label in sorted(odd):
        others = [name for name in odd[label] if name != label]
        if counts[label] <= max(counts[name] for name in others) and label != odd[label][0]:
            first = next(p for p in pictures if p.label == label)
            says = f"the class {label!r} is spelled differently from {others[0]!r}; learn will ask you to rename one"
            findings.append(Finding(first.where, label, Kind.LABEL, 0.99, says, likelier=others[0], leave_out=False))
    return findings


def _exact(images: list[_Image], model: Model | None) -> tuple[list[Finding], list[_Image]]:
    """Exact copies; and the images without them, because copies need no further check."""
    groups, findings = defaultdict[int, list[_Image]](list), []
    for image in images:
        groups[image.id].append(image)
    owner = {} if model is None else {int(n): c for c, r in model.knowledge.classes.items() for n in r.ids}
    for number, (first, *others) in groups.items():
        learned_as = owner.get(number)
        if learned_as is not None and learned_as != first.label:
            says = f"the model has already learned this picture as {learned_as!r}"
            findings.append(first.finding(Kind.SAME_TWO_CLASSES, 1.0, says, likelier=learned_as))
        labels = {image.label for image in (first, *others) if not image.is_test}
        findings += [_copy(first, other, len(labels) > 1, Kind.SAME) for other in others]
        if len(labels) > 1:  # it is not known which class is right, so the list leaves out all of them
            says, where = f"the same file as {others[0].named}", others[0].picture.where
            findings.append(first.finding(Kind.SAME_TWO_CLASSES, 1.0, says, other=where))
    return findings, [same[0] for same in groups.values()]


def _copy(one: _Image, other: _Image, two_classes: bool, kind: Kind) -> Finding:
    """A finding about `other`, a copy of `one`. If one of them is a test image, the finding is about the other one."""
    across, exact = one.is_test != other.is_test, kind is Kind.SAME
    if across and other.is_test:
        one, other = other, one
    says, where = f"{'the same file as' if exact else 'compare with'} {one.named}", one.picture.where
    if across:
        kind, doubt = (Kind.SAME_TEST, 0.98) if exact else (Kind.NEAR_TEST, 0.9)
        return other.finding(
            kind, doubt, f"{says}; a test with it would make the model look better than it is", other=where
        )
    if two_classes and not one.is_test:
        kind, doubt = (Kind.SAME_TWO_CLASSES, 1.0) if exact else (Kind.NEAR_TWO_CLASSES, 0.95)
        return other.finding(kind, doubt, says, other=where)
    return other.finding(kind, 0.6 if exact else 0.5, says, other=where, leave_out=not other.is_test)


def _tiny(images: list[_Image]) -> list[Finding]:
    """Images that are much smaller than the others. If most images are tiny, none is doubtful."""
    usual = np.median([image.side for image in images])
    return [
        image.finding(Kind.TINY, 0.4, f"its shorter side has {image.side} px, others have {usual:.0f}", leave_out=False)
        for image in images
        if image.side < min(TINY, usual / 2)
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


def _near(images: list[_Image]) -> list[Finding]:
    findings = []
    for a, b, alike in near_pairs(np.stack([i.feature for i in images]), np.stack([i.grey for i in images])):
        one, other = images[a], images[b]
        finding = _copy(one, other, one.label != other.label, Kind.NEAR)
        findings.append(replace(finding, says=f"{finding.says}: {alike:.0%} alike"))
        if finding.kind is Kind.NEAR_TWO_CLASSES:
            findings.append(_copy(other, one, True, Kind.NEAR))
    return findings


def _judge(
    images: list[_Image], model: Model | None, bad: set[str]
) -> tuple[list[Finding], list[tuple[str, str, float]]]:
    """Labels and images that do not fit, and classes that look alike. bad: images whose pixels are known to be bad."""
    features, labels = [np.stack([image.feature for image in images])], [image.label for image in images]
    if model is not None:
        new = {image.id for image in images}
        for name, record in model.knowledge.classes.items():
            old = np.array([int(n) not in new for n in record.ids[: len(record.kept)]], bool)
            features.append(record.features[old].astype(np.float32))
            labels += [name] * int(old.sum())
    names, codes = np.unique(labels, return_inverse=True)
    if len(names) == 1 and len(codes) < 3:
        return [], []
    every = np.concatenate(features)
    seen = doubts.find_doubts(every, codes, len(names))
    odd = pixels.unusual([i.look for i in images]) * np.maximum(doubts.strangeness(every, codes)[: len(images)], 0)
    findings = []
    for row, image in enumerate(images):
        if seen.mislabelled[row]:
            likelier = str(names[seen.likelier[row]])
            doubt = 0.7 + 0.25 * (1 - seen.probability[row]) * seen.rival[row]
            says = f"most similar images are {likelier!r}, almost none are {image.label!r}"
            findings.append(image.finding(Kind.LABEL, float(doubt), says, likelier=likelier))
        if image.picture.where in bad:
            continue
        if odd[row] > pixels.FOREIGN:
            doubt, says = 0.65 + 0.3 * min(odd[row] / MOST_FOREIGN, 1), "pixels and features are unlike all others"
            findings.append(image.finding(Kind.FOREIGN, float(doubt), says))
        elif seen.strange[row]:
            doubt = 0.65 + 0.3 * min(seen.distance[row] / MOST_FAR, 1)
            says = f"unlike the other images of {image.label!r}: {seen.distance[row]:.1f} times the usual spread away"
            findings.append(image.finding(Kind.UNLIKE, float(doubt), says))
    both = np.minimum(seen.mixed + seen.mixed.T, 1) / 2
    pairs = [
        (str(names[a]), str(names[b]), float(both[a, b])) for a, b in np.argwhere(np.triu(both >= doubts.ALIKE, 1))
    ]
    return findings, sorted(pairs, key=lambda pair: -pair[2])

"""From pictures to what is remembered of them: read, name by content, refuse contradictions, add features.

Every picture is read and decoded once, before anything is learned. So all pictures that cannot be used are known first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.words import counted
from vqprompt.product.model.decoded import DecodedPictures
from vqprompt.product.model.features import load, parallel
from vqprompt.product.model.pictures import Picture, name_of
from vqprompt.product.model.records import ClassRecord, to_fixed_point


@dataclass
class NewPictures:
    """Pictures that are to be learned, named by their content and decoded."""

    decoded: DecodedPictures
    pictures: list[Picture] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    known: int = 0
    copies: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        return [picture.label for picture in self.pictures]


def scan(
    pictures: list[Picture],
    known: dict[str, ClassRecord],
    decoded: DecodedPictures,
    skip_broken: bool,
    progress: Report,
) -> NewPictures:
    """Read and decode every picture once, and name it by its content. Known pictures are left out. A picture that is in
    two classes is refused, and so are those that cannot be read (all in one message), unless `skip_broken`."""
    owner = {int(n): name for name, record in known.items() for n in record.names}
    new, seen = NewPictures(decoded), dict[int, Picture]()

    def read(picture: Picture) -> tuple[int, tuple[np.ndarray, float] | None] | Exception:
        try:
            content = picture.open()
            name = name_of(content)
            given = replace(picture, open=lambda: content)
            return name, None if name in owner else load(given, decoded.side)
        except (UserError, OSError, ValueError) as error:
            return error

    for done, (picture, result) in enumerate(zip(pictures, parallel(read, pictures), strict=True), start=1):
        progress(Progress(Stage.STARTING, done, len(pictures), detail="looking through the files"))
        if isinstance(result, Exception):
            names_itself = isinstance(result, UserError)
            new.broken.append(str(result) if names_itself else f"{picture.where}: cannot be read ({result})")
            continue
        name, pixels = result
        if name in seen:
            if seen[name].label != picture.label:
                raise ImageError(
                    f"the same picture is in two classes: {seen[name].where} ({seen[name].label}) and "
                    f"{picture.where} ({picture.label}); remove it from one of them"
                )
            new.copies += 1
        elif pixels is None:
            if owner[name] != picture.label:
                raise ImageError(
                    f"{picture.where}: the model has learned this picture as {owner[name]!r}, not "
                    f"{picture.label!r}; remove it, or forget that class first"
                )
            new.known += 1
        else:
            row = decoded.add(*pixels)
            new.pictures.append(replace(picture, decoded=partial(decoded.row, row)))
            new.names.append(name)
        seen[name] = picture
    if new.broken and not skip_broken:
        if len(new.broken) == 1:
            raise ImageError(f"{new.broken[0]}, or leave it out: --skip-broken")
        listed = "\n  ".join([f"{len(new.broken)} of {counted(len(pictures), 'image')} cannot be used:", *new.broken])
        raise ImageError(f"{listed}\nrepair them, or leave them out: --skip-broken")
    return new


def features_of(extractor: Any, new: NewPictures, progress: Report) -> list[np.ndarray]:
    """Features [D] of each new picture."""
    features = []
    for done, feature in enumerate(extractor.of(new.pictures), start=1):
        if isinstance(feature, Exception):
            raise feature
        progress(Progress(Stage.LEARNING, done, len(new.pictures)))
        features.append(feature)
    return features


def records_with(
    features: list[np.ndarray], new: NewPictures, known: dict[str, ClassRecord], unseen: np.ndarray | None = None
) -> dict[str, ClassRecord]:
    """The records of all classes that change, with the new pictures in them. unseen: which of them no network was
    trained on [n]; all by default."""
    labels, names = np.array(new.labels), np.array(new.names, np.uint64)
    fixed = to_fixed_point(np.stack(features))
    unseen = np.ones(len(names), bool) if unseen is None else unseen
    records = {}
    for label in sorted(set(new.labels)):
        own = labels == label
        record = ClassRecord.of(names[own], fixed[own], unseen[own])
        records[label] = record if label not in known else known[label].merged(record)
    return records


def held_out(new: NewPictures, share: float) -> np.ndarray:
    """Which pictures [n] training does not see: a share of each class, chosen by content."""
    labels, names = np.array(new.labels), np.array(new.names, np.uint64)
    held = np.zeros(len(names), bool)
    for label in set(new.labels):
        own = np.flatnonzero(labels == label)
        place = np.arange(len(own))
        chosen = ((place + 1) * share + 0.5).astype(int) > (place * share + 0.5).astype(int)
        held[own[np.argsort(names[own])][chosen]] = True
    return held

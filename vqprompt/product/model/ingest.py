"""From pictures to records of classes: identify, refuse, compute features, add up.

What is notable about this implementation:
- Every picture is identified by its content before anything is learned. So copies, contradictions and files that cannot
  be read are known first.
- Pictures that fit are read and decoded once, and what was decoded is kept until the end of the teaching: in memory if
  they are few, else in a temporary file. That file has no name on systems that allow this, so it is deleted when the
  process ends, even if it is killed. It is read and written, not mapped: mapped pages would count as memory.
- If there are more (shards, or beyond VQPROMPT_CACHE_GB), they are read twice: to identify them, and to learn them.
  Memory then holds a few bytes per picture, and the records.
- Records are sums of whole numbers. So the result is the same, to the bit, in any order.
"""

from __future__ import annotations

import io
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vqprompt.core.cache import cache_folder, temporary_file
from vqprompt.core.data.limits import CACHE_GB
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.files import writing
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.runtime.cores import parallel
from vqprompt.core.statistics.world import World, save_worlds, world_file
from vqprompt.core.words import counted
from vqprompt.product.model.extractor import Extractor, load, unless_error
from vqprompt.product.model.pictures import Picture, PictureSet, content_id, open_pictures
from vqprompt.product.model.records import ClassRecord, added, ids_of, to_fixed_point

if TYPE_CHECKING:
    from vqprompt.product.model.model import Model

IN_MEMORY = 128 << 20  # bytes of decoded pictures; 650 of them at 224 px
PENDING = 1024  # images of a class that are collected before they are added up


class DecodedPictures:
    """Squashed pixels uint8 [n, 3, side, side], which `Store` reads like an array. Many threads may read them.

    places: rows, by content id. aspects: ratios [n]. on_disk: False keeps all of them in memory.
    """

    def __init__(self, side: int, on_disk: bool = True) -> None:
        self.side, self.on_disk = side, on_disk
        self.places, self.aspects = dict[int, int](), list[float]()
        self._file: BinaryIO = io.BytesIO()
        self._lock = threading.Lock()

    def add(self, content: int, pixels: np.ndarray, aspect: float) -> None:
        with self._lock, writing(cache_folder()):
            self._file.seek(0, io.SEEK_END)
            self._file.write(np.ascontiguousarray(pixels).data)
            if self.on_disk and isinstance(self._file, io.BytesIO) and self._file.tell() > IN_MEMORY:
                memory, self._file = self._file, temporary_file()
                self._file.write(memory.getbuffer())
            self.places[content] = len(self.aspects)
            self.aspects.append(aspect)

    def of(self, content: int) -> tuple[np.ndarray, float]:
        """The pixels of one picture [3, side, side], and its aspect ratio."""
        row = self.places[content]
        return self[row : row + 1][0], self.aspects[row]

    def __len__(self) -> int:
        return len(self.aspects)

    @property
    def nbytes(self) -> int:
        return 3 * self.side**2 * len(self)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = np.arange(len(self))[index]
        pixels = np.empty((len(rows), 3, self.side, self.side), np.uint8)
        for own, row in zip(pixels, rows.tolist(), strict=True):
            with self._lock:
                self._file.seek(row * own.nbytes)
                own.reshape(-1)[:] = np.frombuffer(self._file.read(own.nbytes), np.uint8)
        return pixels

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, eq=False)
class NewPictures:
    """Pictures that are to be learned. ids: uint64 [n]. known, copies: how many were left out because the model knows
    them, or because they are repeated. broken: messages about those that cannot be read. decoded: if they fit."""

    pictures: PictureSet
    ids: np.ndarray
    known: int = 0
    copies: int = 0
    broken: list[str] = field(default_factory=list)
    decoded: DecodedPictures | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> list[str]:
        """The class of each."""
        return [self.pictures.classes[number] for number in self.pictures.labels]

    def __iter__(self) -> Iterator[Picture]:
        for content, picture in zip(self.ids.tolist(), self.pictures, strict=True):
            decoded = None if self.decoded is None else partial(self.decoded.of, content)
            yield replace(picture, content_id=content, decoded=decoded)


def fit(pictures: PictureSet, side: int, effort: str) -> bool:
    """Whether pictures can all be decoded before they are learned. If not, only effort instant is possible."""
    together = not pictures.streamed and 3 * side * side * len(pictures) <= CACHE_GB.value * 1e9
    if not together and effort != "instant":
        raise UserError(
            f"effort {effort} needs all images at once. It cannot be used with shards, or with more images than "
            "VQPROMPT_CACHE_GB allows; use effort instant"
        )
    return together


def select(
    pictures: PictureSet,
    known: Mapping[str, ClassRecord],
    decoded: DecodedPictures | None,
    skip_broken: bool,
    progress: Report,
) -> NewPictures:
    """The pictures that are to be learned. Known and repeated ones are left out. A picture that is in two classes is
    refused, and so are those that cannot be read (all in one message), unless `skip_broken`."""
    learned = ids_of(known.values())
    every, unreadable = identify(pictures, np.sort(learned), decoded, progress)
    places, broken = np.delete(np.arange(len(pictures)), [*unreadable]), [*unreadable.values()]
    ids, first, inverse = np.unique(every[places], return_index=True, return_inverse=True)
    _refuse_two_classes(pictures, places, places[first][inverse])
    _, taught, spots = np.intersect1d(ids, learned, return_indices=True)
    names, ends = [*known], np.cumsum([record.count for record in known.values()])
    owners = [names[owner] for owner in np.searchsorted(ends, spots, side="right")]
    _refuse_other_class(pictures, places[first[taught]], owners)
    if broken and not skip_broken:
        if len(broken) == 1:
            raise ImageError(f"{broken[0]}, or leave it out: --skip-broken")
        listed = "\n  ".join([f"{len(broken)} of {counted(len(pictures), 'image')} cannot be used:", *broken])
        raise ImageError(f"{listed}\nrepair them, or leave them out: --skip-broken")
    if broken and not len(ids):
        raise _nothing_readable(broken)
    new = np.sort(places[np.delete(first, taught)])
    return NewPictures(pictures.subset(new), every[new], len(taught), len(places) - len(ids), broken, decoded)


def _nothing_readable(broken: list[str]) -> ImageError:
    return ImageError(f"none of the images can be read, so nothing was learned ({broken[0]})")


def _refuse_two_classes(pictures: PictureSet, places: np.ndarray, firsts: np.ndarray) -> None:
    """firsts: [n], for each picture the first one with the same content."""
    for i in np.flatnonzero(pictures.labels[places] != pictures.labels[firsts])[:1]:
        one, other = pictures[int(firsts[i])], pictures[int(places[i])]
        raise ImageError(
            f"the same picture is in two classes: {one.where} ({one.label}) and {other.where} ({other.label}); "
            "remove it from one of them"
        )


def _refuse_other_class(pictures: PictureSet, places: np.ndarray, owners: list[str]) -> None:
    """places: of pictures that the model knows. owners: the class of each of them in the model."""
    pairs = zip(places.tolist(), owners, strict=True)
    wrong = sorted((place, owner) for place, owner in pairs if pictures.classes[pictures.labels[place]] != owner)
    for place, owner in wrong[:1]:
        picture, others = pictures[place], f" ({counted(len(wrong), 'picture')} in all)" if len(wrong) > 1 else ""
        raise ImageError(
            f"{picture.where}: the model has learned this picture as {owner!r}, not {picture.label!r}{others}; "
            f"remove it, or move it: vqprompt relabel MODEL {picture.where} --as {picture.label!r}"
        )


def ingest(
    new: NewPictures, extractor: Extractor, known: Mapping[str, ClassRecord], skip_broken: bool, progress: Report
) -> dict[str, ClassRecord]:
    """The records of all classes, with the new pictures in them. What cannot be decoded is refused, or is added to
    `new.broken`."""
    if_none = len(new.broken) + len(new)  # can be decoded, there are so many messages
    records, pending = dict(known), defaultdict[str, list[tuple[np.uint64, np.ndarray]]](list)

    def add_up(name: str) -> None:
        ids, features = zip(*pending.pop(name), strict=True)
        records.update(added(records, {name: ClassRecord.of(np.array(ids), np.stack(features))}))

    for content, label, feature in zip(new.ids, new.labels, features_of(new, extractor, progress), strict=True):
        if isinstance(feature, UserError | OSError):
            if not skip_broken:
                raise ImageError(f"{feature} (or leave out such images: --skip-broken)")
            new.broken.append(str(feature))
            continue
        pending[label].append((content, to_fixed_point(unless_error(feature))))
        if len(pending[label]) >= PENDING:
            add_up(label)
    for name in sorted(pending):
        add_up(name)
    if len(new.broken) == if_none:
        raise _nothing_readable(new.broken)
    return records


def identify(
    pictures: PictureSet, known: np.ndarray, decoded: DecodedPictures | None, progress: Report
) -> tuple[np.ndarray, dict[int, str]]:
    """The content ids of pictures, uint64 [n], and a message about each that cannot be read, by its place. known: ids
    that need not be decoded, sorted. decoded: where to put pictures; None: only identify them."""
    ids, unreadable = np.zeros(len(pictures), np.uint64), dict[int, str]()

    def read(picture: Picture) -> tuple[int, tuple[np.ndarray, float] | None] | Exception:
        try:
            content = picture.open()
            own = content_id(content)
            here = np.searchsorted(known, np.uint64(own))
            if decoded is None or np.uint64(own) in known[here : here + 1]:
                return own, None
            return own, load(replace(picture, open=lambda: content), decoded.side)
        except (UserError, OSError, ValueError) as error:
            return error if isinstance(error, UserError) else ImageError(f"{picture.where}: cannot be read ({error})")

    for place, result in enumerate(parallel(read, pictures)):
        if isinstance(result, Exception):
            unreadable[place] = str(result)
        else:
            ids[place], pixels = result
            if decoded is not None and pixels is not None and result[0] not in decoded.places:
                decoded.add(result[0], *pixels)
        progress(Progress(Stage.STARTING, place + 1, len(pictures), detail="looking through the files"))
    return ids, unreadable


def features_of(new: NewPictures, extractor: Extractor, progress: Report) -> Iterator[np.ndarray | Exception]:
    """The features [D] of each new picture, or the reason why there are none."""
    for done, feature in enumerate(extractor.of(new), start=1):
        yield feature
        progress(Progress(Stage.LEARNING, done, len(new)))


def learn_world(model: Model, folder: str | Path) -> tuple[World, Path]:
    """What ordinary images look like under a model's backbone, for new models with it; and where that is kept. folder:
    one folder per kind of images; a kind with many images is taken for a mixed collection. Images that cannot be read
    are left out."""
    pictures, _ = open_pictures(folder)
    features = {i: row for i, row in enumerate(model.extractor.of(pictures)) if isinstance(row, np.ndarray)}
    if not features:
        raise UserError(f"{folder}: none of the images can be read")
    world = World.of(np.stack([*features.values()]).astype(np.float64), pictures.labels[[*features]])
    fingerprint, size = model.backbone.fingerprint, model.backbone.size
    save_worlds(world_file(fingerprint), fingerprint, {size: world})
    return world, world_file(fingerprint)

"""Pictures to learn, of any source and any number: folders, archives, tables, lists, tar shards, parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vqprompt.core.data.shards import Shards
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.statistics.world import World, save_worlds, world_file
from vqprompt.core.words import counted
from vqprompt.product.model.pictures import Picture, clean_name, find_pictures

if TYPE_CHECKING:
    from vqprompt.product.model.model import Model


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Pictures with their classes. Those of shards are made on demand, so a set takes a few bytes per picture.

    classes: clean names. labels: [n], positions in `classes`. make: the picture with a number. numbers: [n], of the
    pictures in this set. streamed: whether there may be too many to decode them all before learning.
    """

    classes: Sequence[str]
    labels: np.ndarray
    make: Callable[[int], Picture]
    numbers: np.ndarray
    streamed: bool = False

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Picture:
        return replace(self.make(int(self.numbers[place])), label=self.classes[self.labels[place]])

    def __iter__(self) -> Iterator[Picture]:
        return (self[place] for place in range(len(self)))

    @property
    def names(self) -> list[str]:
        """Of the classes that have a picture here, sorted."""
        return sorted(self.classes[number] for number in np.unique(self.labels))

    def subset(self, places: np.ndarray) -> PictureSet:
        return replace(self, labels=self.labels[places], numbers=self.numbers[places])


def open_pictures(
    source: Any,
    labels: Sequence[str] | str | None = None,
    exclude: Iterable[str | Path] = (),
    classes: str = "",
) -> tuple[PictureSet, list[str]]:
    """The pictures of any source (see `find_pictures`), and notes about how it was read. exclude: paths."""
    excluded = {str(Path(path).expanduser().resolve()) for path in exclude}
    if labels is None and isinstance(source, str | Path):
        from vqprompt.core.data.parquet import open_shards

        if (shards := open_shards(source)) is not None:
            if excluded:
                raise UserError(f"{source}: images in shards have no paths of their own; leave out --exclude")
            return _of_shards(shards)
    pictures, notes = find_pictures(source, labels, classes)
    if excluded:
        pictures = [p for p in pictures if str(Path(p.where).resolve()) not in excluded]
    if not pictures:
        raise ImageError("no image is left to learn from")
    names = {label: clean_name(label) for label in {picture.label for picture in pictures}}
    sorted_names = sorted(set(names.values()))
    place = {name: number for number, name in enumerate(sorted_names)}
    numbers = np.array([place[names[picture.label]] for picture in pictures])
    return PictureSet(sorted_names, numbers, pictures.__getitem__, np.arange(len(pictures))), notes


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


def _of_shards(shards: Shards) -> tuple[PictureSet, list[str]]:
    """Without the images that are for testing."""
    rows = np.arange(len(shards.labels)) if shards.splits is None else np.flatnonzero(~shards.splits)
    left_out = len(shards.labels) - len(rows)

    def picture(row: int) -> Picture:
        return Picture(shards.where(row), "", lambda: shards.read(row))

    notes = [f"{counted(left_out, 'test image')} left out"] if left_out else []
    classes = [clean_name(name) for name in shards.classes]
    return PictureSet(classes, shards.labels[rows], picture, rows, streamed=True), notes

"""Data sets by name or by path. Names: those of this package, and those of packages with an entry point."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.data.decode import STORED_MARGIN, stored_side
from vqprompt.core.data.drawings import STYLES, embedded_drawings
from vqprompt.core.data.shards import find_shards, open_shards
from vqprompt.core.data.store import Store, StreamedStore
from vqprompt.core.data.stream import Dataset, check_classes, check_names
from vqprompt.core.errors import UserError
from vqprompt.core.files import exists
from vqprompt.core.plugins import Registry
from vqprompt.core.progress import Report, ignore
from vqprompt.research.datasets.common import hold_out, list_images, make_dataset, no_split_note
from vqprompt.research.datasets.published import PUBLISHED, open_cifar100, open_published

Opener = Callable[[str | None, int, int, Report], Dataset]
"""Parameters: the path that the user gave or None, the side of the stored squares in px, the seed for a split, and
progress."""
DRAWINGS_TO_LEARN = 80  # of each class; the others are to test with


@dataclass(frozen=True)
class DatasetEntry:
    """defaults: run settings that suit it. options: settings that suit it, for the methods that have them."""

    summary: str
    open: Opener
    defaults: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def open_quickdraw(
    source: str | None, side: int, seed: int, progress: Report = ignore, styles: Sequence[str] = ()
) -> Dataset:
    """Quick, Draw!: 50 classes × 100 drawings of 28×28, inside the package (see assets/README.md). styles: several of
    STYLES, which are its domains then."""
    if source is not None:
        raise UserError(f"quickdraw50={source}: quickdraw50 is part of the package; give --data quickdraw50")
    drawings, classes = embedded_drawings()
    (total, count), pixels = drawings.shape[:2], drawings.reshape(-1, 1, *drawings.shape[2:])
    domains = np.repeat(styles, len(pixels)) if styles else None
    if styles:
        shape = len(pixels), 3, *pixels.shape[2:]
        pixels = np.concatenate([np.broadcast_to(STYLES[s](pixels), shape).astype(np.uint8) for s in styles])
    labels = np.arange(len(pixels)) // count % total
    is_test = np.arange(len(pixels)) % count >= DRAWINGS_TO_LEARN
    store = Store(pixels, np.ones(len(pixels)), hashlib.sha256(pixels.tobytes()).hexdigest()[:24])
    names = [f"{classes[label]}/{row % count}" for row, label in enumerate(labels)]
    return Dataset("quickdraw50", classes, store, labels, is_test, domains=domains, where=names.__getitem__)


OPENERS: dict[str, Opener] = {"quickdraw50": open_quickdraw, "cifar100": open_cifar100}
OWN = {
    name: DatasetEntry(known.summary, OPENERS.get(name, partial(open_published, name)), known.defaults, known.options)
    for name, known in PUBLISHED.items()
}
DATASETS = Registry("vqprompt.datasets", DatasetEntry, OWN)


def parse_data(data: str) -> tuple[str | None, str | None]:
    """The name of a data set and its path: from `NAME`, `NAME=PATH`, or the path of a folder or archive of images."""
    name, equals, path = data.partition("=")
    if name in DATASETS:
        return name, path if equals else None
    return None, data


def open_dataset(
    data: str, size: int, seed: int = 0, progress: Report = ignore, stored: float = STORED_MARGIN, domains: bool = False
) -> Dataset:
    """A data set by name, by NAME=PATH, or any folder or archive of images.

    size: side in px of the images that the ViT takes. stored: they are stored larger by this factor, to leave something
    to crop. seed: decides which images are held out, if the source has no split. domains: with the domain of each
    image: folders are DOMAIN/CLASS, and drawings are in several styles.
    """
    side = stored_side(size, stored)
    name, path = parse_data(data)
    if domains and (name, path) == ("quickdraw50", None):
        return open_quickdraw(None, side, seed, progress, list(STYLES))
    if name is not None:
        return DATASETS[name].open(path, side, seed, progress)
    check_data(data)
    shards = open_shards(data)
    if shards is None:
        return make_dataset(data, list_images(Path(data).expanduser(), domains), side, seed, progress)
    check_names(data, shards.classes)  # images of shards are decoded when they are needed
    labels, is_test, notes = shards.labels.astype(np.int64), shards.splits, tuple[str, ...]()
    if is_test is None:
        is_test = hold_out(shards.path, shards.classes, labels, np.arange(len(labels)), seed)
        notes = (no_split_note(seed),)
    check_classes(data, shards.classes, labels, is_test)
    store = StreamedStore(shards, side, progress, None if shards.scattered else shards.groups)
    return Dataset(data, shards.classes, store, labels, is_test, notes)


def check_data(data: str) -> None:
    """Refuse, before any work is done, what is neither a known name nor an existing path."""
    name, path = parse_data(data)
    if name is None and not exists(data) and not find_shards(data):
        raise UserError(
            f"{data}: neither a data set ({', '.join(DATASETS)}) nor an existing folder or zip; "
            "give the folder that holds one folder per class, or NAME=PATH for a data set you have elsewhere"
        )
    if name is not None and path is not None and not exists(path):
        raise UserError(f"{data}: {path} does not exist; give the archive or folder that holds {name}")

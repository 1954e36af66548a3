"""Data sets by name or by path. Names: those of this package, and those of packages with an entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vqprompt.core.data.decode import STORED_MARGIN, stored_side
from vqprompt.core.data.shards import find_shards
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import UserError
from vqprompt.core.files import exists
from vqprompt.core.progress import Report, ignore
from vqprompt.research.datasets.cifar100 import open_cifar100
from vqprompt.research.datasets.cub200 import open_cub200
from vqprompt.research.datasets.folder import open_folder
from vqprompt.research.datasets.imagenet_a import open_imagenet_a
from vqprompt.research.datasets.imagenet_r import open_imagenet_r
from vqprompt.research.datasets.quickdraw import open_quickdraw
from vqprompt.research.datasets.vtab import open_vtab
from vqprompt.research.plugins import Registry

Opener = Callable[[str | None, int, int, Report], Dataset]
"""Parameters: the path that the user gave or None, the side of the stored squares in px, the seed for a split, and
progress."""


@dataclass(frozen=True)
class DatasetEntry:
    """defaults: run settings that suit it. options: settings that suit it, for the methods that have them."""

    summary: str
    open: Opener
    defaults: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


OWN: dict[str, DatasetEntry] = {
    "quickdraw50": DatasetEntry(
        "50 classes × 100 drawings, 80 to learn and 20 to test, inside the package",
        open_quickdraw,
        {"size": 70, "test_crop": 0.0, "augment": "none", "batch_size": 32},
    ),
    "cifar100": DatasetEntry(
        "100 classes, 60,000 small photographs of 32×32",
        open_cifar100,
        {"tasks": 10, "batch_size": 128, "test_crop": 0.0},
    ),
    "imagenet-r": DatasetEntry(
        "200 classes, 30,000 renditions: art, cartoons, toys … (10 tasks; 5 and 20 are usual too)",
        open_imagenet_r,
        {"tasks": 10, "batch_size": 64},
    ),
    "cub200": DatasetEntry(
        "CUB-200-2011, 200 birds, 11,788 photographs",
        open_cub200,
        {"tasks": 10, "batch_size": 128},
        {"rebalancing.ratio": 2, "rebalancing.lr": 1e-4},  # the rate: tuned on validation images
    ),
    "imagenet-a": DatasetEntry(
        "200 classes, 7,500 photographs that fool ImageNet classifiers",
        open_imagenet_a,
        {"tasks": 20, "batch_size": 64},
    ),
    "vtab": DatasetEntry(
        "5 domains × 10 classes: aerial, textures, pets, satellite, flowers; one domain per task",
        open_vtab,
        {"tasks": 5, "batch_size": 8},
    ),
}
DATASETS = Registry("vqprompt.datasets", DatasetEntry, OWN)


def parse_data(data: str) -> tuple[str | None, str | None]:
    """The name of a data set and its path: from `NAME`, `NAME=PATH`, or the path of a folder or archive of images."""
    name, equals, path = data.partition("=")
    if name in DATASETS:
        return name, path if equals else None
    return None, data


def open_dataset(
    data: str, size: int, seed: int = 0, progress: Report = ignore, stored: float = STORED_MARGIN
) -> Dataset:
    """A data set by name, by NAME=PATH, or any folder or archive of images.

    size: side in px of the images that the ViT takes. stored: they are stored larger by this factor, to leave something
    to crop.
    """
    side = stored_side(size, stored)
    name, path = parse_data(data)
    if name is not None:
        return DATASETS[name].open(path, side, seed, progress)
    check_data(data)
    return open_folder(data, side, seed, progress)


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

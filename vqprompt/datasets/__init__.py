"""Data sets by name, or by path. To add one: write its file, name it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vqprompt.data.stream import Dataset
from vqprompt.datasets.cifar100 import open_cifar100
from vqprompt.datasets.cub200 import open_cub200
from vqprompt.datasets.folder import open_folder
from vqprompt.datasets.imagenet_a import open_imagenet_a
from vqprompt.datasets.imagenet_r import open_imagenet_r
from vqprompt.datasets.quickdraw import open_quickdraw
from vqprompt.datasets.vtab import open_vtab
from vqprompt.errors import UserError
from vqprompt.progress import Report, ignore

Opener = Callable[[str | None, int, int, Report], Dataset]
"""(where the user has it, or None; side of the stored squares in px; seed of a split it may have to make; progress)."""


@dataclass(frozen=True)
class DatasetEntry:
    """defaults: run settings that suit it. options: what suits methods that have all of these options."""

    summary: str
    open: Opener
    defaults: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


DATASETS: dict[str, DatasetEntry] = {
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
        "5 domains × 10 classes: aerial, textures, pets, satellite, flowers; a domain a task",
        open_vtab,
        {"tasks": 5, "batch_size": 8},
    ),
}


def parse_data(data: str) -> tuple[str | None, str | None]:
    """A data set's name and where it is: `NAME`, `NAME=PATH`, or the path of anybody's images."""
    name, equals, path = data.partition("=")
    if name in DATASETS:
        return name, path if equals else None
    return None, data


def open_dataset(
    data: str, size: int, seed: int = 0, progress: Report = ignore, stored: float = 8 / 7
) -> Dataset:
    """A data set by name, by NAME=PATH, or any folder or archive of images. stored: the side of the stored squares, in
    units of `size`."""
    side = round(size * stored)
    name, path = parse_data(data)
    if name is not None:
        return DATASETS[name].open(path, side, seed, progress)
    check_data(data)
    return open_folder(data, side, seed, progress)


def check_data(data: str) -> None:
    """Refuse what is neither a name nor a place, before anything is done for it."""
    name, path = parse_data(data)
    if name is None and not Path(data).expanduser().exists():
        raise UserError(
            f"{data}: neither a data set ({', '.join(DATASETS)}) nor an existing folder or zip; "
            "give the folder that holds one folder per class, or NAME=PATH for a data set you have elsewhere"
        )
    if path is not None and not Path(path).expanduser().exists():
        raise UserError(f"{data}: {path} does not exist; give the archive or folder that holds {name}")

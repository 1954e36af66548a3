"""Data sets by name, or by path. To add one: write its file, name it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vqprompt.datasets.folder import open_folder
from vqprompt.datasets.quickdraw import open_quickdraw
from vqprompt.errors import UserError
from vqprompt.images import Progress, no_progress
from vqprompt.stream import Dataset

Opener = Callable[[str | None, int, int, Progress], Dataset]
"""(where the user has it, or None; side of the stored squares in px; seed of a split it may have to make; progress)."""


@dataclass(frozen=True)
class DatasetEntry:
    summary: str
    open: Opener
    defaults: dict[str, Any] = field(default_factory=dict)  # run settings that suit it


DATASETS: dict[str, DatasetEntry] = {
    "quickdraw50": DatasetEntry(
        "50 classes × 100 drawings, 80 to learn and 20 to test, inside the package",
        open_quickdraw,
        {"size": 70, "test_crop": 0.0, "augment": "none", "batch_size": 32},
    ),
}


def open_dataset(data: str, size: int, seed: int = 0, progress: Progress = no_progress) -> Dataset:
    """A data set by name, or any folder or zip of images, stored with an eighth of a margin around `size` to crop."""
    side = round(size * 8 / 7)
    if data in DATASETS:
        return DATASETS[data].open(None, side, seed, progress)
    if not Path(data).expanduser().exists():
        raise UserError(
            f"{data}: neither a data set ({', '.join(DATASETS)}) nor an existing folder or zip; "
            "give the folder that holds one folder per class"
        )
    return open_folder(data, side, seed, progress)

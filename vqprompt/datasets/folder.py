"""A user's own images: a folder, zip or tar of `train/<class>/…` + `test/<class>/…`, or of `<class>/…`, split 80/20."""

from __future__ import annotations

from pathlib import Path

from vqprompt.data.stream import Dataset
from vqprompt.datasets.common import list_images, make_dataset
from vqprompt.progress import Report, ignore


def open_folder(path: str | Path, side: int, seed: int, progress: Report = ignore) -> Dataset:
    """seed: decides which images of each class are held out, if the source has no split."""
    return make_dataset(str(path), list_images(Path(path).expanduser()), side, seed, progress)

"""Anybody's images: a folder, zip or tar of `train/<class>/…` + `test/<class>/…`, or of `<class>/…`, split 80/20."""

from __future__ import annotations

from pathlib import Path

from vqprompt.datasets.common import finish, list_images
from vqprompt.images import Progress, no_progress
from vqprompt.stream import Dataset


def open_folder(path: str | Path, side: int, seed: int, progress: Progress = no_progress) -> Dataset:
    """seed: which images of each class are held out, where the source has no split of its own."""
    return finish(str(path), list_images(Path(path).expanduser()), side, seed, progress)

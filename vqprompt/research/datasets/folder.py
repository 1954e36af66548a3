"""A user's own images: a folder, zip or tar of `train/<class>/…` + `test/<class>/…`, or of `<class>/…`, split 80/20;
tar shards in WebDataset's layout, or parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vqprompt.core.data.parquet import open_shards
from vqprompt.core.data.shards import Shards
from vqprompt.core.data.stream import Dataset, check_classes, check_names
from vqprompt.core.data.streamed import StreamedStore
from vqprompt.core.progress import Report, ignore
from vqprompt.research.datasets.common import hold_out, list_images, make_dataset, no_split_note


def open_folder(path: str | Path, side: int, seed: int, progress: Report = ignore) -> Dataset:
    """seed: decides which images of each class are held out, if the source has no split."""
    shards = open_shards(path)
    if shards is not None:
        return of_shards(str(path), shards, side, seed, progress)
    return make_dataset(str(path), list_images(Path(path).expanduser()), side, seed, progress)


def of_shards(name: str, shards: Shards, side: int, seed: int, progress: Report) -> Dataset:
    """Images that are decoded when they are needed. A few arrays are all that is in memory."""
    check_names(name, shards.classes)
    labels, is_test, notes = shards.labels.astype(np.int64), shards.splits, tuple[str, ...]()
    if is_test is None:
        is_test = hold_out(shards.path, shards.classes, labels, np.arange(len(labels)), seed)
        notes = (no_split_note(seed),)
    check_classes(name, shards.classes, labels, is_test)
    store = StreamedStore(shards, side, progress, None if shards.scattered else shards.groups)
    return Dataset(name, shards.classes, store, labels, is_test, notes)

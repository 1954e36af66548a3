"""Data sets as the Hugging Face hub keeps them: parquet files with one image and its label per row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.parquet import ParquetFile, RowGroups, parquet_files, split_of
from vqprompt.core.data.source import Entry, key_of
from vqprompt.core.errors import ImageError
from vqprompt.research.datasets.common import Listing, natural


def list_parquet(path: Path, label_columns: Sequence[str], names: Sequence[str] = ()) -> Listing:
    """All rows as images with classes.

    label_columns: the first of these columns that exists holds the labels.
    names: the class names for labels that are numbers; without them, those stated in the files are used.
    """
    files = [ParquetFile(file, label_columns) for file in parquet_files(path)]
    entries, stamps, places = [], {}, {}
    labels: dict[str, Any] = {}  # by class name
    root = path if path.is_dir() else path.parent
    splits = {split_of(file.path, root) for file in files}
    hashes = ContentHashes(root).of([file.path.relative_to(root).as_posix() for file in files])
    for number, file in enumerate(files):
        split = split_of(file.path, root) if splits == {"train", "test"} else None
        inside, classes = file.path.relative_to(root).as_posix(), file.class_names(names)
        labels |= {name: label for label, name in classes.items()}
        for row, (label, image) in enumerate(zip(file.labels, file.names, strict=True)):
            entry = Entry(f"{inside}/{row}/{classes[label]}/{image}", classes[label], split)
            group = bisect_right(file.starts, row) - 1
            entries.append(entry)
            stamps[entry.path], places[entry.path] = hashes[inside], (number, group, row - int(file.starts[group]))
    if not entries:
        raise ImageError(f"{path}: its parquet files have no rows; get them again")
    by_number = all(isinstance(label, int) for label in labels.values())
    order = sorted(labels, key=(lambda name: labels[name]) if by_number else natural)
    images = RowGroups([(file.path, file.image) for file in files])
    return Listing(path, entries, order, lambda entry: images.read(*places[entry.path]), key_of("", stamps))

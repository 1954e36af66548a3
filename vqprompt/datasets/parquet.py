"""Data sets as the Hugging Face hub keeps them: parquet files with one image and its label per row."""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vqprompt.data.archives import hidden
from vqprompt.data.content import ContentHashes
from vqprompt.data.source import Entry
from vqprompt.datasets.common import Listing, natural
from vqprompt.errors import ImageError

IMAGE_COLUMNS = ("img", "image")
KEPT_GROUPS = 3  # rows are read in groups, and several threads read from neighbouring groups


def parquet_files(path: Path) -> list[Path]:
    """The parquet files at a path; none if it holds other files."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted(p for p in path.rglob("*.parquet") if not hidden(p.relative_to(path).as_posix()))


def list_parquet(path: Path, label_columns: Sequence[str], names: Sequence[str] = ()) -> Listing:
    """All rows as images with classes.

    label_columns: the first of these columns that exists holds the labels.
    names: the class names for labels that are numbers; without them, those stated in the files are used.
    """
    files = [_File(file, label_columns) for file in parquet_files(path)]
    entries, classes = [], {}
    root = path if path.is_dir() else path.parent
    splits = {split_of(file.path, root) for file in files}
    hashes = ContentHashes(root).of([file.path.relative_to(root).as_posix() for file in files])
    for file in files:
        split = split_of(file.path, root) if splits == {"train", "test"} else None
        inside = file.path.relative_to(root).as_posix()
        known = names or file.label_names
        for row, (label, image) in enumerate(zip(file.labels, file.names, strict=True)):
            if isinstance(label, int) and known and not 0 <= label < len(known):
                raise ImageError(f"{file.path}: row {row} has the label {label}, but there are {len(known)} classes")
            name = known[label] if isinstance(label, int) and known else str(label)
            classes[name] = label
            entries.append(Entry(f"{inside}/{row}/{name}/{image}", name, split, hashes[inside]))
    if not entries:
        raise ImageError(f"{path}: its parquet files have no rows; get them again")
    by_number = all(isinstance(label, int) for label in classes.values())
    order = sorted(classes, key=(lambda name: classes[name]) if by_number else natural)
    return Listing(path, entries, order, _Reader(files, entries).read, "")


def split_of(path: Path, root: Path) -> str | None:
    """`train-00000-of-00002.parquet`, or `default/train/0000.parquet`."""
    for part in reversed(path.relative_to(root).parts):
        if found := re.match(r"(train|test)(?![a-z])", part):
            return found[1]
    return None


class _File:
    """One parquet file: its labels and image names, and its images group by group."""

    def __init__(self, path: Path, label_columns: Sequence[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ImageError(f"{path}: reading parquet takes pyarrow; pip install 'vqprompt[parquet]'") from None
        self.path = path
        try:
            self.file = pq.ParquetFile(path)
            schema = self.file.schema_arrow
            self.image = self._column(schema.names, IMAGE_COLUMNS)
            label = self._column(schema.names, label_columns)
            has_names = pa.types.is_struct(schema.field(self.image).type)
            table = self.file.read([label, f"{self.image}.path"] if has_names else [label])
        except (pa.ArrowException, OSError) as error:
            raise ImageError(f"{path}: damaged parquet ({error}); get it again") from None
        self.labels: list[Any] = table[label].to_pylist()
        values = table[self.image].to_pylist() if has_names else [None] * len(self.labels)
        self.names = [Path((value or {}).get("path") or "image").name for value in values]
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        self.label_names: list[str] = features.get(label, {}).get("names") or []
        groups = range(self.file.num_row_groups)
        self.starts = [0]
        for group in groups:
            self.starts.append(self.starts[-1] + self.file.metadata.row_group(group).num_rows)

    def _column(self, there: Sequence[str], wanted: Sequence[str]) -> str:
        for name in wanted:
            if name in there:
                return name
        raise ImageError(f"{self.path}: no column {' or '.join(wanted)}; it has {', '.join(there)}")


class _Reader:
    """Reads images by entry. The last few row groups stay in memory."""

    def __init__(self, files: list[_File], entries: list[Entry]) -> None:
        self.files, self.lock = files, threading.Lock()
        self.groups: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()
        places = ((f, row) for f, file in enumerate(files) for row in range(len(file.labels)))
        self.places = {entry.path: place for entry, place in zip(entries, places, strict=True)}

    def read(self, entry: Entry) -> bytes:
        number, row = self.places[entry.path]
        file = self.files[number]
        group = bisect_right(file.starts, row) - 1
        with self.lock:
            if (number, group) not in self.groups:
                try:
                    table = file.file.read_row_group(group, [file.image])
                except Exception as error:  # pyarrow has its own kinds; the caller adds the name of the image
                    raise OSError(str(error)) from None
                self.groups[number, group] = table[file.image].to_pylist()
                if len(self.groups) > KEPT_GROUPS:
                    self.groups.popitem(last=False)
            value = self.groups[number, group][row - file.starts[group]]
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("the row has no image in it, only its path")
        return data

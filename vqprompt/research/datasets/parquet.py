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

import numpy as np

from vqprompt.core.data.archives import hidden
from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.data.shards import Shards, TarShards, find_shards, in_order
from vqprompt.core.data.source import Entry, key_of
from vqprompt.core.errors import ImageError
from vqprompt.research.datasets.common import Listing, natural

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label", "cls")
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
    entries, classes, stamps = [], {}, {}
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
            entries.append(Entry(f"{inside}/{row}/{name}/{image}", name, split))
            stamps[entries[-1].path] = hashes[inside]
    if not entries:
        raise ImageError(f"{path}: its parquet files have no rows; get them again")
    by_number = all(isinstance(label, int) for label in classes.values())
    order = sorted(classes, key=(lambda name: classes[name]) if by_number else natural)
    return Listing(path, entries, order, _Reader(files, entries).read, key_of("", stamps))


def split_of(path: Path, root: Path) -> str | None:
    """`train-00000-of-00002.parquet`, or `default/train/0000.parquet`."""
    for part in reversed(path.relative_to(root).parts):
        if match := re.match(r"(train|test)(?![a-z])", part):
            return match[1]
    return None


class _File:
    """One parquet file: its labels and image names, and its images group by group."""

    def __init__(self, path: Path, label_columns: Sequence[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ImageError(f"{path}: reading parquet needs pyarrow; pip install 'vqprompt[parquet]'") from None
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


class ParquetShards:
    """The same files with an index of a few arrays, for more images than fit (see data/shards.py)."""

    scattered = False  # to read one row, its whole group is read

    def __init__(self, path: Path, label_columns: Sequence[str] = LABEL_COLUMNS) -> None:
        self.path, self.paths = path, parquet_files(path)
        root = path if path.is_dir() else path.parent
        names = [file.relative_to(root).as_posix() for file in self.paths]
        hashes = ContentHashes(root).of(names)
        numbers: dict[str, int] = {}
        labels, groups, tests = [], [], []
        self._images: list[str] = []  # by file, the column of its images
        self._groups: list[tuple[int, int]] = []  # by group, its file and its number there
        for number, file in enumerate(self.paths):
            opened = _File(file, label_columns)
            known = opened.label_names
            for value in dict.fromkeys(opened.labels):
                if isinstance(value, int) and known and not 0 <= value < len(known):
                    raise ImageError(f"{file}: a row has the label {value}, but there are {len(known)} classes")
            texts = {v: known[v] if isinstance(v, int) and known else str(v) for v in dict.fromkeys(opened.labels)}
            labels.append(np.array([numbers.setdefault(texts[v], len(numbers)) for v in opened.labels], np.int32))
            first = len(self._groups)
            self._groups += [(number, group) for group in range(opened.file.num_row_groups)]
            groups.append(np.repeat(np.arange(first, len(self._groups), dtype=np.int32), np.diff(opened.starts)))
            tests.append(np.full(len(opened.labels), split_of(file, root) == "test"))
            self._images.append(opened.image)
        if not labels or not sum(map(len, labels)):
            raise ImageError(f"{path}: no rows in parquet files here; get them again")
        self.classes, self.labels = in_order(list(numbers), np.concatenate(labels))
        self.groups = np.concatenate(groups)
        self._first = np.searchsorted(self.groups, np.arange(len(self._groups)))  # the first row of each group
        both = {split_of(file, root) for file in self.paths} == {"train", "test"}
        self.splits = np.concatenate(tests) if both else None
        self.key = ":".join(hashes[name] for name in names)
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()  # the last few groups, as Arrow columns

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, row: int) -> bytes:
        group = int(self.groups[row])
        with self._lock:
            if group not in self._kept:
                import pyarrow.parquet as pq

                number, inside = self._groups[group]
                try:
                    with pq.ParquetFile(self.paths[number]) as file:
                        column = self._images[number]
                        self._kept[group] = file.read_row_group(inside, [column])[column]
                except Exception as error:  # pyarrow has its own kinds; the caller adds the name of the image
                    raise OSError(str(error)) from None
                if len(self._kept) > KEPT_GROUPS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
            column = self._kept[group]
        value = column[row - int(self._first[group])].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("the row has no image in it, only its path")
        return data

    def where(self, row: int) -> str:
        group = int(self.groups[row])
        number, inside = self._groups[group]
        return f"{self.paths[number]}: row {row - int(self._first[group]) + 1} of group {inside + 1}"


def open_shards(path: str | Path) -> Shards | None:
    """Tar shards or parquet files at a path; None if it holds other files."""
    if paths := find_shards(path):
        return TarShards(paths)
    source = Path(path).expanduser()
    if source.exists() and (source.is_file() or not _has_images(source)) and parquet_files(source):
        return ParquetShards(source)
    return None


def _has_images(folder: Path) -> bool:
    """Whether a folder has an image file in it or in a folder right inside it."""
    return any(file.suffix.lower() in IMAGE_SUFFIXES for file in (*folder.glob("*.*"), *folder.glob("*/*.*")))

"""Parquet files with one image and its label per row, as the Hugging Face hub keeps data sets."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.data.archives import hidden
from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.data.shards import Shards, TarShards, find_shards, in_order
from vqprompt.core.errors import ImageError

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label", "cls")
KEPT_GROUPS = 3  # rows are read in groups, and several threads read from neighbouring groups


def parquet_files(path: Path) -> list[Path]:
    """The parquet files at a path; none if it holds other files."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted(p for p in path.rglob("*.parquet") if not hidden(p.relative_to(path).as_posix()))


def split_of(path: Path, root: Path) -> str | None:
    """`train-00000-of-00002.parquet`, or `default/train/0000.parquet`."""
    for part in reversed(path.relative_to(root).parts):
        if match := re.match(r"(train|test)(?![a-z])", part):
            return match[1]
    return None


class ParquetFile:
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
        self.starts = np.cumsum([0, *(self.file.metadata.row_group(group).num_rows for group in groups)])

    def _column(self, there: Sequence[str], wanted: Sequence[str]) -> str:
        for name in wanted:
            if name in there:
                return name
        raise ImageError(f"{self.path}: no column {' or '.join(wanted)}; it has {', '.join(there)}")

    def class_names(self, names: Sequence[str] = ()) -> dict[Any, str]:
        """Of each label that occurs. names: for labels that are numbers; without them, those stated in the file."""
        known, classes = names or self.label_names, {}
        for row, label in enumerate(self.labels):
            if label in classes:
                continue
            if isinstance(label, int) and known and not 0 <= label < len(known):
                raise ImageError(f"{self.path}: row {row} has the label {label}, but there are {len(known)} classes")
            classes[label] = known[label] if isinstance(label, int) and known else str(label)
        return classes


class RowGroups:
    """Reads images. The last few row groups stay in memory. files: paths, and the column of images in each."""

    def __init__(self, files: Sequence[tuple[Path, str]]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()  # Arrow columns

    def read(self, file: int, group: int, row: int) -> bytes:
        """file, group: their numbers. row: within the group."""
        with self._lock:
            if (file, group) not in self._kept:
                import pyarrow.parquet as pq

                path, column = self._files[file]
                try:
                    with pq.ParquetFile(path) as opened:
                        self._kept[file, group] = opened.read_row_group(group, [column])[column]
                except Exception as error:  # pyarrow has its own kinds; the caller adds the name of the image
                    raise OSError(str(error)) from None
                if len(self._kept) > KEPT_GROUPS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end((file, group))
            images = self._kept[file, group]
        value = images[row].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("the row has no image in it, only its path")
        return data


class ParquetShards:
    """Parquet files with an index of a few arrays, for more images than fit (see shards.py)."""

    scattered = False  # to read one row, its whole group is read

    def __init__(self, path: Path) -> None:
        self.path, self.paths = path, parquet_files(path)
        root = path if path.is_dir() else path.parent
        names = [file.relative_to(root).as_posix() for file in self.paths]
        hashes = ContentHashes(root).of(names)
        numbers: dict[str, int] = {}
        labels, groups, tests, files = [], [], [], []
        self._groups: list[tuple[int, int]] = []  # by group, its file and its number there
        for number, file in enumerate(self.paths):
            opened = ParquetFile(file, LABEL_COLUMNS)
            texts = opened.class_names()
            labels.append(np.array([numbers.setdefault(texts[v], len(numbers)) for v in opened.labels], np.int32))
            first = len(self._groups)
            self._groups += [(number, group) for group in range(opened.file.num_row_groups)]
            groups.append(np.repeat(np.arange(first, len(self._groups), dtype=np.int32), np.diff(opened.starts)))
            tests.append(np.full(len(opened.labels), split_of(file, root) == "test"))
            files.append((file, opened.image))
        if not labels or not sum(map(len, labels)):
            raise ImageError(f"{path}: no rows in parquet files here; get them again")
        self.classes, self.labels = in_order(list(numbers), np.concatenate(labels))
        self.groups = np.concatenate(groups)
        self._first = np.searchsorted(self.groups, np.arange(len(self._groups)))  # the first row of each group
        both = {split_of(file, root) for file in self.paths} == {"train", "test"}
        self.splits = np.concatenate(tests) if both else None
        self.key = ":".join(hashes[name] for name in names)
        self._images = RowGroups(files)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, row: int) -> bytes:
        group = int(self.groups[row])
        return self._images.read(*self._groups[group], row - int(self._first[group]))

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

"""Parquet files with one image and its label per row, as the Hugging Face hub keeps data sets."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.data.archives import hidden
from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.data.shards import Shards, TarShards, find_shards
from vqprompt.core.errors import ImageError

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label", "cls")
KEPT_GROUPS = 3  # rows are read in groups, and several threads read from neighbouring groups


def parquet_files(path: Path) -> list[Path]:
    """The parquet files at a path; none if it holds other files."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted(p for p in path.rglob("*.parquet") if not hidden(p.relative_to(path).as_posix()))


class _File:
    """One parquet file: the columns of its images and labels, and its groups of rows."""

    def __init__(self, path: Path, root: Path, label_columns: Sequence[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ImageError(f"{path}: reading parquet needs pyarrow; pip install 'vqprompt[parquet]'") from None
        self.path, self.name = path, path.relative_to(root).as_posix()
        try:
            with pq.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
                self.image = self._column(schema.names, IMAGE_COLUMNS)
                self.has_names = pa.types.is_struct(schema.field(self.image).type)
                label = self._column(schema.names, label_columns)
                self.labels: list[Any] = file.read([label])[label].to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ImageError(f"{path}: damaged parquet ({error}); get it again") from None
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        self.label_names: list[str] = features.get(label, {}).get("names") or []
        self.group_sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def _column(self, there: Sequence[str], wanted: Sequence[str]) -> str:
        for name in wanted:
            if name in there:
                return name
        raise ImageError(f"{self.path}: no column {' or '.join(wanted)}; it has {', '.join(there)}")

    def image_names(self) -> list[str]:
        """The name of each row's image, where the file has them."""
        import pyarrow.parquet as pq

        if not self.has_names:
            return ["image"] * len(self.labels)
        with pq.ParquetFile(self.path) as file:
            column = file.read([f"{self.image}.path"])[self.image].to_pylist()
        return [Path((value or {}).get("path") or "image").name for value in column]

    @property
    def split(self) -> str | None:
        """`train-00000-of-00002.parquet`, or `default/train/0000.parquet`."""
        matches = (re.match(r"(train|test)(?![a-z])", part) for part in reversed(self.name.split("/")))
        return next((match[1] for match in matches if match), None)


class ParquetShards(Shards):
    """Parquet files with an index of a few arrays, for more images than fit (see data/shards.py).

    label_columns: the first of these columns that exists holds the labels.
    names: the class names for labels that are numbers; without them, those stated in the files are used.
    """

    scattered = False  # to read one row, its whole group is read
    key = ""

    def __init__(self, path: Path, label_columns: Sequence[str] = LABEL_COLUMNS, names: Sequence[str] = ()) -> None:
        self.path, root = path, path if path.is_dir() else path.parent
        self.files = [_File(file, root, label_columns) for file in parquet_files(path)]
        self.values: dict[str, Any] = {}  # by class, its label in the files
        numbers: dict[str, int] = {}
        labels = []
        for file in self.files:
            known = names or file.label_names
            texts = {}
            for value in dict.fromkeys(file.labels):
                if isinstance(value, int) and known and not 0 <= value < len(known):
                    where = f"{file.path}: row {file.labels.index(value)}"
                    raise ImageError(f"{where} has the label {value}, but there are {len(known)} classes")
                texts[value] = known[value] if isinstance(value, int) and known else str(value)
                self.values[texts[value]] = value
            labels += [numbers.setdefault(texts[value], len(numbers)) for value in file.labels]
        if not labels:
            raise ImageError(f"{path}: its parquet files have no rows; get them again")
        self._groups = [(file, group) for file in self.files for group in range(len(file.group_sizes))]
        sizes = [file.group_sizes[group] for file, group in self._groups]
        super().__init__(numbers, np.array(labels, np.int32), sizes, [file.split for file, _ in self._groups])
        hashes = ContentHashes(root).of([file.name for file in self.files])
        self.key = ":".join(hashes[file.name] for file in self.files)
        self._lock = threading.Lock()
        self._column = lru_cache(KEPT_GROUPS)(self._read_group)

    def _read_group(self, group: int) -> Any:
        """The images of a group, as an Arrow column."""
        import pyarrow.parquet as pq

        file, inside = self._groups[group]
        try:
            with pq.ParquetFile(file.path) as opened:
                return opened.read_row_group(inside, [file.image])[file.image]
        except Exception as error:  # pyarrow has its own kinds; the caller adds the name of the image
            raise OSError(str(error)) from None

    def read(self, row: int) -> bytes:
        group = int(self.groups[row])
        with self._lock:
            column = self._column(group)
        value = column[row - int(self.first[group])].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("the row has no image in it, only its path")
        return data

    def where(self, row: int) -> str:
        group = int(self.groups[row])
        file, inside = self._groups[group]
        return f"{file.path}: row {row - int(self.first[group]) + 1} of group {inside + 1}"


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

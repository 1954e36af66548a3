"""Images in shards, for more images than fit: tar files in WebDataset's layout (NAME.jpg beside NAME.cls), or parquet
files with one image and its label per row, as the Hugging Face hub keeps data sets.

- The index is a few arrays: 24 bytes per image, so memory hardly grows with the number of images.
- A plain tar can be read at any place. Compressed ones cannot, and are refused.
- Every shard goes through the checks of archives.py once, when it is indexed.
"""

from __future__ import annotations

import json
import re
import tarfile
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.data.archives import OPENERS, TarFiles, hidden
from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.data.limits import ENTRIES, check_file_size
from vqprompt.core.data.source import Rows
from vqprompt.core.errors import ImageError
from vqprompt.core.files import exists, is_file, open_regular, read_at, read_text

CLASS_SUFFIX = ".cls"
NAMES = "classes.txt"  # beside the shards: the name of class 0, 1, 2 …, one per line
OPEN_FILES = 64
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
LAYOUT = "expected NAME.jpg with NAME.cls beside it (WebDataset's layout)"


class Shards(Rows):
    """Images by row, in the order of their files.

    names: of the classes. labels: [n], positions among these. sizes: of the groups, which are read together. kinds: of
    the groups, "train" or another word; None where it is not known. scattered: whether any image can be read as fast as
    its neighbour; if not, read group by group.
    """

    scattered: bool

    def __init__(
        self, names: Sequence[str], labels: np.ndarray, sizes: Sequence[int], kinds: Sequence[str | None]
    ) -> None:
        # by number if all are numbers, else by name; the order does not depend on which image came first
        by_number = all(map(str.isdecimal, names))
        self.classes = sorted(names, key=(lambda name: (int(name), name)) if by_number else None)
        places = {name: place for place, name in enumerate(self.classes)}
        self.labels = np.array([places[name] for name in names], np.int32)[labels]  # [n], positions in `classes`
        self.groups = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)  # [n]
        self.first = np.cumsum([0, *sizes])  # the first row of each group
        tests = np.array([kind != "train" for kind in kinds])
        known = None not in kinds and len(set(tests)) == 2
        self.splits = tests[self.groups] if known else None  # [n], whether an image is to test with

    def __len__(self) -> int:
        return len(self.labels)


def find_shards(given: str | Path) -> list[Path]:
    """The tar shards at a pattern such as `shard-{000000..000099}.tar`, in a folder of tars, or in one tar with .cls
    files in it; an empty list if it is none of these."""
    path = Path(given).expanduser()
    if braces := BRACES.search(str(path)):
        first, last = braces.groups()
        if int(last) < int(first) or int(last) - int(first) >= ENTRIES.value:
            raise ImageError(
                f"{given}: there are no shards from {first} to {last}; give a range such as {{000000..000099}}"
            )
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        paths = [Path(str(path).replace(braces[0], number, 1)) for number in numbers]
        if missing := [path for path in paths if not is_file(path)]:
            raise ImageError(f"{given}: {len(missing)} of {len(paths)} shards are missing, such as {missing[0]}")
        return paths
    if not exists(path):
        return []
    if path.is_dir():
        inside = [p for p in sorted(path.iterdir()) if not hidden(p.name)]
        tars = [p for p in inside if p.name.lower().endswith(".tar")]
        return tars if tars and not any(p.is_dir() for p in inside) else []
    return [path] if path.name.lower().endswith(".tar") and path.is_file() and _has_labels(path) else []


def _has_labels(path: Path) -> bool:
    """Whether one of the first members of a tar is a .cls file."""
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            return any(member.name.endswith(CLASS_SUFFIX) for member, _ in zip(archive, range(4), strict=False))
    except Exception:  # a damaged tar may raise anything; reading it will say so
        return False


class TarShards(Shards):
    """Tar shards. A shard whose name begins with train or test (or val) says which of the two its images are for."""

    scattered = True

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path = paths[0] if len(paths) == 1 else paths[0].parent
        self.paths = list(paths)
        self._open = lru_cache(OPEN_FILES)(open_regular)  # a file is closed when its last reader is done
        listed = paths[0].parent / NAMES
        known = [line.strip() for line in read_text(listed).splitlines() if line.strip()] if listed.is_file() else []
        numbers = {name: n for n, name in enumerate(known)}
        shards = []
        for path in self.paths:
            if read_at(self._open(path), 0, 2) in OPENERS:
                raise ImageError(
                    f"{path}: a compressed shard cannot be read at any place; decompress it (gunzip, unxz)"
                )
            files = TarFiles(path)
            shards.append(_list_shard(files, path, known, numbers))
            files.close()
        images = np.concatenate(shards)
        if not len(images):
            raise ImageError(f"{self.path}: no image in these shards; {LAYOUT}")
        kinds = [match[1] if (match := re.match(r"(train|test|val)", path.name)) else None for path in self.paths]
        super().__init__(list(numbers), images[:, 0].astype(np.int32), list(map(len, shards)), kinds)
        self._offsets, self._sizes = images[:, 1].copy(), images[:, 2].copy()

    @cached_property
    def key(self) -> str:  # not in the constructor, because hashing all shards takes long and teaching does not need it
        return ":".join(ContentHashes(path).of_open(self._open(path)) for path in self.paths)

    def read(self, row: int) -> bytes:
        size, path = int(self._sizes[row]), self.paths[self.groups[row]]
        check_file_size(self.where(row), size)
        data = read_at(self._open(path), int(self._offsets[row]), size)
        if len(data) != size:
            raise OSError(f"{path} ends too early; it changed while it was being read")
        return data

    def where(self, row: int) -> str:
        number = int(self.groups[row])
        return f"{self.paths[number]}: image {row - int(self.first[number]) + 1}"


def _list_shard(files: TarFiles, path: Path, known: Sequence[str], numbers: dict[str, int]) -> np.ndarray:
    """Label, offset and size of each image [n, 3], in the order of the file. New classes join `numbers`."""
    images, classes = {}, {}
    for name in files.names:
        if hidden(name):
            continue
        stem, dot, suffix = name.rpartition("/")[2].partition(".")  # WebDataset cuts at the first dot of the name
        stem = name[: len(name) - len(suffix) - len(dot)]
        if f".{suffix.lower()}" in IMAGE_SUFFIXES:
            if stem in images:
                raise ImageError(f"{path}: two images are called {stem!r}; {LAYOUT}")
            images[stem] = name
        elif suffix.lower() == CLASS_SUFFIX[1:]:
            classes[stem] = name
    if lone := sorted(images.keys() ^ classes.keys()):
        missing = CLASS_SUFFIX if lone[0] in images else "image"
        raise ImageError(f"{path}: {lone[0]!r} has no {missing} of that name; {LAYOUT}")
    listed = []
    for stem, name in images.items():
        text = files.read(classes[stem]).decode("utf-8", "replace").strip()
        if known and text.removeprefix("-").isdecimal():
            if not 0 <= int(text) < len(known):
                raise ImageError(f"{path}: {stem!r} is of class {text}, but {NAMES} names {len(known)} classes")
            text = known[int(text)]
        if not text:
            raise ImageError(f"{path}: the class of {stem!r} is empty; give a number or a name")
        listed.append((numbers.setdefault(text, len(numbers)), files.offset(name), files.sizes[name]))
    listed.sort(key=lambda entry: entry[1])
    return np.array(listed, np.int64).reshape(-1, 3)


# ---------------------------------------------------------------------------------------------- parquet


IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label", "cls")
KEPT_GROUPS = 3  # rows are read in groups, and several threads read from neighbouring groups


def parquet_files(path: Path) -> list[Path]:
    """The parquet files at a path; none if it holds other files."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted(p for p in path.rglob("*.parquet") if not hidden(p.relative_to(path).as_posix()))


class ParquetShards(Shards):
    """Parquet files.

    label_columns: the first of these columns that exists holds the labels.
    names: the class names for labels that are numbers; without them, those stated in the first file are used.
    """

    scattered = False  # to read one row, its whole group is read
    key = ""

    def __init__(self, path: Path, label_columns: Sequence[str] = LABEL_COLUMNS, names: Sequence[str] = ()) -> None:
        try:
            import pyarrow as pa
            import pyarrow.dataset as arrow
        except ImportError:
            raise ImageError(f"{path}: reading parquet needs pyarrow; pip install 'vqprompt[parquet]'") from None
        self.path, self.root = path, path if path.is_dir() else path.parent
        try:
            opened = arrow.dataset(parquet_files(path), format="parquet")
            self.image, label = (self._column(opened.schema.names, wanted) for wanted in (IMAGE_COLUMNS, label_columns))
            self.files = list(opened.get_fragments())
            values = [value for file in self.files for value in file.to_table(columns=[label])[label].to_pylist()]
            self.parts = [part for file in self.files for part in file.split_by_row_group()]
        except (pa.ArrowException, OSError) as error:  # it names the file
            raise ImageError(f"{path}: damaged parquet ({error}); get it again") from None
        if not values:
            raise ImageError(f"{path}: its parquet files have no rows; get them again")
        stated = json.loads((opened.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        known = names or stated.get("features", {}).get(label, {}).get("names") or []
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        named = {value for value in numbers if isinstance(value, int) and known}
        wrong = {value for value in named if not 0 <= value < len(known)}
        texts = [known[value] if value in named - wrong else str(value) for value in numbers]
        self.values = dict(zip(texts, numbers, strict=True))  # by class, its label in the files
        hashes = ContentHashes(self.root).of(list(map(self.name, self.files)))
        self.key = ":".join(hashes.values())
        super().__init__(
            texts,
            np.array([numbers[value] for value in values], np.int32),
            [part.row_groups[0].num_rows for part in self.parts],
            [_split(self.name(part)) for part in self.parts],
        )
        for row in [row for row, value in enumerate(values) if value is None or value in wrong][:1]:
            said = f"has the label {values[row]}, but there are {len(known)} classes"
            missing = values[row] in (None, -1)  # the hub's data sets write -1
            raise ImageError(f"{self.where(row)} {'has no label' if missing else said}; correct it, or take it out")
        self._lock = threading.Lock()
        self._column_of = lru_cache(KEPT_GROUPS)(self._read_group)

    def _column(self, there: Sequence[str], wanted: Sequence[str]) -> str:
        for name in wanted:
            if name in there:
                return name
        raise ImageError(f"{self.path}: no column {' or '.join(wanted)}; it has {', '.join(there)}")

    def name(self, file: Any) -> str:
        """The path inside the folder."""
        return Path(file.path).relative_to(self.root).as_posix()

    def image_paths(self) -> Iterator[str]:
        """FILE/ROW/CLASS/IMAGE of each row; where the files do not name the image, it is called `image`."""
        import pyarrow.dataset as arrow

        rows = iter(self.labels)
        for file in self.files:
            paths: list[str | None] = [None] * file.count_rows()
            if file.physical_schema.field(self.image).type.num_fields:  # a struct of bytes and path
                paths = file.to_table(columns={"path": arrow.field(self.image, "path")})["path"].to_pylist()
            for row, path in enumerate(paths):
                yield f"{self.name(file)}/{row}/{self.classes[next(rows)]}/{Path(path or 'image').name}"

    def _read_group(self, group: int) -> Any:
        """The images of a group, as an Arrow column."""
        try:
            return self.parts[group].to_table(columns=[self.image])[self.image]
        except Exception as error:  # pyarrow has its own kinds; the caller adds the name of the image
            raise OSError(str(error)) from None

    def read(self, row: int) -> bytes:
        group = int(self.groups[row])
        with self._lock:
            column = self._column_of(group)
        value = column[row - int(self.first[group])].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("the row has no image in it, only its path")
        return data

    def where(self, row: int) -> str:
        group = int(self.groups[row])
        part = self.parts[group]
        return f"{part.path}: row {row - int(self.first[group]) + 1} of group {part.row_groups[0].id + 1}"


def _split(name: str) -> str | None:
    """`train-00000-of-00002.parquet`, or `default/train/0000.parquet`."""
    matches = (re.match(r"(train|test)(?![a-z])", part) for part in reversed(name.split("/")))
    return next((match[1] for match in matches if match), None)


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

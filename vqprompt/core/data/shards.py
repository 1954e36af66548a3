"""Images in shards: many tar files in WebDataset's layout (NAME.jpg beside NAME.cls), for more images than fit.

- The index is a few arrays: 24 bytes per image, so memory hardly grows with the number of images.
- A plain tar can be read at any place. Compressed ones cannot, and are refused.
- Every shard goes through the checks of tars.py once, when it is indexed.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from vqprompt.core.data.archives import hidden
from vqprompt.core.data.content import ContentHashes
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.data.limits import ENTRIES, check_file_size
from vqprompt.core.data.source import Rows
from vqprompt.core.data.tars import OPENERS, TarFiles
from vqprompt.core.errors import ImageError
from vqprompt.core.files import exists, is_file, open_regular, read_at, read_text

CLASS_SUFFIX = ".cls"
NAMES = "classes.txt"  # beside the shards: the name of class 0, 1, 2 …, one per line
OPEN_FILES = 64
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
LAYOUT = "expected NAME.jpg with NAME.cls beside it (WebDataset's layout)"


class Shards(Rows, Protocol):
    """Images by row, in the order of their files.

    labels: [n], positions in `classes`. splits: [n], whether an image is to test with; None where the source does not
    say. groups: [n], images with the same number are read together. scattered: whether any image can be read as fast as
    its neighbour; if not, read group by group.
    """

    classes: list[str]
    labels: np.ndarray
    splits: np.ndarray | None
    groups: np.ndarray
    scattered: bool


def find_shards(given: str | Path) -> list[Path]:
    """The tar shards at a pattern such as `shard-{000000..000099}.tar`, in a folder of tars, or in one tar with .cls
    files in it; an empty list if it is none of these."""
    text = str(Path(given).expanduser())
    if braces := BRACES.search(text):
        first, last = braces.groups()
        if int(last) < int(first) or int(last) - int(first) >= ENTRIES.value:
            raise ImageError(
                f"{given}: there are no shards from {first} to {last}; give a range such as {{000000..000099}}"
            )
        paths = [
            Path(text[: braces.start()] + str(number).zfill(len(first)) + text[braces.end() :])
            for number in range(int(first), int(last) + 1)
        ]
        if missing := [path for path in paths if not is_file(path)]:
            raise ImageError(f"{given}: {len(missing)} of {len(paths)} shards are missing, such as {missing[0]}")
        return paths
    path = Path(text)
    if not exists(path):
        return []
    if path.is_dir():
        inside = [p for p in sorted(path.iterdir()) if not hidden(p.name)]
        tars = [p for p in inside if p.name.lower().endswith(".tar")]
        return tars if tars and not any(p.is_dir() for p in inside) else []
    return [path] if path.name.lower().endswith(".tar") and path.is_file() and _has_labels(path) else []


def _has_labels(path: Path) -> bool:
    """Whether one of the first members of a tar is a .cls file."""
    import tarfile

    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            return any(member.name.endswith(CLASS_SUFFIX) for member, _ in zip(archive, range(4), strict=False))
    except Exception:  # a damaged tar may raise anything; reading it will say so
        return False


class TarShards:
    """Tar shards. A shard whose name begins with train or test (or val) says which of the two its images are for."""

    scattered = True

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path = paths[0] if len(paths) == 1 else paths[0].parent
        self.paths = list(paths)
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()
        self._lock = threading.Lock()
        known = _class_names(paths[0].parent / NAMES)
        numbers = {name: n for n, name in enumerate(known)}
        labels, offsets, sizes, counts = [], [], [], []
        for path in self.paths:
            _refuse_compressed(path)
            files = TarFiles(path)
            images = _list_shard(files, path, known, numbers)
            counts.append(len(images))
            labels.append(images[:, 0].astype(np.int32))
            offsets.append(images[:, 1])
            sizes.append(images[:, 2])
            files.close()
        self.labels = np.concatenate(labels)
        if not len(self.labels):
            raise ImageError(f"{self.path}: no image in these shards; {LAYOUT}")
        self.classes, self.labels = in_order(list(numbers), self.labels)
        self._offsets, self._sizes = np.concatenate(offsets), np.concatenate(sizes)
        self.groups = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
        self.splits = _splits(self.paths, self.groups)
        self._starts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def key(self) -> str:  # not in the constructor, because hashing all shards takes long and teaching does not need it
        return ":".join(ContentHashes(path).of_path() for path in self.paths)

    def read(self, row: int) -> bytes:
        size, number = int(self._sizes[row]), int(self.groups[row])
        check_file_size(self.where(row), size)
        file = self._file(number)
        data = read_at(file, int(self._offsets[row]), size)
        if len(data) != size:
            raise OSError(f"{self.paths[number]} ends too early; it changed while it was being read")
        return data

    def where(self, row: int) -> str:
        number = int(self.groups[row])
        return f"{self.paths[number]}: image {row - int(self._starts[number]) + 1}"

    def _file(self, number: int) -> BinaryIO:
        """A shard; the last few stay open."""
        with self._lock:
            if number not in self._open:
                self._open[number] = open_regular(self.paths[number])
                if len(self._open) > OPEN_FILES:
                    self._open.popitem(last=False)  # closed when its last reader is done
            self._open.move_to_end(number)
            return self._open[number]


def in_order(classes: Sequence[str], labels: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Classes by number if all are numbers, else by name; the order does not depend on which image came first."""
    order = sorted(classes, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, classes)) else None)
    place = {name: n for n, name in enumerate(order)}
    return order, np.array([place[name] for name in classes], np.int32)[labels]


def _refuse_compressed(path: Path) -> None:
    with open_regular(path) as file:
        if file.read(2) in OPENERS:
            raise ImageError(f"{path}: a compressed shard cannot be read at any place; decompress it (gunzip, unxz)")


def _class_names(path: Path) -> list[str]:
    if not path.is_file():
        return []
    names = [line.strip() for line in read_text(path).splitlines()]
    return [name for name in names if name]


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
        if known and text.isdecimal():
            if int(text) >= len(known):
                raise ImageError(f"{path}: {stem!r} is of class {text}, but {NAMES} names {len(known)} classes")
            text = known[int(text)]
        if not text:
            raise ImageError(f"{path}: the class of {stem!r} is empty; give a number or a name")
        listed.append((numbers.setdefault(text, len(numbers)), files.offset(name), files.sizes[name]))
    listed.sort(key=lambda entry: entry[1])
    return np.array(listed, np.int64).reshape(-1, 3)


def _splits(paths: Sequence[Path], groups: np.ndarray) -> np.ndarray | None:
    kinds = [re.match(r"(train|test|val)", path.name) for path in paths]
    if {kind[1] == "train" for kind in kinds if kind} != {True, False} or not all(kinds):
        return None
    tests: np.ndarray = np.array([kind[1] != "train" for kind in kinds if kind])[groups]
    return tests

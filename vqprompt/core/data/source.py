"""Which images a folder or an archive holds, and the class of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from vqprompt.core.data.archives import Files, hidden, open_files
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.errors import ImageError
from vqprompt.core.files import exists


@dataclass(frozen=True)
class Entry:
    """One image file: its path inside the source, its class, and its split if the source has one."""

    path: str
    label: str
    split: str | None


class Rows(Protocol):
    """Image files by row. key: identifies their content and their order. where: what a message calls one."""

    path: Path

    @property
    def key(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, row: int) -> bytes: ...

    def where(self, row: int) -> str: ...


class RowsOfEntries:
    """Rows that are listed as entries. read_path: the content of a file, by its path inside the source."""

    entries: list[Entry]
    read_path: Callable[[str], bytes]

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, row: int) -> bytes:
        return self.read_path(self.entries[row].path)

    def where(self, row: int) -> str:
        return self.entries[row].path


def images_in(folder: Path) -> list[Path]:
    """All image files in a folder and its subfolders, sorted, without hidden ones."""
    images = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and not hidden(file.relative_to(folder).as_posix())
    )
    if not images:
        suffixes = " ".join(sorted(IMAGE_SUFFIXES))
        raise ImageError(f"{folder}: no image in this folder; give image files, or folders of {suffixes}")
    return images


class Source(RowsOfEntries):
    """A folder, zip or tar of `train/<class>/…` + `test/<class>/…`, or of `<class>/…`. keep: see `open_files`. files:
    those at `path`, if they are open."""

    def __init__(self, path: str | Path, keep: bool = True, files: Files | None = None) -> None:
        self.path = Path(path).expanduser()
        if not exists(self.path):
            raise ImageError(f"{path}: no such folder or zip file; give the folder that holds one folder per class")
        self.files = files or open_files(self.path, keep)
        self.read_path = self.files.read
        self.ignored: list[str] = list(self.files.skipped)
        self.entries = self._list()

    @cached_property
    def key(self) -> str:  # not in the constructor, because hashing takes long and teaching does not need it
        return self.files.key_of([entry.path for entry in self.entries])

    def _list(self) -> list[Entry]:
        files = [p for p in self.files.names if not hidden(p)]
        folders = [f for f in self.files.folders if not hidden(f)]
        images = [p for p in files if Path(p).suffix.lower() in IMAGE_SUFFIXES]
        prefix = _common_folder(images, folders)
        splits = {p[len(prefix) :].split("/")[0] for p in files} | {f[len(prefix) :].split("/")[0] for f in folders}
        has_splits = {"train", "test"} <= splits
        if lone := not has_splits and splits & {"train", "test"}:
            (split,) = lone
            inside = [p[len(prefix) :] for p in images if p[len(prefix) :].startswith(f"{split}/")]
            if inside and all(p.count("/") > 1 for p in inside):  # else it is a class, such as railway trains
                raise ImageError(
                    f"{self.path}: has {split}/ but no {'test' if split == 'train' else 'train'}/; add it, "
                    "or give the class folders alone, and 20 % of each class will be held out to test with"
                )
        depth = 2 if has_splits else 1  # folders above an image: split/class or class
        entries = []
        for path in files:
            parts = path[len(prefix) :].split("/")
            if Path(path).suffix.lower() not in IMAGE_SUFFIXES:
                self.ignored.append(path)
            elif len(parts) > depth and (not has_splits or parts[0] in ("train", "test")):
                entries.append(Entry(path, parts[depth - 1], parts[0] if has_splits else None))
            elif not has_splits:
                raise ImageError(
                    f"{self.path}: the image {path!r} is not inside a class folder; "
                    "expected <class>/<image>, or train/<class>/<image> and test/<class>/<image>"
                )
            else:
                self.ignored.append(path)
        if not entries:
            raise ImageError(
                f"{self.path}: no image found; expected <class>/<image>, or train/<class>/<image> and "
                f"test/<class>/<image>, with images ending in {' '.join(sorted(IMAGE_SUFFIXES))}"
            )
        filled = {(e.split, e.label) for e in entries}
        for folder in folders:
            parts = folder[len(prefix) :].split("/")
            if folder.startswith(prefix) and len(parts) == depth and parts[-1]:
                within = parts[0] if has_splits else None
                if within in (None, "train", "test") and (within, parts[-1]) not in filled:
                    raise ImageError(f"{self.path}: the class folder {folder!r} has no image; fill it or take it out")
        return entries


def _common_folder(images: Sequence[str], folders: Sequence[str]) -> str:
    """The outer folder that many archives have (some have two). It is not called train or test, and holds no image
    itself."""
    prefix = ""
    while True:
        inside = [p[len(prefix) :] for p in images]
        tops = {p.split("/")[0] for p in [*inside, *(f[len(prefix) :] for f in folders if len(f) > len(prefix))]}
        if len(tops) != 1 or tops & {"train", "test"} or not inside or min(p.count("/") for p in inside) < 2:
            return prefix
        prefix += tops.pop() + "/"

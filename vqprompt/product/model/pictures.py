"""Which images to learn, and the class of each: from folders, archives, tables (CSV, JSONL), Hugging Face `imagefolder`
metadata, tar shards, parquet, or Python lists.

Nothing is decoded here. Pictures are identified by their content (`content_id`). So a picture that is in two classes,
or was learned before, is noticed before any work is done.
"""

from __future__ import annotations

import csv
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vqprompt.core.data.decode import IMAGE_SUFFIXES, ImageLike, read_image
from vqprompt.core.data.source import Entry, Source, images_in
from vqprompt.core.errors import ImageError, UserError, missing
from vqprompt.core.files import read_text
from vqprompt.core.words import counted, shorten

if TYPE_CHECKING:
    from vqprompt.core.data.shards import Shards

TABLES = (".csv", ".tsv", ".jsonl")
METADATA = ("metadata.csv", "metadata.jsonl")
PATH_COLUMNS = ("file_name", "path", "file", "filename", "image", "image_path")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "name", "species")
UNKNOWN = "unknown"
FROM_TRAINING = "learned only from train/"  # the beginning of that note
LONGEST_NAME = 200

Given = bytes | Image.Image | np.ndarray


@dataclass(frozen=True)
class Picture:
    """One image to learn. where: for messages. open: its bytes, or the image itself. decoded: its squashed pixels and
    aspect ratio, if it was decoded before. content_id: if it was computed before."""

    where: str
    label: str
    open: Callable[[], Given]
    decoded: Callable[[], tuple[np.ndarray, float]] | None = None
    content_id: int | None = None


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Pictures with their classes. Those of shards are made on demand, so a set takes a few bytes per picture.

    classes: clean names. labels: [n], positions in `classes`. make: the picture with a number. numbers: [n], of the
    pictures in this set. streamed: whether there may be too many to decode them all before learning.
    """

    classes: Sequence[str]
    labels: np.ndarray
    make: Callable[[int], Picture]
    numbers: np.ndarray
    streamed: bool = False

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Picture:
        return replace(self.make(int(self.numbers[place])), label=self.classes[self.labels[place]])

    def __iter__(self) -> Iterator[Picture]:
        return (self[place] for place in range(len(self)))

    @property
    def names(self) -> list[str]:
        """Of the classes that have a picture here, sorted."""
        return sorted(self.classes[number] for number in np.unique(self.labels))

    def subset(self, places: np.ndarray) -> PictureSet:
        return replace(self, labels=self.labels[places], numbers=self.numbers[places])


def open_pictures(
    source: Any, labels: Sequence[str] | str | None = None, exclude: Iterable[str | Path] = (), classes: str = ""
) -> tuple[PictureSet, list[str]]:
    """The pictures of any source (see `find_pictures`), and notes about how it was read. exclude: paths."""
    excluded = {str(Path(path).expanduser().resolve()) for path in exclude}
    if labels is None and isinstance(source, str | Path):
        from vqprompt.core.data.shards import open_shards

        if (shards := open_shards(source)) is not None:
            if excluded:
                raise UserError(f"{source}: images in shards have no paths of their own; leave out --exclude")
            return _of_shards(shards)
    pictures, notes = find_pictures(source, labels, classes)
    if excluded:
        pictures = [p for p in pictures if str(Path(p.where).resolve()) not in excluded]
    if not pictures:
        raise ImageError("no image is left to learn from")
    cleaned = {label: clean_name(label) for label in {picture.label for picture in pictures}}
    names, numbers = np.unique([cleaned[picture.label] for picture in pictures], return_inverse=True)
    return PictureSet(names.tolist(), numbers, pictures.__getitem__, np.arange(len(pictures))), notes


def _of_shards(shards: Shards) -> tuple[PictureSet, list[str]]:
    """Without the images that are for testing."""
    rows = np.arange(len(shards.labels)) if shards.splits is None else np.flatnonzero(~shards.splits)
    left_out = len(shards.labels) - len(rows)

    def picture(row: int) -> Picture:
        return Picture(shards.where(row), "", lambda: shards.read(row))

    notes = [f"{counted(left_out, 'test image')} left out"] if left_out else []
    classes = [clean_name(name) for name in shards.classes]
    return PictureSet(classes, shards.labels[rows], picture, rows, streamed=True), notes


def find_pictures(
    source: Any, labels: Sequence[str] | str | None = None, classes: str = "outer"
) -> tuple[list[Picture], list[str]]:
    """Pictures of any source, and notes about how it was read.

    source: a folder, archive or table, or several of them; or a list of images (paths, Pillow images, arrays), with a
    label for each, or one for all. classes: whether they are the "outer" or the "inner" ones of folders in folders; ""
    refuses such folders and asks.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if isinstance(labels, str):
            if not path.exists():
                raise missing(path, "file or folder")
            return [_of_file(file, labels) for file in ([path] if path.is_file() else images_in(path))], []
        if labels is not None:
            raise UserError(f"{source}: labels belong to a list of images; a folder names its classes itself")
        return _from_path(path, classes)
    images: list[Any] = [source] if is_one(source) else [*source]
    if images and all(isinstance(image, Picture) for image in images):
        return images, []
    paths = [Path(i) for i in images if isinstance(i, str | Path)]
    sources = isinstance(labels, str) or (labels is None and not any(p.suffix.lower() in IMAGE_SUFFIXES for p in paths))
    if sources and paths and len(paths) == len(images):
        parts = [find_pictures(path, labels, classes) for path in paths]
        return [p for pictures, _ in parts for p in pictures], [note for _, notes in parts for note in notes]
    if labels is None:
        raise UserError(
            f"which class is on {counted(len(images), 'image')}? Give its name: --as NAME; or give folders, "
            "one per class (in Python: learn(images, labels), one name for each image or one for all)"
        )
    names = [labels] * len(images) if isinstance(labels, str) else [str(label) for label in labels]
    if len(names) != len(images):
        raise UserError(f"{len(images)} images but {len(names)} labels; give one name for each image, or one for all")
    return [_given(image, name, i) for i, (image, name) in enumerate(zip(images, names, strict=True))], []


def is_one(images: Any) -> bool:
    """Whether this is a single image, not several."""
    array = isinstance(images, np.ndarray) and images.ndim < 4
    return array or isinstance(images, str | Path | bytes | Image.Image)


def _given(image: ImageLike, label: str, number: int) -> Picture:
    if isinstance(image, str | Path):
        return _of_file(image, label)
    if not isinstance(image, bytes | Image.Image | np.ndarray):
        raise UserError(
            f"image {number + 1}: give a path, the bytes of an image file, a Pillow image or a uint8 array, not "
            f"{type(image).__name__}"
        )
    return Picture(f"image {number + 1}", label, lambda: image)


def _of_file(path: str | Path, label: str) -> Picture:
    return Picture(str(path), label, partial(read_image, path))


def _from_path(path: Path, classes: str) -> tuple[list[Picture], list[str]]:
    if not path.exists():
        raise missing(path, "folder", "give the folder that holds one folder per class")
    if path.is_file() and path.suffix.lower() in TABLES:
        return _from_table(path, path.parent), []
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        raise ImageError(f"{path}: which class is it? Give --as NAME, or put the image into a folder of that name")
    if path.is_dir():
        for table in (folder / name for folder in (path, path / "train") for name in METADATA):
            if table.is_file():
                return _from_table(table, table.parent), [f"classes from {table.relative_to(path).as_posix()}"]
        names = {p.name for p in path.iterdir() if p.is_dir()}
        if "train" in names and "test" not in names and any(p.is_dir() for p in (path / "train").iterdir()):
            path = path / "train"
        if not any(p.is_dir() and not p.name.startswith(".") for p in path.iterdir()):
            raise ImageError(
                f"{path}: a folder without classes; put the images of each class into a folder of its name "
                "(to learn images of one class as they are: learn … --as NAME)"
            )
    source = Source(path, keep=False)
    notes = []
    entries = [e for e in source.entries if e.split != "test"]
    if len(entries) < len(source.entries):
        notes.append(f"{FROM_TRAINING}; {counted(len(source.entries) - len(entries), 'image')} of test/ left out")
    if source.ignored:
        notes.append(f"left out, not an image in a class folder: {shorten(source.ignored, 3)}")
    return _entries(source, path, _classes_of(path, entries, classes)), notes


def _classes_of(path: Path, entries: list[Entry], classes: str) -> list[Entry]:
    """The images with their classes. classes: see `find_pictures`."""
    inner = [replace(entry, label=PurePosixPath(entry.path).parent.name) for entry in entries]
    if classes == "inner":
        return inner
    if classes or not entries or any(a.label == b.label for a, b in zip(entries, inner, strict=True)):
        return entries
    names = [shorten(sorted({entry.label for entry in part}), 3) for part in (entries, inner)]
    raise ImageError(
        f"{path}: are the classes the outer folders ({names[0]}) or the inner ones ({names[1]})? Give --classes outer "
        "or --classes inner"
    )


def own_test_pictures(path: Path, classes: str) -> list[Picture]:
    """The images of test/ in a folder or an archive that also has train/; otherwise an empty list. classes: see
    `find_pictures`."""
    if path.is_dir():
        parts = [path / part for part in ("train", "test")]
        return find_pictures(parts[1], classes=classes)[0] if all(part.is_dir() for part in parts) else []
    if not path.is_file() or path.suffix.lower() in TABLES:
        return []
    source = Source(path, keep=False)
    return _entries(source, path, _classes_of(path, [e for e in source.entries if e.split == "test"], classes))


def _entries(source: Source, path: Path, entries: Iterable[Entry]) -> list[Picture]:
    folder = path.is_dir()
    return [
        Picture(str(path / e.path) if folder else f"{path}: {e.path}", e.label, partial(source.read_path, e.path))
        for e in entries
    ]


def _from_table(table: Path, folder: Path) -> list[Picture]:
    rows = list(_rows(table))
    if not rows:
        raise ImageError(f"{table}: it has no lines; give one line per image, with its path and its class")
    columns = list(rows[0][1])
    path_column, label_column = (_column(table, columns, wanted) for wanted in (PATH_COLUMNS, LABEL_COLUMNS))
    pictures = []
    for line, row in rows:
        name, label = row.get(path_column), row.get(label_column)
        if not name or label is None or str(label).strip() == "":
            raise ImageError(
                f"{table}, line {line}: {path_column} or {label_column} is empty; fill it in, or delete the line"
            )
        where = Path(str(name)).expanduser()
        place = where if where.is_absolute() else folder / where
        if not place.is_file():
            raise ImageError(f"{table}, line {line}: {name}: no such image file (paths are relative to {folder})")
        pictures.append(_of_file(place, str(label)))
    return pictures


def _column(table: Path, columns: Sequence[str], wanted: Sequence[str]) -> str:
    by_name = {str(c).strip().lower(): c for c in columns}
    column = next((by_name[w] for w in wanted if w in by_name), None)
    if column is None:
        raise ImageError(
            f"{table}: no column {' or '.join(wanted[:2])}; it has {', '.join(map(repr, columns))}. "
            "Give one line per image, with the columns path and label"
        )
    return column


def _rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = read_text(table)
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{table}: cannot be read as UTF-8 text ({error})") from None
    if table.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ImageError(f"{table}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ImageError(f'{table}, line {number}: give an object such as {{"path": "a.jpg", "label": "cat"}}')
            yield number, row
        return
    first = text.partition("\n")[0]
    separator = max("\t;,", key=first.count)
    reader = csv.DictReader(text.splitlines(), delimiter=separator)
    for row in reader:
        yield reader.line_num, {k: v for k, v in row.items() if k is not None}


def content_id(content: Given) -> int:
    """Identifies a picture by what is in it: the first 8 bytes of a SHA-256 of its file, or of its pixels."""
    if isinstance(content, bytes):
        digest = hashlib.sha256(content)
    else:
        pixels = np.asarray(content)
        digest = hashlib.sha256(f"{pixels.dtype}{pixels.shape}".encode() + np.ascontiguousarray(pixels).tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


def clean_name(label: str) -> str:
    """A class name as it is kept; refuses what cannot be one."""
    name = unicodedata.normalize("NFC", label).strip()
    if not name or not name.isprintable() or len(name) > LONGEST_NAME:
        raise UserError(f"{label!r} cannot be the name of a class; give 1 to {LONGEST_NAME} printable characters")
    if name.casefold() == UNKNOWN:
        raise UserError(
            f"{label!r} cannot be the name of a class: it is the answer for images of no known class; choose another, "
            "or teach what is none of the classes with --as-unknown"
        )
    return name


def spelling(name: str) -> str:
    """Equal for names that differ only in case, encoding of accents, spaces, hyphens and underscores."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(c for c in folded if c not in " -_")


def check_spelling(known: Iterable[str], new: Iterable[str]) -> None:
    """Refuse class names that differ only in spelling, among the new ones or from existing ones."""
    seen = {spelling(name): (name, "the model knows") for name in known}
    for name in sorted(set(new)):
        other, where = seen.setdefault(spelling(name), (name, "is among the new classes"))
        if other != name:
            raise UserError(
                f"the class {name!r} is spelled differently from {other!r}, which {where}; "
                f"rename one of them if they are the same class, or give it a name that differs in more than spelling"
            )

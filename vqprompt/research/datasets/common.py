"""What the data sets share: find or download one, check that it is complete, and make a `Dataset` of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vqprompt.core.cache import cache_folder
from vqprompt.core.data.archives import ARCHIVE_SUFFIXES, Files
from vqprompt.core.data.shards import ParquetShards
from vqprompt.core.data.source import Entry, RowsOfEntries, Source
from vqprompt.core.data.store import build_store
from vqprompt.core.data.stream import Dataset, check_classes, check_names, rows_by_class, split_rows
from vqprompt.core.downloads import download
from vqprompt.core.errors import ImageError
from vqprompt.core.files import exists
from vqprompt.core.progress import Report
from vqprompt.core.words import shorten

TEST_FRACTION = 0.2


class Remote(NamedTuple):
    """A file to download."""

    name: str
    url: str
    md5: str


@dataclass(frozen=True)
class Published:
    """A data set by name. The fields are explained in published.toml."""

    name: str
    summary: str
    classes: int
    images: int | None = None
    train: int | None = None
    files: tuple[Remote, ...] = ()
    optional_files: tuple[Remote, ...] = ()
    hub: str | None = None
    labels: tuple[str, ...] = ()
    by_hand: str = ""  # instructions for the user if nothing can be downloaded automatically
    no_split: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()


@dataclass
class Listing(RowsOfEntries):
    """Images with their classes and splits, ready to be checked and decoded."""

    path: Path
    entries: list[Entry]
    classes: list[str]  # in their natural order
    read_path: Callable[[str], bytes]
    key: str
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    groups: tuple[tuple[str, ...], ...] | None = None  # class names per task, for sets of several kinds of images
    domains: list[str] | None = None  # of each image, where the source has domains


def data_folder() -> Path:
    return Path(os.environ.get("VQPROMPT_DATA") or cache_folder() / "data").expanduser()


def locate(known: Published, given: str | None, progress: Report) -> Path:
    """The path that the user gave, or NAME/ or NAME.zip … in the data folder, downloaded now if it is missing."""
    if given is not None:
        path = Path(given).expanduser()
        if not exists(path):
            raise ImageError(f"{known.name}={given}: no such file or folder; {how_to_get(known)}")
        return archive_or_folder(path)
    folder = data_folder() / known.name
    packed = [file for suffix in ARCHIVE_SUFFIXES if (file := folder.with_name(known.name + suffix)).is_file()]
    if packed and not folder.exists():
        return packed[0]
    there = {p.name for p in folder.iterdir() if not p.name.startswith(".")} if folder.is_dir() else set()
    if not there - {remote.name for remote in known.optional_files}:
        _download(known, folder, there, progress)
    return archive_or_folder(folder)


def _download(known: Published, folder: Path, there: set[str], progress: Report) -> None:
    if not known.files:
        raise ImageError(f"{known.name} is not on this machine and cannot be downloaded; {how_to_get(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    for remote in (*known.optional_files, *known.files):  # the large file last: it ends the download
        if remote.name in there:
            continue
        try:
            download(remote.url, folder / remote.name, f"md5:{remote.md5}", progress)
        except (OSError, HTTPException, ValueError) as error:
            if remote in known.optional_files or (known.hub and _from_hub(known.hub, folder)):
                continue
            raise ImageError(
                f"{known.name} is not on this machine and could not be downloaded ({error}).\n{how_to_get(known)}"
            ) from None


def _from_hub(repository: str, folder: Path) -> bool:
    """Download the parquet files of a data set from the hub. Returns whether it worked."""
    try:
        import pyarrow  # noqa: F401 (without it, parquet files cannot be read)
        from huggingface_hub import snapshot_download

        snapshot_download(repository, repo_type="dataset", allow_patterns=["*.parquet"], local_dir=folder)
    except Exception:  # any error of the transport; the message names the error of the first download
        return False
    return True


def how_to_get(known: Published) -> str:
    folder = data_folder() / known.name
    remotes = (*known.files, *known.optional_files)
    lines = [f"Fetch {remote.name}\n  from {remote.url}\n  to   {folder / remote.name}" for remote in remotes]
    if known.by_hand:
        lines.append(f"{known.by_hand}\n  to   {folder}")
    return "\n".join([*lines, f"or say where you have it: --data {known.name}=/path/to/it"])


def archive_or_folder(path: Path) -> Path:
    """The archive inside a folder that has neither subfolders nor parquet files; else the path as it is."""
    if path.is_file():
        return path
    inside = [p for p in sorted(path.iterdir()) if not p.name.startswith(".")]
    archives = [p for p in inside if p.name.lower().endswith(ARCHIVE_SUFFIXES)]
    return archives[0] if archives and not any(p.is_dir() or p.suffix == ".parquet" for p in inside) else path


def read_file(files: Files, name: str) -> bytes:
    try:
        return files.read(name)
    except OSError as error:
        raise ImageError(f"{files.path}: {name} cannot be read ({error}); get it again") from None


def list_images(path: Path, by_domain: bool = False, files: Files | None = None) -> Listing:
    """Class folders, with or without train/ and test/ above them. by_domain: they are inside folders of domains. files:
    as in `Source`."""
    source = Source(path, files=files)
    entries, domains = source.entries, None
    if by_domain:  # then the outer folder, which was taken for the class, is the domain
        if wrong := [e.path for e in entries if e.path.split("/")[-3:-2] != [e.label]]:
            raise ImageError(f"{path}: {wrong[0]!r} is not DOMAIN/CLASS/image, as --stream domains needs it")
        domains, entries = [e.label for e in entries], [replace(e, label=e.path.split("/")[-2]) for e in entries]
    classes, read = sorted({e.label for e in entries}), source.read_path
    return Listing(source.path, entries, classes, read, source.key, ignored=source.ignored, domains=domains)


def make_dataset(
    name: str, listing: Listing, side: int, seed: int, progress: Report, expected: Published | None = None
) -> Dataset:
    """Check a listing, split it (by `seed`) if it has no split, and decode it."""
    check_names(str(listing.path), listing.classes)
    position = {label: i for i, label in enumerate(listing.classes)}
    labels = np.array([position[e.label] for e in listing.entries])
    is_test = np.array([e.split == "test" for e in listing.entries])
    notes = list(listing.notes)
    if expected is not None:
        if expected.no_split and listing.entries[0].split is None:
            raise ImageError(f"{listing.path}: which images are for testing? {expected.no_split}")
        check_whole(expected, listing.path, listing.classes, len(labels))
    elif listing.ignored:  # known data sets come with READMEs, which need no mention
        notes.append(f"left out, not an image in a class folder: {shorten(listing.ignored, 3)}")
    if listing.entries[0].split is None:
        notes.append(no_split_note(seed))
        names = [(e.path.rpartition("/")[2], e.path) for e in listing.entries]
        by_name = np.array(sorted(range(len(names)), key=names.__getitem__))  # the same split for every layout
        cells, of_cell = np.array(listing.classes), labels
        if listing.domains is not None:
            pairs = zip(listing.domains, listing.entries, strict=True)
            cells, of_cell = np.unique([f"{domain}/{e.label}" for domain, e in pairs], return_inverse=True)
        is_test = hold_out(listing.path, cells.tolist(), of_cell, by_name, seed)
    elif expected is not None and expected.images and expected.train not in (None, int((~is_test).sum())):
        notes.append(
            f"{name}: split {(~is_test).sum():,} to learn from / {is_test.sum():,} to test with, not the usual "
            f"{expected.train:,} / {expected.images - expected.train:,}"
        )
    check_classes(str(listing.path), listing.classes, labels, is_test)
    store = build_store(listing, side, progress)
    domains = None if listing.domains is None else np.array(listing.domains)
    return Dataset(name, listing.classes, store, labels, is_test, tuple(notes), listing.groups, domains, listing.where)


def hold_out(path: Path, classes: Sequence[str], labels: np.ndarray, order: np.ndarray, seed: int) -> np.ndarray:
    """Which images are to test with [n], where the source does not say. order: in which images are counted."""
    is_test = np.zeros(len(labels), bool)
    for label, rows in zip(classes, rows_by_class(labels[order], len(classes)), strict=True):
        if len(rows) < 2:
            raise ImageError(f"{path}: the class {label!r} has a single image; it needs two, one of them to test with")
        is_test[split_rows(order[rows], TEST_FRACTION, f"{seed}:{label}")[1]] = True
    return is_test


def no_split_note(seed: int) -> str:
    return f"no train/ and test/ folders: {TEST_FRACTION:.0%} of each class held out for testing (seed {seed})"


def check_whole(expected: Published, path: Path, classes: Sequence[str], images: int) -> None:
    """Refuse an incomplete data set before anything is learned, and name what is missing."""
    problems = []
    if len(classes) != expected.classes:
        missing = [c for c in expected.names if c not in set(classes)]
        known = len(missing) + len(classes) == expected.classes  # else its classes have other names
        names = f" (missing: {shorten(missing)})" if known else ""
        problems.append(f"{len(classes)} classes, not {expected.classes}{names}")
    if expected.images not in (None, images):
        problems.append(f"{images:,} images, not {expected.images:,}")
    if problems:
        raise ImageError(
            f"{path}: not the whole of {expected.name}: it has {' and '.join(problems)}; get it again, "
            "or give the class folders without the name (--data FOLDER) if a part is what you want"
        )


def ordered(classes: Sequence[str], names: Sequence[str]) -> list[str]:
    """Classes in a known order, if all of them are in it; else as they are."""
    return [n for n in names if n in set(classes)] if set(classes) <= set(names) else list(classes)


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def list_parquet(path: Path, label_columns: Sequence[str], names: Sequence[str] = ()) -> Listing:
    """All rows as images with classes. Parameters as for `ParquetShards`."""
    shards = ParquetShards(path, label_columns, names)
    rows = {path: row for row, path in enumerate(shards.image_paths())}
    splits = repeat(None) if shards.splits is None else np.where(shards.splits, "test", "train").tolist()
    described = zip(rows, shards.labels, splits, strict=False)
    entries = [Entry(path, shards.classes[label], split) for path, label, split in described]
    by_number = all(isinstance(label, int) for label in shards.values.values())
    order = sorted(shards.classes, key=shards.values.__getitem__ if by_number else natural)
    return Listing(path, entries, order, lambda inside: shards.read(rows[inside]), shards.key)

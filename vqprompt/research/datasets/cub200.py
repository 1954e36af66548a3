"""CUB-200-2011: 200 birds, 5,994 photographs to learn from and 5,794 to test with (Wah et al., 2011).

Reads the original (CUB_200_2011.tgz, or its folder: images.txt, image_class_labels.txt, train_test_split.txt,
classes.txt, images/), a folder or archive of train/<class>/… and test/<class>/…, and the hub's parquet.
"""

from __future__ import annotations

from pathlib import Path

from vqprompt.core.data.archives import Files
from vqprompt.core.data.parquet import parquet_files
from vqprompt.core.data.source import Entry, key_of
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import ImageError
from vqprompt.core.progress import Report, ignore
from vqprompt.core.words import shorten
from vqprompt.research.datasets.common import (
    Expected,
    Listing,
    Origin,
    Remote,
    archive_or_folder,
    list_images,
    locate,
    make_dataset,
    open_files,
    read_file,
)
from vqprompt.research.datasets.parquet import list_parquet

EXPECTED = Expected(classes=200, images=11_788, train=5_994)
ORIGIN = Origin(
    files=(
        Remote(
            "CUB_200_2011.tgz",
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "97eceeb196236b17998738112f37df78",
        ),
    ),
    hub="bentrevett/caltech-ucsd-birds-200-2011",
)
TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


def open_cub200(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    return make_dataset(
        "cub200", list_cub200(locate("cub200", source, ORIGIN, progress)), side, seed, progress, EXPECTED
    )


def list_cub200(path: Path) -> Listing:
    if parquet_files(path):
        listing = list_parquet(path, ["label", "labels"])
    else:
        files = open_files(path)
        tables = sorted((p for p in files.names if p.rpartition("/")[2] in TABLES[:3]), key=lambda p: p.count("/"))
        listing = _official(files, tables[0].rpartition("/")[0]) if tables else list_images(archive_or_folder(path))
    if listing.entries[0].split is None:
        raise ImageError(
            f"{path}: which images are for testing? There is neither train_test_split.txt nor a train/ and a test/ "
            "folder; add the text files of the original archive"
        )
    return listing


def _official(files: Files, folder: str) -> Listing:
    """The original layout: tables of `number value` lines, and images/<class>/<image>."""
    prefix = f"{folder}/" if folder else ""
    missing = [name for name in TABLES if prefix + name not in files.names]
    if missing:
        raise ImageError(f"{files.path}: {shorten(missing)} missing beside the other tables; get the archive again")
    images, labels, splits, classes = (_table(files, prefix + name) for name in TABLES)
    if not images.keys() == labels.keys() == splits.keys() or not set(labels.values()) <= classes.keys():
        raise ImageError(f"{files.path}: {', '.join(TABLES)} do not list the same images; get the archive again")
    paths = {number: f"{prefix}images/{name}" for number, name in images.items()}
    lost = [path for path in paths.values() if path not in files.names]
    if lost:
        raise ImageError(
            f"{files.path}: {len(lost)} of {len(paths)} images in images.txt are not there ({shorten(lost)}); "
            "get the archive again"
        )
    entries = [Entry(paths[n], classes[labels[n]], "train" if splits[n] == "1" else "test") for n in images]
    used = set(labels.values())
    order = [name for number, name in classes.items() if number in used]
    key = key_of(files.key, files.stamps(list(paths.values())))
    return Listing(files.path, entries, order, lambda entry: files.read(entry.path), key)


def _table(files: Files, name: str) -> dict[str, str]:
    rows = {}
    for number, line in enumerate(read_file(files, name).decode("utf-8", "replace").splitlines(), start=1):
        key, space, value = line.strip().partition(" ")
        if not space and line.strip():
            raise ImageError(f"{files.path}: {name}, line {number}: {line!r} is not `number value`; get it again")
        if space:
            rows[key] = value.strip()
    return rows

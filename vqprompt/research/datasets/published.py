"""The data sets of the paper, in every layout in which people have them (see published.toml).

- All but VTAB and CIFAR-100: class folders <class>/…, or train/<class>/… and test/<class>/…, packed or not, and the
  hub's parquet.
- CUB-200-2011 (Wah et al., 2011): also the original, CUB_200_2011.tgz or its folder, with its tables of text.
- ImageNet-R and ImageNet-A (Hendrycks et al., 2021) have no official split, so a fifth of each class is held out. For
  ImageNet-R papers use the file lists of CODA-Prompt; these count if they are beside the images.
- VTAB, cross-domain: ten classes of each of five sets, one set per task, as released with LAMDA-PILOT (Zhou et al.).
  Ten consecutive numbers are one domain.
- CIFAR-100 (Krizhevsky, 2009): the Python version, packed or not, and the hub's parquet. The Python version is a
  pickle, which could run any code: it is read by an unpickler that accepts arrays, lists and strings and nothing else.
  Its images stay 32×32 in the store; they are enlarged to the backbone's size when a batch is made.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from vqprompt.core.data.archives import Files, hidden, open_files
from vqprompt.core.data.shards import parquet_files
from vqprompt.core.data.source import Entry
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import ImageError
from vqprompt.core.progress import Report, ignore
from vqprompt.core.words import shorten
from vqprompt.research.datasets import common
from vqprompt.research.datasets.common import Listing, Published, read_file

TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
LISTS = {"train": "imagenet-r_train.yaml", "test": "imagenet-r_test.yaml"}
DOMAINS = ("resisc45", "dtd", "pets", "eurosat", "flowers")


def _load() -> dict[str, Published]:
    table = tomllib.loads((package_files(__package__) / "published.toml").read_text(encoding="utf-8"))
    entries = {name: {**entry, "name": name, "names": entry.get("names", "").split()} for name, entry in table.items()}
    return TypeAdapter(dict[str, Published]).validate_python(entries)


PUBLISHED = _load()
CIFAR_NAMES = PUBLISHED["cifar100"].names
SIDE = 32  # px of CIFAR-100


def open_published(name: str, source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    known = PUBLISHED[name]
    listing = LAYOUTS.get(name, list_published)(known, common.locate(known, source, progress))
    return common.make_dataset(name, listing, side, seed, progress, known)


def list_published(known: Published, path: Path, files: Files | None = None) -> Listing:
    """Parquet files, or class folders, packed or not."""
    if known.labels and parquet_files(path):
        listing = common.list_parquet(path, known.labels)
    else:
        listing = common.list_images(path, files=files)
    listing.classes = common.ordered(listing.classes, known.names)
    return listing


# ---------------------------------------------------------------------------------------------- CUB-200


def list_cub200(known: Published, path: Path) -> Listing:
    files = None if parquet_files(path) else open_files(path)
    if files is not None:
        tables = sorted((p for p in files.names if p.rpartition("/")[2] in TABLES[:3]), key=lambda p: p.count("/"))
        if tables:
            return _official(files, tables[0].rpartition("/")[0])
    return list_published(known, path, files)


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
    return Listing(files.path, entries, order, files.read, files.key_of(list(paths.values())))


def _table(files: Files, name: str) -> dict[str, str]:
    rows = {}
    for number, line in enumerate(read_file(files, name).decode("utf-8", "replace").splitlines(), start=1):
        key, space, value = line.strip().partition(" ")
        if not space and line.strip():
            raise ImageError(f"{files.path}: {name}, line {number}: {line!r} is not `number value`; get it again")
        if space:
            rows[key] = value.strip()
    return rows


# ---------------------------------------------------------------------------------------------- ImageNet-R


def list_imagenet_r(known: Published, path: Path) -> Listing:
    """With the split and the order of classes that CODA-Prompt's lists prescribe, if both lists are there."""
    listing, folder = list_published(known, path), path if path.is_dir() else path.parent
    lists = {split: folder / name for split, name in LISTS.items() if (folder / name).is_file()}
    if len(lists) < len(LISTS):
        missing = "only one of them is" if lists else "they are not"
        listing.notes.append(
            f"papers use the split of CODA-Prompt, {' and '.join(LISTS.values())}; {missing} in {folder}"
        )
        return listing
    listed: dict[str, tuple[str, int]] = {}
    for split, file in lists.items():
        listed |= {name: (split, target) for name, target in read_list(file).items()}
    by_name = {"/".join(entry.path.split("/")[-2:]): entry for entry in listing.entries}
    lost = [name for name in listed if name not in by_name]
    if lost:
        raise ImageError(
            f"{listing.path}: {len(lost)} of the {len(listed)} images in {' and '.join(LISTS.values())} are not there "
            f"({shorten(lost)}); get them, or take the lists away to split 80/20"
        )
    chosen = {name: entry for name, entry in by_name.items() if name in listed}
    if len(chosen) < len(listing.entries):
        listing.notes.append(f"left out {len(listing.entries) - len(chosen)} images that no list names")
    entries = [replace(entry, split=listed[name][0]) for name, entry in chosen.items()]
    number = {entry.label: listed[name][1] for name, entry in chosen.items()}
    listing.notes.append(f"split by {' and '.join(LISTS.values())}")
    return replace(listing, entries=entries, classes=sorted(number, key=lambda label: number[label]))


def read_list(path: Path) -> dict[str, int]:
    """`<wnid>/<image>` to class number."""
    import yaml  # for these lists alone

    try:
        listed = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # plain data, nothing else
        pairs = zip(listed["data"], listed["targets"], strict=True)
        return {"/".join(name.split("/")[-2:]): int(target) for name, target in pairs}
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ImageError(
            f"{path}: needs as many numbers under targets: as paths under data: ({reason}); get it again"
        ) from None


# ---------------------------------------------------------------------------------------------- VTAB


def list_vtab(known: Published, path: Path) -> Listing:
    listing = list_published(known, path)
    classes = sorted(listing.classes, key=common.natural)
    domain = {name: DOMAINS[i * len(DOMAINS) // len(classes)] for i, name in enumerate(classes)}
    full = {name: f"{domain[name]}/{name}" for name in classes}  # numbers do not tell a reader much
    return replace(
        listing,
        entries=[replace(entry, label=full[entry.label]) for entry in listing.entries],
        classes=[full[name] for name in classes],
        groups=tuple(tuple(full[name] for name in classes if domain[name] == d) for d in DOMAINS),
    )


# ---------------------------------------------------------------------------------------------- CIFAR-100


def open_cifar100(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    known = PUBLISHED["cifar100"]
    path = common.locate(known, source, progress)
    if parquet_files(path):
        listing = common.list_parquet(path, known.labels, known.names)
        return common.make_dataset("cifar100", listing, SIDE, seed, progress, known)
    files = open_files(path)
    (train, train_labels), (test, test_labels) = (_read_cifar(files, path, split) for split in ("train", "test"))
    pixels, labels = np.concatenate([train, test]), np.concatenate([train_labels, test_labels])
    is_test = np.arange(len(labels)) >= len(train_labels)
    there, labels = np.unique(labels, return_inverse=True)
    classes = [CIFAR_NAMES[label] for label in there]
    common.check_whole(known, path, classes, len(labels))
    store = Store(pixels, np.ones(len(pixels)), hashlib.sha256(pixels.data).hexdigest()[:24])
    return Dataset("cifar100", classes, store, labels, is_test)


def _read_cifar(files: Files, path: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [n, 3, 32, 32] and fine labels [n] of `train` or `test`, in the order of the file."""
    there = sorted((p for p in files.names if not hidden(p)), key=lambda p: p.count("/"))
    name = next((p for p in there if p.rsplit("/", 1)[-1] == split), None)
    if name is None:
        raise ImageError(f"{path}: no file {split!r} in it, as cifar-100-python has it; get it again")
    batch = load_plain_pickle(read_file(files, name), f"{path}: {name}")
    try:
        labels = np.array(batch["fine_labels"], np.int64).ravel()
        pixels = np.asarray(batch["data"]).astype(np.uint8, casting="safe", copy=False)
        pixels = pixels.reshape(len(labels), 3, SIDE, SIDE)
    except (TypeError, KeyError, ValueError):
        raise ImageError(
            f"{path}: {name} is not part of CIFAR-100: it lacks pixels (data) or labels (fine_labels); get it again"
        ) from None
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(CIFAR_NAMES):
        raise ImageError(f"{path}: {name} has labels beyond 0 … {len(CIFAR_NAMES) - 1}; get it again")
    return np.ascontiguousarray(pixels), labels


class _PlainUnpickler(pickle.Unpickler):
    """Accepts arrays, lists, dictionaries, strings, bytes and numbers; refuses everything else."""

    ARRAY = np.empty(0, np.uint8).__reduce__()[0]  # the function that rebuilds arrays, under any version of numpy
    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"): ARRAY,
        ("numpy._core.multiarray", "_reconstruct"): ARRAY,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return self.ALLOWED[module, name]


def load_plain_pickle(data: bytes, name: str) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(data), encoding="latin1").load()  # written by Python 2
    except Exception as error:  # a damaged pickle may raise anything
        raise ImageError(f"{name} is not a pickle of plain data and is not read ({error}); get it again") from None


LAYOUTS: dict[str, Callable[[Published, Path], Listing]] = {
    "cub200": list_cub200, "imagenet-r": list_imagenet_r, "vtab": list_vtab,
}  # fmt: skip

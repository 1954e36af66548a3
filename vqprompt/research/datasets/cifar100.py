"""CIFAR-100: 100 classes × (500 + 100) photographs of 32×32 (Krizhevsky, 2009).

Reads the Python and the binary version, packed or unpacked, and the hub's parquet. The Python version is a pickle,
which could run any code: it is read by an unpickler that accepts arrays, lists and strings and nothing else.
The images stay 32×32 in the store; they are enlarged to the size of the backbone when a batch is made.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.data.archives import Files, hidden
from vqprompt.core.data.shards import parquet_files
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import ImageError
from vqprompt.core.progress import Report, ignore
from vqprompt.research.datasets.common import check_whole, list_parquet, locate, make_dataset, open_files, read_file
from vqprompt.research.datasets.published import PUBLISHED

CLASSES = PUBLISHED["cifar100"].names
SIDE, RECORD = 32, 2 + 3 * 32 * 32  # a binary record: coarse label, fine label, pixels


def open_cifar100(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    known = PUBLISHED["cifar100"]
    path = locate(known, source, progress)
    if parquet_files(path):
        listing = list_parquet(path, known.labels, CLASSES)
        if listing.entries[0].split is None:
            raise ImageError(f"{path}: needs parquet files of both train and test; get the missing ones")
        return make_dataset("cifar100", listing, SIDE, seed, progress, known)
    files = open_files(path)
    (train, train_labels), (test, test_labels) = (_read(files, path, split) for split in ("train", "test"))
    pixels, labels = np.concatenate([train, test]), np.concatenate([train_labels, test_labels])
    is_test = np.arange(len(labels)) >= len(train_labels)
    there, labels = np.unique(labels, return_inverse=True)
    classes = [CLASSES[label] for label in there]
    check_whole(known, path, classes, len(labels))
    store = Store(pixels, np.ones(len(pixels)), hashlib.sha256(pixels.data).hexdigest()[:24])
    return Dataset("cifar100", classes, store, labels, is_test)


def _read(files: Files, path: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [n, 3, 32, 32] and fine labels [n] of `train` or `test`, in the order of the file."""
    there = sorted((p for p in files.names if not hidden(p)), key=lambda p: p.count("/"))
    name = next((p for p in there if p.rsplit("/", 1)[-1] in (split, f"{split}.bin")), None)
    if name is None:
        raise ImageError(
            f"{path}: no file {split!r} (cifar-100-python) or '{split}.bin' (cifar-100-binary) in it; get it again"
        )
    data = read_file(files, name)
    if name.endswith(".bin"):
        if len(data) % RECORD or not data:
            raise ImageError(f"{path}: {name} is damaged, {len(data)} bytes are no multiple of {RECORD}; get it again")
        records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
        pixels, labels = records[:, 2:], records[:, 1].astype(np.int64)
    else:
        batch = load_plain_pickle(data, f"{path}: {name}")
        try:
            pixels, labels = batch["data"], np.array(batch["fine_labels"], np.int64)
            good = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * SIDE * SIDE) and labels.ndim == 1
        except (TypeError, KeyError, ValueError, AttributeError):
            good = False
        if not good:
            raise ImageError(
                f"{path}: {name} is not part of CIFAR-100: it lacks pixels (data) or labels (fine_labels); get it again"
            )
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(CLASSES):
        raise ImageError(f"{path}: {name} has labels beyond 0 … {len(CLASSES) - 1}; get it again")
    return np.ascontiguousarray(pixels).reshape(-1, 3, SIDE, SIDE), labels


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

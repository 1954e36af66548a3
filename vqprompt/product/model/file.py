"""A model's file: safetensors, with its description as JSON inside.

What is notable about this implementation:
- One file has everything: the classes, the solved classifier, the history, and older versions, for `undo`. Versions
  share what they have in common: a version is a list of classes, each of them a row in the file's tables.
- A new file is written beside the old one, synced, and renamed over it. So there is always a complete file, old or new,
  for readers and after a kill. A checksum covers the description and every tensor.
- One process at a time can change a model. It locks a file beside the model, and the system releases the lock when the
  process ends, even if it is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse_tensors
from safetensors.numpy import save as pack_tensors

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.statistics.discriminant import Discriminant
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.records import ClassRecord

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FORMAT = "vqprompt-model"
VERSION, WITH_TRAINING = 1, 2  # files with training have version 2, so that older readers do not ignore it
VERSIONS_KEPT = 10  # older versions, for undo
BYTES_KEPT = 64 << 20  # of what only older versions have
ADVICE = "restore it from a copy, or make a new one with vqprompt learn"


class ModelError(UserError):
    """A model file that is missing, damaged, not ours, or in use."""


@dataclass(frozen=True)
class Backbone:
    """The network that a model's features come from. name: as in `vqprompt backbones`, or the path of its file."""

    name: str
    fingerprint: str
    size: int
    crop: float
    width: int

    @property
    def side(self) -> int:
        """Side in px of the squares that images are squashed to before they are cropped."""
        return round(self.size * 8 / 7)


@dataclass(frozen=True, eq=False)
class Content:
    """What a model knows at one moment.

    classes: sorted by name. solved: scores of classes, in that order; None while there is no class. facts: what was
    measured (shrinkage, temperature, thresholds, accuracy), as JSON. history: one entry per change, oldest first.
    trained: what changes the network, if anything was trained; features are those of the changed network.
    """

    classes: dict[str, ClassRecord] = field(default_factory=dict)
    history: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    solved: Discriminant | None = None
    spread: np.ndarray | None = None
    trained: Trained | None = None


@dataclass(frozen=True, eq=False)
class Stored:
    """A whole file. gram: [D, D] in fixed point, over the classes of `content`. past: older contents, newest last; only
    their classes, history, facts and training are kept, the rest is computed again."""

    backbone: Backbone
    content: Content
    gram: np.ndarray
    past: tuple[Content, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- pack


def pack(stored: Stored) -> bytes:
    records: dict[int, tuple[int, ClassRecord]] = {}  # by identity: unchanged classes are shared between versions
    trainings: dict[int, tuple[int, Trained]] = {}
    versions = []
    for content in (*_within_limits(stored), stored.content):
        places = {name: records.setdefault(id(r), (len(records), r))[0] for name, r in content.classes.items()}
        version: dict[str, Any] = {"classes": places, "history": list(content.history), "facts": content.facts}
        if (t := content.trained) is not None:
            version["trained"] = trainings.setdefault(id(t), (len(trainings), t))[0]
        versions.append(version)
    rows = [record for _, record in records.values()]
    trained = [training for _, training in trainings.values()]
    width = stored.backbone.width
    tensors = {
        "names": np.concatenate([r.names for r in rows]) if rows else np.zeros(0, np.uint64),
        "totals": np.stack([r.total for r in rows]) if rows else np.zeros((0, width), np.int64),
        "kept": np.concatenate([r.kept for r in rows]) if rows else np.zeros((0, width), np.int16),
        "modes": np.concatenate([r.modes for r in rows]) if rows else np.zeros(0, np.uint8),
        "gram": stored.gram[np.triu_indices(width)],
    }
    if stored.content.solved is not None:
        solved = stored.content.solved
        tensors |= {"weights": solved.weights, "bias": solved.bias, "owners": solved.owners.astype(np.int32)}
    if stored.content.spread is not None:
        tensors["spread"] = stored.content.spread
    if trained:
        tensors["unseen"] = np.concatenate([r.unseen for r in rows]).astype(np.uint8)
        tensors |= {f"trained.{i}.{name}": tensor for i, t in enumerate(trained) for name, tensor in t.tensors.items()}
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    described: dict[str, Any] = {
        "backbone": vars(stored.backbone),
        "settings": stored.settings,
        "records": [{"images": len(r.names), "kept": len(r.kept)} for r in rows],
        "versions": versions,  # the last one is the model, those before are for undo
    }
    if trained:
        described["trained"] = [{"effort": t.effort, "method": t.method, "options": t.options} for t in trained]
    description = json.dumps(described, ensure_ascii=False, allow_nan=False)
    version_number = WITH_TRAINING if trained else VERSION
    metadata = {"format": FORMAT, "version": str(version_number), "model": description}
    return pack_tensors(tensors, metadata={**metadata, "checksum": checksum(metadata, tensors)})


def checksum(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> str:
    """SHA-256 over the description and every tensor: name, type, shape and bytes, in the order of names."""
    digest = hashlib.sha256()
    for key in ("format", "version", "model"):
        digest.update(f"{key}\0{metadata[key]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def _within_limits(stored: Stored) -> list[Content]:
    """The newest of the older versions, as many as the limits allow, oldest first."""
    kept: list[Content] = []
    counted, total = {id(part) for part in _parts(stored.content)}, 0
    for content in reversed(stored.past[-VERSIONS_KEPT:]):
        own = {id(part): part.nbytes for part in _parts(content) if id(part) not in counted}
        total += sum(own.values())
        if total > BYTES_KEPT:
            break
        counted |= own.keys()
        kept.insert(0, content)
    return kept


def _parts(content: Content) -> list[ClassRecord | Trained]:
    """What versions can share."""
    return [*content.classes.values(), *([] if content.trained is None else [content.trained])]


# ---------------------------------------------------------------------------------------------- parse


def parse(data: bytes, path: Path) -> Stored:
    metadata = _metadata(data, path)
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: damaged ({error}); {ADVICE}") from None
    if checksum(metadata, tensors) != metadata["checksum"]:
        raise ModelError(f"{path}: damaged, its checksum does not match its content; {ADVICE}")
    described = json.loads(metadata["model"])
    return _assemble(described, tensors)


def _metadata(data: bytes, path: Path) -> dict[str, str]:
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        metadata = header["__metadata__"]
        form, version = metadata["format"], int(metadata["version"])
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError):
        like_safetensors = len(data) > 8 and data[8:9] == b"{"
        raise ModelError(
            f"{path}: damaged, or not a model of vqprompt; {ADVICE}" if like_safetensors else
            f"{path}: not a model of vqprompt; give a file that vqprompt learn made"
        ) from None  # fmt: skip
    if form != FORMAT:
        raise ModelError(f"{path}: not a model of vqprompt (it says {form!r}); give a file that vqprompt learn made")
    if version not in (VERSION, WITH_TRAINING):
        raise ModelError(
            f"{path}: a model of format {version}, and this vqprompt reads formats {VERSION} and {WITH_TRAINING}; "
            + ("install a newer vqprompt" if version > VERSION else "make a new one with vqprompt learn")
        )
    if not {"model", "checksum"} <= metadata.keys():
        raise ModelError(f"{path}: damaged, its description is missing; {ADVICE}")
    return metadata


def _assemble(described: dict[str, Any], tensors: dict[str, np.ndarray]) -> Stored:
    backbone = Backbone(**described["backbone"])
    images = np.cumsum([0, *(r["images"] for r in described["records"])])
    kept = np.cumsum([0, *(r["kept"] for r in described["records"])])
    unseen = tensors["unseen"].astype(bool) if "unseen" in tensors else np.ones(kept[-1], bool)
    records = [
        ClassRecord(
            tensors["names"][images[i] : images[i + 1]], tensors["totals"][i], tensors["kept"][kept[i] : kept[i + 1]],
            tensors["modes"][kept[i] : kept[i + 1]], unseen[kept[i] : kept[i + 1]],
        )
        for i in range(len(described["records"]))
    ]  # fmt: skip
    trained = [
        Trained(
            **t, tensors={n.removeprefix(f"trained.{i}."): tensors[n] for n in tensors if n.startswith(f"trained.{i}.")}
        )
        for i, t in enumerate(described.get("trained", []))
    ]
    contents = [
        Content(
            {name: records[i] for name, i in v["classes"].items()}, tuple(v["history"]), v["facts"],
            trained=trained[v["trained"]] if "trained" in v else None,
        )
        for v in described["versions"]
    ]  # fmt: skip
    solved = None
    if "weights" in tensors:
        solved = Discriminant(tensors["weights"], tensors["bias"], tensors["owners"])
    gram = np.zeros((backbone.width, backbone.width))
    gram[np.triu_indices(backbone.width)] = tensors["gram"]
    gram += np.triu(gram, 1).T
    content = replace(contents[-1], solved=solved, spread=tensors.get("spread"))
    return Stored(backbone, content, gram, tuple(contents[:-1]), described["settings"])


# ---------------------------------------------------------------------------------------------- on disk


def read(path: Path) -> tuple[Stored, str]:
    """A file's content, and the checksum in it, which identifies it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such model; make one with vqprompt learn {path} FOLDER") from None
    except IsADirectoryError:
        raise ModelError(f"{path}: this is a folder; a model is one file, such as garden.vqp") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
    return parse(data, path), _metadata(data, path)["checksum"]


def checksum_inside(path: Path) -> str:
    """The checksum that identifies a file. Only the header is read."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    return _metadata(length + header, path)["checksum"]


def write(path: Path, stored: Stored) -> str:
    """Write the whole file or nothing. Returns the checksum that identifies it."""
    data = pack(stored)
    digest = _metadata(data, path)["checksum"]
    try:
        write_atomically(path, data)
    except OSError as error:
        reason = (
            str(error) if isinstance(error, UserError) else f"{path}: cannot be written ({error.strerror or error})"
        )
        raise ModelError(f"{reason}; the model is as it was") from None
    return digest


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time can be inside this block for the same model."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_lock(lock)
    except BlockingIOError:
        raise ModelError(f"{path}: another process is teaching this model; wait until it is done") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be written here ({error.strerror or error}); choose another place") from None
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink(missing_ok=True)
        file.close()


def _open_lock(lock: Path) -> Any:
    while True:
        file = lock.open("w")
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == lock.stat().st_ino:  # else the process before us has just deleted it
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            raise
        except OSError:  # a file system without locks
            return file
        file.close()

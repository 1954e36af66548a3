"""A model's file: safetensors, with its description as JSON inside (docs/format.md).

What is notable about this implementation:
- One file has everything: the classes, the solved classifier, the history, and other versions, for `undo`. Versions
  share what they have in common: a version is a list of classes, each of them a row in the file's tables.
- A file may come from anywhere. Whatever is in it, reading gives a model whose answers are numbers, or one sentence
  that says what is wrong. Memory grows with the length of the file, not with the numbers in it.
- A new file is written beside the old one, synced, and renamed over it. So there is always a complete file, old or new,
  for readers and after a kill. A checksum covers the description and every tensor.
- One process at a time can change a model. It locks a file beside the model, and the system releases the lock when the
  process ends, even if it is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse_tensors
from safetensors.numpy import save as pack_tensors

from vqprompt.core.errors import UserError, is_url, missing, shown
from vqprompt.core.files import lock_file, open_regular, read_regular, write_atomically
from vqprompt.core.statistics.discriminant import Discriminant
from vqprompt.core.statistics.world import World
from vqprompt.product.model.calibration import Background, Calibration, Measurements, Rivals, Solution, Weighing
from vqprompt.product.model.description import LARGEST, Description, SolutionFields, parse_description
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.knowledge import Backbone, Event, Knowledge, Stored
from vqprompt.product.model.modes import MOST
from vqprompt.product.model.records import ClassRecord, ids_of

FORMAT, VERSION, OLDEST = "vqprompt-model", 5, 3
BYTES_KEPT = 64 << 20  # of what only other versions have
OUTDATED = "teach it again with vqprompt learn, or open and save it with an older vqprompt, which still reads it"
ADVICE = "restore it from a copy, or make a new one with vqprompt learn"


class ModelError(UserError):
    """A model file that is missing, damaged, not ours, or in use."""


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


def pack(stored: Stored) -> bytes:
    versions = [*_within_limits(stored), stored.knowledge]  # the last one is the model
    rows = list(dict.fromkeys(record for known in versions for record in known.records.values()))
    trained = list(dict.fromkeys(known.trained for known in versions if known.trained is not None))
    width, solution = stored.backbone.width, stored.knowledge.solution
    tensors = {
        "ids": ids_of(rows),
        "totals": np.array([r.total for r in rows], np.int64).reshape(-1, width),
        "kept": np.concatenate([np.zeros((0, width), np.int16), *(r.kept for r in rows)]),
        "modes": np.concatenate([np.zeros(0, np.uint8), *(r.modes for r in rows)]),
    }
    if solution is not None:
        discriminant, background = solution.discriminant, solution.background
        tensors |= {
            "gram": solution.gram[np.triu_indices(width)],
            "weights": discriminant.weights,
            "bias": discriminant.bias,
            "owners": discriminant.owners.astype(np.int32),
            "spread": np.concatenate([background.matrix, background.vector[None]]),
        }
        if solution.against is not None:
            tensors |= {"against_weights": solution.against.weights, "against_bias": solution.against.bias}
        if (rivals := solution.rivals) is not None:
            tensors |= {f"rivals_{name}": getattr(rivals, name) for name in ("center", "norms", "reliance")}
            tensors["rivals_left"] = rivals.left.astype(np.uint8)
            if rivals.line.any():
                tensors["rivals_line"] = rivals.line
    if (world := stored.knowledge.world) is not None:
        tensors |= {"world_codes": world.codes, "world_scales": world.scales}
    if trained:
        tensors["unseen"] = np.concatenate([r.unseen for r in rows]).astype(np.uint8)
        tensors |= {f"trained.{i}.{name}": tensor for i, t in enumerate(trained) for name, tensor in t.tensors.items()}
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    number_of = {part: number for parts in (rows, trained) for number, part in enumerate(parts)}
    description = {
        "backbone": asdict(stored.backbone),
        "records": [{"images": r.count, "kept": len(r.kept)} for r in rows],
        "trained": [{"effort": t.effort, "method": t.method, "options": t.options} for t in trained],
        "versions": [_version_fields(known, number_of) for known in versions],
        "latest": stored.latest,
        "solution": None if solution is None else _solution_fields(solution),
    }
    text = json.dumps(description, ensure_ascii=False, allow_nan=False)
    version = VERSION if "rivals_line" in tensors else VERSION - 1  # what programs of before can read, they shall read
    metadata = {"format": FORMAT, "version": str(version), "model": text}
    return pack_tensors(tensors, metadata={**metadata, "checksum": checksum(metadata, tensors)})


def _version_fields(known: Knowledge, number_of: Mapping[Any, int]) -> dict[str, Any]:
    """number_of: records and trainings, which versions share."""
    history = [{key: v for key, v in vars(event).items() if v not in ("", None, {})} for event in known.history]
    fields = {
        "number": known.version, "classes": {name: number_of[record] for name, record in known.classes.items()},
        "history": history, "measured": known.measured, "moved": sorted(known.moved), "parent": known.parent,
        "against": number_of.get(known.against), "trained": number_of.get(known.trained),
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value is not None}


def _solution_fields(solution: Solution) -> dict[str, Any]:
    c, measured = solution.calibration, solution.measurements
    return {
        "shrinkage": solution.shrinkage, "temperature": c.temperature, "certainty": c.certainty, "nearness": c.nearness,
        "threshold": c.threshold if solution.knows_unknown else None, "background": solution.background.constant,
        "share": solution.background.share, "ahead": c.ahead, "weighing": asdict(c.weighing),
        "measurements": None if measured is None else asdict(measured),
    }  # fmt: skip


def _within_limits(stored: Stored) -> list[Knowledge]:
    """The most important of the other versions, as many as the limit allows, by number."""
    kept: list[Knowledge] = []
    counted, total = _parts(stored.knowledge), 0
    for known in stored.by_importance():
        own = _parts(known) - counted
        total += sum(part.nbytes for part in own)
        if total > BYTES_KEPT:
            break
        counted |= own
        kept.append(known)
    return sorted(kept, key=lambda known: known.version)


def _parts(known: Knowledge) -> set[ClassRecord | Trained]:
    """What versions can share."""
    return {*known.records.values(), *([] if known.trained is None else [known.trained])}


# ---------------------------------------------------------------------------------------------- from bytes


def parse(data: bytes, path: Path) -> Stored:
    """What a file holds. path: for messages."""
    metadata = parse_metadata(data, path)
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise ModelError(f"{path}: damaged ({shown(str(error), 100)}); {ADVICE}") from None
    if checksum(metadata, tensors) != metadata["checksum"]:
        raise ModelError(f"{path}: damaged, its checksum does not match its content; {ADVICE}")
    try:
        return _assemble(parse_description(metadata["model"]), tensors)
    except ValueError as error:
        raise ModelError(f"{path}: damaged: {error}; {ADVICE}") from None


def parse_metadata(data: bytes, path: Path) -> dict[str, str]:
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        form, version = metadata["format"], int(metadata["version"])
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError):
        like_safetensors = len(data) > 8 and data[8:9] == b"{"
        raise ModelError(
            f"{path}: damaged, or not a model of vqprompt; {ADVICE}" if like_safetensors else
            f"{path}: not a model of vqprompt; give a file that vqprompt learn made"
        ) from None  # fmt: skip
    if form != FORMAT:
        raise ModelError(
            f"{path}: not a model of vqprompt (it says {shown(form, 40)}); give a file that vqprompt learn made"
        )
    if not OLDEST <= version <= VERSION:
        raise ModelError(
            f"{path}: a model of format {shown(version, 40)}, and this vqprompt reads formats {OLDEST} to {VERSION}; "
            + ("install a newer vqprompt" if version > VERSION else OUTDATED)
        )
    if not {"model", "checksum"} <= metadata.keys():
        raise ModelError(f"{path}: damaged, its description is missing; {ADVICE}")
    return {str(key): str(value) for key, value in metadata.items()}


def _assemble(described: Description, tensors: dict[str, np.ndarray]) -> Stored:
    """Raises ValueError if tensors and description do not fit together."""
    _check_tensors(described, tensors)
    images = np.cumsum([0, *(r.images for r in described.records)])
    kept = np.cumsum([0, *(r.kept for r in described.records)])
    unseen = tensors["unseen"].astype(bool) if "unseen" in tensors else np.ones(kept[-1], bool)
    records = [
        ClassRecord(
            tensors["ids"][images[i] : images[i + 1]], tensors["totals"][i], tensors["kept"][kept[i] : kept[i + 1]],
            tensors["modes"][kept[i] : kept[i + 1]], unseen[kept[i] : kept[i + 1]],
        )
        for i in range(len(described.records))
    ]  # fmt: skip
    for record in records:
        if (record.ids[1:] <= record.ids[:-1]).any():
            raise ValueError("ids: they are not sorted")
    trained = []
    for i, t in enumerate(described.trained):
        prefix = f"trained.{i}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        trained.append(Trained(t.effort, t.method, t.options, own))  # checked when the network is made of it
    world = World(tensors["world_codes"], tensors["world_scales"]) if "world_codes" in tensors else None
    versions = [
        Knowledge(
            v.number, {name: records[i] for name, i in v.classes.items()},
            tuple(Event(**vars(event)) for event in v.history), None if v.trained is None else trained[v.trained],
            frozenset(v.moved), v.measured, parent=v.parent, against=None if v.against is None else records[v.against],
            world=world,
        )
        for v in described.versions
    ]  # fmt: skip
    current = versions[-1]
    if described.solution is not None:
        current = replace(current, solution=_solution(current, described.solution, tensors))
    return Stored(Backbone(**vars(described.backbone)), current, tuple(versions[:-1]), described.latest)


def _check_tensors(described: Description, tensors: dict[str, np.ndarray]) -> None:
    """Every tensor that there must be, with its type and shape, and no other; and the range of its values."""
    width, rows = described.backbone.width, len(described.records)
    images, kept = sum(r.images for r in described.records), sum(r.kept for r in described.records)
    modes = len(tensors["owners"]) if "owners" in tensors and tensors["owners"].ndim == 1 else 0
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "ids": ("uint64", (images,)), "totals": ("int64", (rows, width)), "kept": ("int16", (kept, width)),
        "modes": ("uint8", (kept,)),
    }  # fmt: skip
    if described.solution is not None:
        expected |= {
            "gram": ("float64", (width * (width + 1) // 2,)), "weights": ("float32", (modes, width)),
            "bias": ("float32", (modes,)), "owners": ("int32", (modes,)), "spread": ("float32", (width + 1, width)),
        }  # fmt: skip
        if (against := described.versions[-1].against) is not None:
            groups = min(len(tensors.get("against_bias", ())) or 1, described.records[against].kept)
            expected |= {"against_weights": ("float32", (groups, width)), "against_bias": ("float32", (groups,))}
    if "world_codes" in tensors:
        means = tensors["world_codes"].shape[1] if tensors["world_codes"].ndim == 3 else 0
        expected |= {"world_codes": ("int8", (2, means, width)), "world_scales": ("float32", (2, means))}
        if "rivals_left" in tensors and described.solution is not None:
            expected |= {
                "rivals_left": ("uint8", (means,)), "rivals_center": ("float32", (2, width)),
                "rivals_norms": ("float32", (means,)), "rivals_reliance": ("float32", (modes,)),
            }  # fmt: skip
            if "rivals_line" in tensors:
                expected["rivals_line"] = ("float32", (width,))
    if described.trained:
        expected["unseen"] = ("uint8", (kept,))
    for name, (kind, shape) in expected.items():
        if name not in tensors:
            raise ValueError(f"{name}: it is missing")
        if (str(tensors[name].dtype), tensors[name].shape) != (kind, shape):
            raise ValueError(f"{name}: it must be {kind} {list(shape)}")
    prefixes = tuple(f"trained.{i}." for i in range(len(described.trained)))
    for name, tensor in tensors.items():
        if name not in expected and not (name.startswith(prefixes) and tensor.dtype == np.float32):
            raise ValueError(f"{shown(name, 100)}: there is no such tensor")
        if tensor.dtype.kind == "f" and not (np.abs(tensor) <= LARGEST).all():
            raise ValueError(f"{shown(name, 100)}: a value is no number, or too large")
    if (tensors["modes"] >= MOST).any() or ("unseen" in tensors and (tensors["unseen"] > 1).any()):
        raise ValueError("modes or unseen: a value is too large")
    if "rivals_left" in tensors and not tensors["rivals_left"].any():
        raise ValueError("rivals_left: there are none")
    limits = np.array([r.images for r in described.records], np.int64)[:, None] << 22
    if (tensors["totals"] > limits).any() or (tensors["totals"] < -limits).any():
        raise ValueError("totals: a value is too large")


def _solution(known: Knowledge, fields: SolutionFields, tensors: dict[str, np.ndarray]) -> Solution:
    records, width = list(known.classes.values()), tensors["totals"].shape[1]
    owners = np.repeat(np.arange(len(records)), [int(record.modes.max()) + 1 for record in records])
    if not np.array_equal(tensors["owners"], owners):
        raise ValueError("owners: they do not fit the classes and their modes")
    gram = np.zeros((width, width))
    gram[np.triu_indices(width)] = tensors["gram"]
    gram += np.triu(gram, 1).T
    sums = np.zeros(width, np.int64)
    for record in records:
        sums += record.kept.sum(1, dtype=np.int64) @ record.kept.astype(np.int64)
    if not np.array_equal(gram.astype(np.int64).sum(1), sums):  # whole numbers, so equal if nothing was changed
        raise ValueError("gram: it does not fit the features")
    measured, rivals, against = fields.measurements, None, None
    if known.world is not None and "rivals_left" in tensors:
        left, center, norms, reliance = (tensors[f"rivals_{name}"] for name in ("left", "center", "norms", "reliance"))
        line = tensors.get("rivals_line", np.zeros(width, np.float32))
        rivals = Rivals(known.world, left.astype(bool), center, norms, reliance, line)
    if known.against is not None:
        weights, bias = tensors["against_weights"], tensors["against_bias"]
        against = Discriminant(weights, bias, np.arange(len(bias)))
    return Solution(
        Discriminant(tensors["weights"], tensors["bias"], tensors["owners"]),
        Background(tensors["spread"][:-1], tensors["spread"][-1], fields.background, fields.share),
        fields.shrinkage,
        Calibration(
            fields.temperature, fields.certainty, fields.nearness,
            -np.inf if fields.threshold is None else fields.threshold, Weighing(**vars(fields.weighing)), fields.ahead,
        ),
        gram,
        None if measured is None else Measurements(**vars(measured)),
        against,
        rivals,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- on disk


def read(path: Path) -> tuple[Stored, str]:
    """A file's content, and the checksum in it, which identifies it."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise ModelError(str(missing(path, "model", f"make one with vqprompt learn {path} FOLDER"))) from None
    except IsADirectoryError:
        raise _is_folder(path) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return parse(data, path), parse_metadata(data, path)["checksum"]


def _is_folder(path: Path) -> ModelError:
    return ModelError(f"{path}: this is a folder; a model is one file, such as garden.vqp")


def checksum_inside(path: Path) -> str:
    """The checksum that identifies a file. Only the header is read."""
    with open_regular(path) as file:
        length = file.read(8)
        size = os.fstat(file.fileno()).st_size
        header = file.read(min(int.from_bytes(length, "little"), size))
    return parse_metadata(length + header, path)["checksum"]


def write(path: Path, stored: Stored) -> str:
    """Write the whole file or nothing. Returns the checksum that identifies it."""
    data = pack(stored)
    digest = parse_metadata(data, path)["checksum"]
    try:
        write_atomically(path, data)
    except OSError as error:
        reason = (
            str(error) if isinstance(error, UserError) else f"{path}: cannot be written ({error.strerror or error})"
        )
        raise ModelError(f"{reason}; the model is as it was") from None
    return digest


def locked(path: Path) -> AbstractContextManager[None]:
    """Only one process at a time can be inside this block for the same model."""
    if is_url(path):
        raise missing(path, "model")
    if path.name in ("", "..") or path.is_dir():
        raise _is_folder(path)
    busy = f"{path}: another process is teaching this model; wait until it is done"
    return lock_file(path.with_name(f".{path.name}.lock"), busy)

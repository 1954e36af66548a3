"""A model's file: safetensors, with its description as JSON inside (docs/format.md).

What is notable about this implementation:
- One file has everything: the classes, the solved classifier, the history, and other versions, for `undo`. Versions
  share what they have in common: a version is a list of classes, each of them a row in the file's tables.
- A new file is written beside the old one, synced, and renamed over it. So there is always a complete file, old or new,
  for readers and after a kill. A checksum covers the description and every tensor.
- One process at a time can change a model. It locks a file beside the model, and the system releases the lock when the
  process ends, even if it is killed.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as pack_tensors

from vqprompt.core.errors import UserError
from vqprompt.core.files import lock_file, open_regular, read_regular, write_atomically
from vqprompt.product.model.calibration import Solution
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.knowledge import Event, Knowledge
from vqprompt.product.model.parsing import FORMAT, VERSION, checksum, parse, parse_metadata
from vqprompt.product.model.parsing import ModelError as ModelError  # readers and writers raise it
from vqprompt.product.model.records import ClassRecord
from vqprompt.product.model.versions import Stored

BYTES_KEPT = 64 << 20  # of what only other versions have


def pack(stored: Stored) -> bytes:
    records: dict[int, tuple[int, ClassRecord]] = {}  # by identity: unchanged classes are shared between versions
    trainings: dict[int, tuple[int, Trained]] = {}
    versions = []
    for known in (*_within_limits(stored), stored.knowledge):  # the last one is the model
        places = {name: records.setdefault(id(r), (len(records), r))[0] for name, r in known.classes.items()}
        version = {
            "number": known.version, "classes": places, "history": [_event_fields(event) for event in known.history],
            "measured": known.measured, "moved": sorted(known.moved),
        }  # fmt: skip
        if known.parent is not None:
            version["parent"] = known.parent
        if (a := known.against) is not None:
            version["against"] = records.setdefault(id(a), (len(records), a))[0]
        if (t := known.trained) is not None:
            version["trained"] = trainings.setdefault(id(t), (len(trainings), t))[0]
        versions.append(version)
    rows = [record for _, record in records.values()]
    trained = [training for _, training in trainings.values()]
    width, solution = stored.backbone.width, stored.knowledge.solution
    tensors = {
        "ids": np.concatenate([r.ids for r in rows]) if rows else np.zeros(0, np.uint64),
        "totals": np.stack([r.total for r in rows]) if rows else np.zeros((0, width), np.int64),
        "kept": np.concatenate([r.kept for r in rows]) if rows else np.zeros((0, width), np.int16),
        "modes": np.concatenate([r.modes for r in rows]) if rows else np.zeros(0, np.uint8),
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
    if (world := stored.knowledge.world) is not None:
        tensors |= {"world_codes": world.codes, "world_scales": world.scales}
    if trained:
        tensors["unseen"] = np.concatenate([r.unseen for r in rows]).astype(np.uint8)
        tensors |= {f"trained.{i}.{name}": tensor for i, t in enumerate(trained) for name, tensor in t.tensors.items()}
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    description = {
        "backbone": asdict(stored.backbone),
        "records": [{"images": r.count, "kept": len(r.kept)} for r in rows],
        "trained": [{"effort": t.effort, "method": t.method, "options": t.options} for t in trained],
        "versions": versions,
        "latest": stored.latest,
        "solution": None if solution is None else _solution_fields(solution),
    }
    text = json.dumps(description, ensure_ascii=False, allow_nan=False)
    metadata = {"format": FORMAT, "version": str(VERSION), "model": text}
    return pack_tensors(tensors, metadata={**metadata, "checksum": checksum(metadata, tensors)})


def _event_fields(event: Event) -> dict[str, Any]:
    return {key: value for key, value in vars(event).items() if value not in ("", None, {})}


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
    counted, total = {id(part) for part in _parts(stored.knowledge)}, 0
    for known in stored.by_importance():
        own = {id(part): part.nbytes for part in _parts(known) if id(part) not in counted}
        total += sum(own.values())
        if total > BYTES_KEPT:
            break
        counted |= own.keys()
        kept.append(known)
    return sorted(kept, key=lambda known: known.version)


def _parts(known: Knowledge) -> list[ClassRecord | Trained]:
    """What versions can share."""
    return [*known.records.values(), *([] if known.trained is None else [known.trained])]


def read(path: Path) -> tuple[Stored, str]:
    """A file's content, and the checksum in it, which identifies it."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such model; make one with vqprompt learn {path} FOLDER") from None
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
    if path.name in ("", "..") or path.is_dir():
        raise _is_folder(path)
    busy = f"{path}: another process is teaching this model; wait until it is done"
    return lock_file(path.with_name(f".{path.name}.lock"), busy)

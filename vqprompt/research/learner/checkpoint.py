"""Checkpoints: tensors in safetensors, the rest in JSON. After the first save, there is always a complete one on disk.

The tensor file is written first, under a new name. Then `checkpoint.json`, which has its name, size and checksum, is
replaced in one step. A process that is killed in between leaves the previous checkpoint as it was. If the tensors that
the JSON names are deleted, a writer was faster than the reader, and the reader starts again. So it gets the complete
old state or the complete new one. One checksum covers all fields of the JSON.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vqprompt.core.errors import CheckpointError
from vqprompt.core.files import delete_abandoned, lock_file, read_regular, write_atomically, writing
from vqprompt.research.migration import with_earlier_options

FORMAT = "vqprompt-checkpoint"
VERSION = 2
INFO = "checkpoint.json"
CHECKSUM = "checksum"
SAVING = ".saving"  # locked by the process that is writing
ATTEMPTS = 100  # how often a reader tries again when a writer was faster


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / SAVING):
        numbers = (path.stem.removeprefix("state-") for path in folder.glob("state-*.safetensors"))
        last = max((int(number) for number in numbers if number.isdecimal()), default=0)
        target = folder / f"state-{last + 1}.safetensors"
        data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        write_atomically(target, data)
        content = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        fields = {"format": FORMAT, "version": VERSION, "tensors": target.name, **content, **info}
        text = json.dumps({**fields, CHECKSUM: checksum(fields)})  # on one line, which is written five times as fast
        try:
            write_atomically(folder / INFO, text)
        except BaseException:
            target.unlink(missing_ok=True)  # the old checkpoint stays; nothing names the new tensors
            raise
        _delete_all_but(folder, target.name)


def tidy(folder: Path) -> None:
    """Delete what a writer that was killed left behind."""
    with lock_file(folder / SAVING):
        _delete_all_but(folder, _read_info(folder)["tensors"])


def _delete_all_but(folder: Path, current: str) -> None:
    for stale in folder.glob("state-*.safetensors"):
        if stale.name != current:
            stale.unlink(missing_ok=True)
    delete_abandoned(folder)


def checksum(info: dict[str, Any]) -> str:
    """SHA-256 of all fields of a checkpoint. It does not depend on spaces or on the order of the fields."""
    fields = {key: value for key, value in info.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    for attempt in range(ATTEMPTS):
        info = _read_info(folder)
        try:
            return _read_tensors(folder, info), info
        except CheckpointError:
            if _read_info(folder) == info:  # nobody replaced it: it really is damaged
                raise
        time.sleep(0.001 * attempt)
    raise CheckpointError(f"{folder}: another process keeps saving here; try again when it is done")


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / INFO
    try:
        info = json.loads(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {INFO} here; give a folder that `vqprompt run` or Learner.save wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a checkpoint, or damaged ({error}); restore it or start over") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a vqprompt checkpoint; give a folder that `vqprompt run` wrote")
    version = info.get("version")
    if version != VERSION or not isinstance(version, int):
        raise CheckpointError(
            f"{path}: checkpoint version {version}, and this vqprompt reads version {VERSION}; install another vqprompt"
        )
    if info.get(CHECKSUM) != checksum(info):
        raise CheckpointError(f"{path}: damaged (checksum differs); restore the file or start over")
    return {**with_earlier_options(info), "tensors": Path(str(info.get("tensors"))).name}  # never outside of the folder


def _read_tensors(folder: Path, info: dict[str, Any]) -> dict[str, Tensor]:
    state = folder / info["tensors"]
    try:
        data = read_regular(state)  # read once: a writer may delete it afterwards
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "are missing" if missing else f"cannot be read ({error.strerror or error})"
        raise CheckpointError(f"{state}: the checkpoint's tensors {reason}; restore the file or start over") from None
    if hashlib.sha256(data).hexdigest() != info.get("sha256"):
        raise CheckpointError(f"{state}: damaged or half-written (checksum differs); restore the file or start over")
    try:
        # copied into memory that torch aligns: how a matrix product rounds depends on the alignment
        return {name: t.clone() for name, t in load(data).items()}
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{state}: not a safetensors file ({error}); restore the file or start over") from None

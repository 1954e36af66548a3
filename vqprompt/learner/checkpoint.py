"""Checkpoints: tensors in safetensors, the rest in JSON, and never a moment without a whole one on disk.

The tensor file is written first under a new name; `checkpoint.json`, which names it with its size and checksum, is
then replaced in one step. Whoever is killed in between leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vqprompt.errors import CheckpointError
from vqprompt.files import write_atomically

FORMAT = "vqprompt-checkpoint"
VERSION = 1
INFO = "checkpoint.json"


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(p.stem.removeprefix("state-")) for p in folder.glob("state-*.safetensors")]
    target = folder / f"state-{max(numbers, default=0) + 1}.safetensors"
    partial = folder / f".{target.name}.{os.getpid()}.partial"
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    whole = {"format": FORMAT, "version": VERSION, "tensors": target.name, "bytes": target.stat().st_size}
    write_atomically(folder / INFO, json.dumps({**whole, "sha256": _checksum(target), **info}, indent=1))
    for stale in [*folder.glob("state-*.safetensors"), *folder.glob(".state-*.partial")]:
        if stale != target:
            stale.unlink(missing_ok=True)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = folder / INFO
    if not path.exists():
        raise CheckpointError(f"{folder}: no {INFO} here; give a folder that `vqprompt run` or Learner.save wrote")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint, or damaged ({error}); restore it or start over") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a vqprompt checkpoint; give a folder that `vqprompt run` wrote")
    if info.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint version {info.get('version')}, this vqprompt reads {VERSION}; update it"
        )
    state = folder / Path(str(info.get("tensors"))).name
    if not state.exists():
        raise CheckpointError(f"{state}: the checkpoint's tensors are missing; restore the file or start over")
    if state.stat().st_size != info.get("bytes") or _checksum(state) != info.get("sha256"):
        raise CheckpointError(f"{state}: damaged or half-written (checksum differs); restore the file or start over")
    try:
        # memory of their own, aligned as torch does it: products of matrices round by where these lie
        return {name: t.clone() for name, t in load_file(state).items()}, info
    except SafetensorError as error:
        raise CheckpointError(f"{state}: not a safetensors file ({error}); restore the file or start over") from None

"""Load, save and identify a backbone."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import pickle
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vqprompt.backbones.layouts import State, check_fit, dequantize, make_config, name_keys, not_finite, to_timm_names
from vqprompt.backbones.registry import BACKBONES, WEIGHTS_SUFFIXES, WeightsError, locate
from vqprompt.backbones.vit import ViT


def load_backbone(
    name_or_path: str | Path, size: int | None = None, config_overrides: dict[str, Any] | None = None
) -> ViT:
    """A frozen float32 ViT from a BACKBONES name or a checkpoint file, taking square images of `size` px if given.

    `config_overrides` states ViTConfig fields that a file cannot tell (heads, eps, mean, std).
    """
    known = BACKBONES.get(str(name_or_path))
    path = locate(known) if known else Path(name_or_path).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(str(name_or_path), BACKBONES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise WeightsError(f"{name_or_path}: neither a file nor one of the backbones {', '.join(BACKBONES)}{hint}")
    try:
        tensors, stated = read_checkpoint(path)
        state, origin, hints = to_timm_names(tensors, path.stem)
        stated = {**(asdict(known.config) if known else {}), **stated, **(config_overrides or {})}
        if hints.pop("guessed") and not {"mean", "std"} <= set(stated):
            warnings.warn(f"{path}: mean and std are guessed; state them in config_overrides", stacklevel=2)
        config = make_config(state, hints, stated)
        check_fit(state, config, origin)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    with torch.device("meta"):  # initial values would be thrown away
        vit = ViT(config)
    # a copy, because safetensors maps the file into memory and a file can change
    vit.load_state_dict({k: v.to(torch.float32, copy=True).contiguous() for k, v in state.items()}, assign=True)
    vit.eval().requires_grad_(False)
    return vit if size is None else vit.resize(size)


def save_backbone(vit: ViT, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write weights and config as safetensors; a reader meets the old file or the whole new one."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path}: a backbone is saved as .safetensors; choose a name that ends so")
    state = {key: value.detach().to("cpu", dtype).contiguous() for key, value in vit.state_dict().items()}
    if lost := not_finite(state):
        raise WeightsError(f"{path}: not written, as {dtype} {name_keys(lost)} would hold NaN or infinity; try float32")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(state, partial, metadata={"format": "vqprompt", "config": json.dumps(asdict(vit.config))})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def fingerprint(vit: ViT) -> str:
    """16 hex digits that change with the config or with any weight."""
    digest = hashlib.sha256(json.dumps(asdict(vit.config), sort_keys=True).encode())
    for key, value in sorted(vit.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def read_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """The file's tensors under its own names, and the ViTConfig fields it states."""
    if path.suffix not in WEIGHTS_SUFFIXES:
        raise WeightsError(f"unknown kind of file; expected one of {', '.join(WEIGHTS_SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
                stated = dict(json.loads((file.metadata() or {}).get("config", "{}")))
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                tensors, stated = {key: torch.from_numpy(file[key]) for key in file.files}, {}
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # the options in DINO's and iBOT's files
                tensors, stated = torch.load(path, map_location="cpu", weights_only=True), {}
    except pickle.UnpicklingError as error:
        raise WeightsError(
            "refused, because it is damaged or holds more than tensors, and reading the rest could run code; "
            "save its state_dict alone, where it was made"
        ) from error
    except (SafetensorError, zipfile.BadZipFile, RuntimeError, ValueError, TypeError, EOFError, OSError) as error:
        raise WeightsError(f"damaged or incomplete ({error}); fetch it again") from error
    return dequantize(unwrap(tensors)), stated


def unwrap(loaded: Any) -> State:
    """The state dict inside a training checkpoint; of a self-distilled pair, the teacher."""
    inner = loaded
    while isinstance(inner, dict):
        loaded = inner
        held = (loaded.get(name) for name in ("teacher", "state_dict", "model", "student"))
        inner = next((value for value in held if isinstance(value, dict)), None)
    if not isinstance(loaded, dict) or not loaded:
        raise WeightsError(f"holds no state_dict but a {type(loaded).__name__}; save model.state_dict()")
    if others := [str(key) for key, value in loaded.items() if not isinstance(value, Tensor)]:
        raise WeightsError(f"{name_keys(others)} should be tensors; save model.state_dict() alone")
    return {str(key): value.detach() for key, value in loaded.items()}


def backbone_path(backbone: str | Path) -> str:
    """A weights file where it can be found again from anywhere; a name as it is."""
    path = Path(backbone).expanduser()
    return str(path.resolve()) if path.is_file() else str(backbone)

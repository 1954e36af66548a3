"""Load, save and identify a backbone."""

from __future__ import annotations

import difflib
import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vqprompt.core.backbones.layouts import check_fit, make_config, name_keys, not_finite, to_timm_names
from vqprompt.core.backbones.read import read_checkpoint
from vqprompt.core.backbones.registry import BACKBONES, WeightsError, locate
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.files import is_file, save_tensors
from vqprompt.core.progress import Report, ignore


def load_backbone(
    name_or_path: str | Path,
    size: int | None = None,
    config_overrides: dict[str, Any] | None = None,
    progress: Report = ignore,
) -> ViT:
    """A frozen float32 ViT from a BACKBONES name or a weights file, for square images of `size` px if given.

    config_overrides: ViTConfig fields that a file does not say (heads, eps, mean, std). progress: gets the progress of
    a download.
    """
    known = BACKBONES.get(str(name_or_path))
    path = locate(known, progress) if known else Path(name_or_path)
    if not is_file(path):
        near = difflib.get_close_matches(str(name_or_path), BACKBONES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise WeightsError(f"{name_or_path}: neither a file nor one of the backbones {', '.join(BACKBONES)}{hint}")
    path = path.expanduser()
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
    """Write weights and config as safetensors, whole or not at all: a reader gets the old file or the new one."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path}: a backbone is saved as .safetensors; choose a name with this ending")
    state = {key: value.detach().to("cpu", dtype).contiguous() for key, value in vit.state_dict().items()}
    if lost := not_finite(state):
        raise WeightsError(f"{path}: not written, as {dtype} {name_keys(lost)} would hold NaN or infinity; try float32")
    save_tensors(path, state, metadata={"format": "vqprompt", "config": json.dumps(asdict(vit.config))})


def fingerprint(vit: ViT) -> str:
    """16 hex digits that change with the config or with any weight."""
    digest = hashlib.sha256(json.dumps(asdict(vit.config), sort_keys=True).encode())
    for key, value in sorted(vit.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def backbone_path(backbone: str | Path) -> str:
    """The absolute path of a weights file, so that it is found from any folder; a name as it is."""
    return str(Path(backbone).expanduser().resolve()) if is_file(backbone) else str(backbone)

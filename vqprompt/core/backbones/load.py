"""Load, save and identify a backbone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from vqprompt.core.backbones.registry import WeightsError
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.backbones.weights import Weights, read_weights
from vqprompt.core.files import write_atomically
from vqprompt.core.words import shorten


def load_backbone(
    name_or_path: str | Path, size: int | None = None, config_overrides: dict[str, Any] | None = None
) -> ViT:
    """A frozen float32 ViT from a BACKBONES name or a weights file, for square images of `size` px if given.

    config_overrides: ViTConfig fields that a file does not say (heads, eps, mean, std).
    """
    return make_vit(read_weights(name_or_path, config_overrides), size)


def make_vit(weights: Weights, size: int | None = None) -> ViT:
    """A frozen ViT that shares the memory of its weights."""
    with torch.device("meta"):  # initial values would be thrown away
        vit = ViT(weights.config)
    vit.load_state_dict({key: torch.from_numpy(array) for key, array in weights.arrays.items()}, assign=True)
    vit.eval().requires_grad_(False)
    return vit if size is None else vit.resize(size)


def save_backbone(vit: ViT, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write weights and config as safetensors, whole or not at all: a reader gets the old file or the new one."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path}: a backbone is saved as .safetensors; choose a name with this ending")
    state = {key: value.detach().to("cpu", dtype).contiguous() for key, value in vit.state_dict().items()}
    if lost := [key for key, value in state.items() if not value.isfinite().all()]:
        raise WeightsError(f"{path}: not written, as {dtype} {shorten(lost)} would hold NaN or infinity; try float32")
    write_atomically(path, save(state, {"format": "vqprompt", "config": json.dumps(asdict(vit.config))}))


def fingerprint(vit: ViT) -> str:
    """16 hex digits that change with the config or with any weight."""
    state = {key: value.detach().cpu().numpy() for key, value in vit.state_dict().items()}
    return Weights(vit.config, state).fingerprint

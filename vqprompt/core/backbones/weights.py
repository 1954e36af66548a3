"""The weights of a backbone as numpy arrays: read, identify, resize. Nothing here needs PyTorch."""

from __future__ import annotations

import difflib
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.backbones.config import ViTConfig, check_size
from vqprompt.core.backbones.layouts import Array, check_fit, make_config, to_timm_names
from vqprompt.core.backbones.read import read_checkpoint
from vqprompt.core.backbones.registry import BACKBONES, WeightsError, locate
from vqprompt.core.files import is_file
from vqprompt.core.progress import Report, ignore


@dataclass(frozen=True, eq=False)
class Weights:
    """arrays: float32, under timm's names."""

    config: ViTConfig
    arrays: Mapping[str, Array]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the config or with any weight."""
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for key, array in sorted(self.arrays.items()):
            digest.update(f"{key} torch.{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def resized(self, size: int | None) -> Weights:
        """For square images of another size: the learned positions are resampled, as ViT.resize does."""
        config = self.config
        if size is None or size == config.image_size:
            return self
        check_size(size, config.patch)
        old, new = config.image_size // config.patch, size // config.patch
        positions, matrix = self.arrays["pos_embed"], bicubic(old, new)
        grid = positions[0, 1:].reshape(old, old, config.width)
        grid = np.einsum("io,jp,opd->ijd", matrix, matrix, grid, optimize=True).reshape(1, new * new, config.width)
        resampled = np.concatenate([positions[:, :1], grid.astype(np.float32)], axis=1)
        return Weights(replace(config, image_size=size), {**self.arrays, "pos_embed": resampled})


def bicubic(old: int, new: int) -> Array:
    """Weights [new, old] that resample a row of numbers with a cubic filter. Enlarging takes the filter and repeats the
    edges as `interpolate(mode="bicubic")` does; shrinking widens the filter, as it does with `antialias=True`."""
    scale = old / new
    a, support = (-0.5, scale) if scale > 1 else (-0.75, 1.0)
    centers = (np.arange(new) + 0.5) * scale
    places = np.arange(-2 * old, 3 * old)  # beyond the edges, too
    x = np.abs(places + 0.5 - centers[:, None]) / support
    inner, outer = ((a + 2) * x - (a + 3)) * x * x + 1, a * (((x - 5) * x + 8) * x - 4)
    weights = np.where(x < 1, inner, np.where(x < 2, outer, 0.0))
    if scale > 1:
        weights[:, (places < 0) | (places >= old)] = 0
    matrix: Array = np.zeros((new, old))
    np.add.at(matrix.T, places.clip(0, old - 1), weights.T)
    matrix /= matrix.sum(1, keepdims=True)
    return matrix


def read_weights(
    name_or_path: str | Path, config_overrides: dict[str, Any] | None = None, progress: Report = ignore
) -> Weights:
    """The weights of a BACKBONES name or of a file; parameters as in `load_backbone`."""
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
            warnings.warn(f"{path}: mean and std are guessed; state them in config_overrides", stacklevel=3)
        config = make_config(state, hints, stated)
        check_fit(state, config, origin)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    return Weights(config, {key: np.ascontiguousarray(array, np.float32) for key, array in state.items()})


def backbone_path(backbone: str | Path) -> str:
    """The absolute path of a weights file, so that it is found from any folder; a name as it is."""
    return str(Path(backbone).expanduser().resolve()) if is_file(backbone) else str(backbone)

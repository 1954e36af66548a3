"""The weights of a backbone as numpy arrays: read, identify, resize. PyTorch is needed for .pth files only.

A file is read without running any code in it, and without trusting what it claims about its size.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import deserialize, safe_open
from safetensors.numpy import load as parse_tensors

from vqprompt.core.backbones.config import ViTConfig, check_size
from vqprompt.core.backbones.layouts import Array, State, check_fit, dequantize, make_config, to_timm_names
from vqprompt.core.backbones.registry import BACKBONES, EMBEDDED, TIMM, WEIGHTS_SUFFIXES, Backbone, WeightsError, locate
from vqprompt.core.files import is_file
from vqprompt.core.words import did_you_mean, shorten

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """plain: float32, under timm's names. int8: the others as they are in their file, rows of whole numbers, and under
    NAME.scale a scale per row. known_fingerprint: if it need not be computed."""

    config: ViTConfig
    plain: Mapping[str, Array]
    int8: Mapping[str, Array] = field(default_factory=dict)
    known_fingerprint: str = ""

    @cached_property
    def arrays(self) -> Mapping[str, Array]:
        """All of them in float32."""
        return {**self.plain, **dequantize(dict(self.int8))}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the config or with any weight."""
        if self.known_fingerprint:
            return self.known_fingerprint
        stated = {name: value for name, value in asdict(self.config).items() if value}  # plain ones as ever
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
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
        positions, matrix = self.plain["pos_embed"], bicubic(old, new)
        grid = positions[0, 1:].reshape(old, old, config.width)
        grid = np.einsum("io,jp,opd->ijd", matrix, matrix, grid, optimize=True).reshape(1, new * new, config.width)
        resampled = np.concatenate([positions[:, :1], grid.astype(np.float32)], axis=1)
        return replace(self.with_arrays({"pos_embed": resampled}), config=replace(config, image_size=size))

    def with_arrays(self, new: State) -> Weights:
        """With other values of some weights."""
        int8 = {key: array for key, array in self.int8.items() if key.removesuffix(".scale") not in new}
        return Weights(self.config, {**self.plain, **new}, int8)


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


def read_weights(name_or_path: str | Path, config_overrides: dict[str, Any] | None = None) -> Weights:
    """The weights of a BACKBONES name, of a file or of timm:NAME; parameters as in `load_backbone`."""
    known, of_timm = BACKBONES.get(str(name_or_path)), str(name_or_path).startswith(TIMM)
    path = locate(known) if known else Path(name_or_path)
    if not of_timm and not is_file(path):
        hint = did_you_mean(str(name_or_path), BACKBONES)
        raise WeightsError(f"{name_or_path}: neither a file nor one of the backbones; {hint}, and timm:NAME")
    path = path.expanduser()
    if known and path == EMBEDDED and not config_overrides and (embedded := _read_embedded(known)) is not None:
        return embedded
    try:
        tensors, stated = _read_timm(path.name.removeprefix(TIMM)) if of_timm else read_checkpoint(path)
        state, origin, hints = to_timm_names(tensors, path.name)
        stated = {**(asdict(known.config) if known else {}), **stated, **(config_overrides or {})}
        if not set(guessed := hints.pop("guessed")) <= set(stated):
            what = " and ".join(guessed) + (" are" if len(guessed) > 1 else " is")
            warnings.warn(f"{path}: {what} guessed; state the right values in config_overrides", stacklevel=3)
        config = make_config(state, hints, stated)
        check_fit(state, config, origin)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    return Weights(config, {key: np.ascontiguousarray(array, np.float32) for key, array in state.items()})


def _read_embedded(known: Backbone) -> Weights | None:
    """The package's own file, if it is as it was made: then it is known to fit."""
    data = EMBEDDED.read_bytes()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != known.checksum:
        return None
    tensors = parse_tensors(data)
    int8 = {key: array for key, array in tensors.items() if array.dtype == np.int8 or key.endswith(".scale")}
    plain = {key: array.astype(np.float32) for key, array in tensors.items() if key not in int8}
    return Weights(known.config, plain, int8, known.fingerprint)


def backbone_path(backbone: str | Path) -> str:
    """The absolute path of a weights file, so that it is found from any folder; a name as it is."""
    return str(Path(backbone).expanduser().resolve()) if is_file(backbone) else str(backbone)


# ---------------------------------------------------------------------------------------------- read

WRAPPERS = ("teacher", "state_dict", "model", "student")  # of a self-distilled pair, the teacher is taken
MAX_NESTING = 8  # dictionaries inside dictionaries


def read_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """The file's tensors under its own names, and the ViTConfig fields it states."""
    suffix = Path(path.name.removesuffix(".tar")).suffix  # MoCo's files end with .pth.tar, but are no archives
    if suffix not in WEIGHTS_SUFFIXES:
        raise WeightsError(f"unknown kind of file; expected one of {', '.join(WEIGHTS_SUFFIXES)}")
    try:
        if suffix == ".safetensors":
            tensors, stated = _read_safetensors(path)
        elif suffix == ".npz":
            tensors, stated = _read_npz(path), {}
        else:
            tensors, stated = _read_pickle(path), {}
    except pickle.UnpicklingError as error:
        raise WeightsError(
            "refused, because it is damaged or holds more than tensors, and reading the rest could run code; "
            "save its state_dict alone, where it was made"
        ) from error
    except WeightsError:
        raise
    except Exception as error:  # a damaged file can raise anything, a MemoryError included
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        raise WeightsError(f"damaged or incomplete ({reason}); fetch it again") from error
    if not tensors:
        raise WeightsError("holds no weights; save model.state_dict()")
    return dequantize(tensors), stated


def _read_safetensors(path: Path) -> tuple[State, dict[str, Any]]:
    with safe_open(path, framework="np") as file:
        kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 (not a dict)
        tensors = {key: file.get_tensor(key) for key, kind in kinds.items() if kind != "BF16"}
        stated = json.loads((file.metadata() or {}).get("config", "{}"))
    if "BF16" in kinds.values():  # numpy has no such type
        raw = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
        tensors |= {key: _bfloat16(**raw[key]) for key, kind in kinds.items() if kind == "BF16"}
    if not isinstance(stated, dict):
        raise WeightsError(f"the config in its metadata is a {type(stated).__name__}, not a dictionary; save it again")
    return tensors, stated


def _bfloat16(data: bytes, shape: list[int], dtype: str) -> Array:
    """The upper halves of float32 numbers."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def _read_pickle(path: Path) -> State:
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"a {path.suffix} file is read with PyTorch, which is not installed: pip install torch, "
            "or convert it elsewhere with save_backbone to a .safetensors file"
        ) from None
    _check_zip(path)
    with torch.serialization.safe_globals([argparse.Namespace]):  # the options in DINO's and iBOT's files
        loaded = unwrap(torch.load(path, map_location="cpu", weights_only=True))
    return {key: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for key, t in loaded.items()}


def _read_npz(path: Path) -> State:
    """Arrays of google's .npz. Memory that a header claims is only touched by what is there."""
    _check_zip(path)
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _read_timm(name: str) -> tuple[State, dict[str, Any]]:
    """Weights that timm downloads, and what its model says about itself. Our own ViT computes with them."""
    try:
        import timm
    except ImportError:
        raise WeightsError("timm is not installed; pip install timm, or give a file of weights") from None
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # an unknown name, or any error of the transport
        raise WeightsError(f"timm cannot load it ({error}); timm.list_models lists its names") from error
    stated = {key: model.pretrained_cfg[key] for key in ("mean", "std")}
    for module in model.modules():
        kind = type(module).__name__
        if hasattr(module, "num_heads"):
            stated["heads"] = module.num_heads
        if kind.endswith("LayerNorm"):
            stated["eps"] = module.eps
        if "GELU" in kind:
            tanh = "Tanh" in kind or getattr(module, "approximate", "") == "tanh"
            stated["gelu"] = "quick" if "Quick" in kind else "tanh" if tanh else ""
    return {key: value.numpy() for key, value in unwrap(model.state_dict()).items()}, stated


def _check_zip(path: Path) -> None:
    """Refuse a zip (.npz, .pth) that unpacks to much more than its own size. Weights hardly compress."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked, size = sum(info.file_size for info in archive.infolist()), path.stat().st_size
    if unpacked > 10 * size + (64 << 20):
        raise WeightsError(
            f"refused: it unpacks from {size / 1e6:.1f} MB to {unpacked / 1e6:,.0f} MB, which weights do not; "
            "fetch it again from a place that you trust"
        )


def unwrap(loaded: Any) -> dict[str, Tensor]:
    """The state dict inside a training checkpoint; of a self-distilled pair, the teacher."""
    import torch

    inner, depth = loaded, 0
    while isinstance(inner, dict):
        depth += 1
        if depth > MAX_NESTING:
            raise WeightsError(
                f"its dictionaries are nested more than {MAX_NESTING} deep or in a circle; "
                "save model.state_dict() alone"
            )
        loaded = inner
        inner = next((loaded[name] for name in WRAPPERS if isinstance(loaded.get(name), dict)), None)
    if not isinstance(loaded, dict) or not loaded:
        raise WeightsError(f"holds no state_dict but a {type(loaded).__name__}; save model.state_dict()")
    if others := [str(key) for key, value in loaded.items() if not isinstance(value, torch.Tensor)]:
        raise WeightsError(f"{shorten(others)} should be tensors; save model.state_dict() alone")
    for key, value in loaded.items():
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise WeightsError(f"{key} is a {value.layout} tensor on {value.device}; save plain tensors of the CPU")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise WeightsError(
                f"{key} claims the shape {tuple(value.shape)} but holds {value.untyped_storage().nbytes():,} bytes; "
                "save the model again"
            )
    return {str(key): value.detach() for key, value in loaded.items()}

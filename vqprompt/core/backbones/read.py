"""Read a weights file without running any code in it, and without trusting what it claims about its size."""

from __future__ import annotations

import argparse
import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import deserialize, safe_open

from vqprompt.core.backbones.layouts import Array, State, dequantize, name_keys
from vqprompt.core.backbones.registry import WEIGHTS_SUFFIXES, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("teacher", "state_dict", "model", "student")  # of a self-distilled pair, the teacher is taken
MAX_NESTING = 8  # dictionaries inside dictionaries


def read_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """The file's tensors under its own names, and the ViTConfig fields it states."""
    if path.suffix not in WEIGHTS_SUFFIXES:
        raise WeightsError(f"unknown kind of file; expected one of {', '.join(WEIGHTS_SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            tensors, stated = _read_safetensors(path)
        elif path.suffix == ".npz":
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
    """Arrays of google's .npz. The size in every header is compared with what is there before memory is taken."""
    _check_zip(path)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(member)
                if math.prod(shape) * dtype.itemsize + member.tell() != info.file_size:
                    raise WeightsError(f"{info.filename} claims the shape {shape}, which its data does not have")
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


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
    from torch import Tensor

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
    if others := [str(key) for key, value in loaded.items() if not isinstance(value, Tensor)]:
        raise WeightsError(f"{name_keys(others)} should be tensors; save model.state_dict() alone")
    for key, value in loaded.items():
        check_tensor(str(key), value)
    return {str(key): value.detach() for key, value in loaded.items()}


def check_tensor(key: str, value: Tensor) -> None:
    """Refuse a tensor that is not plain, or whose shape claims more numbers than the file holds."""
    import torch

    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        raise WeightsError(f"{key} is a {value.layout} tensor on {value.device}; save plain tensors of the CPU")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise WeightsError(
            f"{key} claims the shape {tuple(value.shape)} but holds {value.untyped_storage().nbytes():,} bytes; "
            "save the model again"
        )

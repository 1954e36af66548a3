"""Converts checkpoints of every common layout to the names of our ViT.

What is notable about this implementation:
- a file is read without running any code in it (weights.py), then renamed key by key to timm's names, as in vit.py
- the shapes say what the model is; a key that is missing, left over or misshapen is an error that names it
- LayerScale is folded into the projections it follows, so the ViT stays plain and loses nothing
- the default backbone is in the package as int8; the others come from the Hugging Face hub or from your own disk
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from vqprompt.core.backbones.config import MAX_DEPTH, ViTConfig, weight_shapes
from vqprompt.core.backbones.registry import PIXELS, WeightsError
from vqprompt.core.errors import explain
from vqprompt.core.words import shorten

Array = np.ndarray[Any, np.dtype[Any]]
State = dict[str, Array]


def dequantize(tensors: State) -> State:
    """Int8 rows times their scales."""
    for key in [key for key, value in tensors.items() if value.dtype == np.int8]:
        scale, rows = tensors.pop(f"{key}.scale", None), tensors[key]
        if scale is None or scale.shape != rows.shape[:1]:
            raise WeightsError(f"int8 {key} needs {key}.scale, one number per row; pack the weights again")
        tensors[key] = np.multiply(rows, by_row(scale, rows.ndim), dtype=np.float32)
    return tensors


def by_row(values: Array, ndim: int) -> Array:
    """One float32 number for each row of an array with `ndim` dimensions."""
    return values.astype(np.float32).reshape(-1, *[1] * (ndim - 1))


_NAMES = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))


def to_timm_names(tensors: State, stem: str) -> tuple[State, dict[str, str], dict[str, Any]]:
    """Tensors under timm's names, the file's own name of each, and the ViTConfig fields that the layout implies."""
    layout = next((n for n, known in _NAMES["layout"].items() if any(known["mark"] in key for key in tensors)), None)
    if layout is None:
        raise WeightsError(
            f"{shorten(tensors)}: not a ViT in the names of timm, DINO, MoCo, CLIP, transformers or google's .npz"
        )
    known, state = _NAMES["layout"][layout], State()
    only = known.get("only", "") if any(known.get("only", "") in key for key in tensors) else ""
    origin: dict[str, str] = {}
    for own, value in tensors.items():
        key = own
        for prefix in _NAMES["prefixes"]:
            key = key.removeprefix(prefix)
        if not key.startswith(only):  # another network, such as CLIP's for texts
            continue
        key = key.removeprefix(only)
        if what := next((what for pattern, what in _NAMES["refused"].items() if re.search(pattern, key)), None):
            raise WeightsError(f"{own} belongs to {what}")
        if re.match(known["ignored"], key):
            continue
        for pattern, new in known["renamed"].items():
            key = re.sub(pattern, new, key)
        if key in state:
            raise WeightsError(f"{own} and {origin[key]} are the same weights twice; save one model alone")
        state[key], origin[key] = value, own
    if integers := [origin[key] for key, value in state.items() if value.dtype.kind != "f"]:
        raise WeightsError(f"{shorten(integers)} should be floating point; save the weights as float32")
    hints = {**normalization(layout, tensors, stem), **known.get("implied", {})}
    if layout == "transformers" and not any(key.endswith(".gamma") for key in state):
        hints["eps"] = 1e-12  # ViTModel's own; Dinov2Model has the usual 1e-6
    if "norm_pre.weight" in state:  # CLIP; which GELU it was trained with is nowhere in the file
        quick = not re.search("laion|datacomp|dfn", stem.lower())
        hints |= {**PIXELS["clip"], "eps": 1e-5, "gelu": "quick" if quick else "", "guessed": ("gelu",)}
    if layout == "google":
        query = state.get("blocks.0.attn.query.weight")
        hints |= {"heads": query.shape[1]} if query is not None and query.ndim == 3 else {}
        state = {key: from_flax(key, value) for key, value in state.items()}
    return fold_layer_scale(join_qkv(completed(state, hints))), origin, hints


def completed(state: State, hints: dict[str, Any]) -> State:
    """With zeros where a layout has no bias, no class token or no learned positions, and with all their dimensions."""
    for mask in [key for key in state if key.endswith(".bias_mask")]:  # DINOv3: keys have no bias
        bias = mask.removesuffix("_mask")
        state[bias] = np.where(state.pop(mask) > 0, state[bias], 0).astype(np.float32)
    for key in [key for key in state if re.search(r"(patch_embed\.proj|attn\.key)\.weight$", key)]:
        if "norm_pre.weight" in state or (hints.get("rope") and "key" in key):
            state.setdefault(key.replace("weight", "bias"), np.zeros(len(state[key]), np.float32))
    if "norm_pre.weight" in state or hints.get("pooled"):  # CLIP and SigLIP
        state |= {key: np.array(state[key], ndmin=3) for key in ("cls_token", "pos_embed") if key in state}
    patches, positions = state.get("patch_embed.proj.weight"), state.get("pos_embed")
    if hints.get("rope") and patches is not None:
        side = hints["image_size"] // patches.shape[-1]
        state["pos_embed"] = np.zeros((1, side**2 + 1, len(patches)), np.float32)
    elif positions is not None and positions.ndim == 3 and ("reg_token" in state or hints.get("pooled")):
        row = int(math.isqrt(positions.shape[1]) ** 2 == positions.shape[1])  # positions of patches alone get one more
        state["pos_embed"] = np.pad(positions, ((0, 0), (row, 0), (0, 0)))
    if hints.get("pooled") and patches is not None:
        state["cls_token"] = np.zeros((1, 1, len(patches)), np.float32)
    return state


def from_flax(key: str, value: Array) -> Array:
    """Flax has inputs first and one axis per head; torch has outputs first and the heads side by side."""
    if key == "patch_embed.proj.weight" and value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    if key.endswith(".weight") and value.ndim > 1:
        shape = (-1, value.shape[-1]) if ".attn.proj." in key else (len(value), -1)
        return value.reshape(shape).T
    return value.ravel() if key.endswith(".bias") else value


def join_qkv(state: State) -> State:
    """Join query, key and value to the one matrix of timm. An incomplete triple stays, to be reported later."""
    for key in [key for key in state if ".attn.query." in key]:
        parts = [key.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in state and state[part].shape == state[key].shape for part in parts):
            state[key.replace(".query.", ".qkv.")] = np.concatenate([state.pop(part) for part in parts])
    return state


def fold_layer_scale(state: State) -> State:
    """x + gamma * (W h + b) is x + (gamma W) h + (gamma b)."""
    gammas = [key for key in state if re.fullmatch(r"blocks\.\d+\.ls[12]\.gamma", key)]
    every = [f"blocks.{i}.ls{n}.gamma" for i in range(depth_of(state)) for n in (1, 2)]
    if gammas and (missing := sorted(set(every) - set(gammas))):
        raise WeightsError(f"LayerScale in some blocks only, missing {shorten(missing)}; fetch it again")
    for key in gammas:
        if state[key].ndim != 1:
            raise WeightsError(f"{key} has the shape {state[key].shape}, not one dimension; fetch it again")
        layer = key.replace("ls1.gamma", "attn.proj").replace("ls2.gamma", "mlp.fc2")
        gamma = state.pop(key)
        for part in {f"{layer}.weight", f"{layer}.bias"} & set(state):  # a missing one is reported with the others
            if gamma.shape != state[part].shape[:1]:
                raise WeightsError(f"{key} {gamma.shape} does not fit {part} {state[part].shape}")
            state[part] = state[part].astype(np.float32) * by_row(gamma, state[part].ndim)
    return state


def normalization(layout: str, keys: Iterable[str], stem: str) -> dict[str, Any]:
    """The mean and std of pixels: known by the file's name or by the names of its keys, else guessed."""
    if re.search("dino|ibot|mae|moco", stem.lower()) or any(
        re.search(r"\.gamma$|lambda1$|^(module\.)?backbone\.|base_encoder\.|decoder_embed\.", k) for k in keys
    ):
        return {**PIXELS["imagenet"], "guessed": ()}
    if layout in ("google", "siglip") or re.search("augreg|in21k", stem.lower()):
        return {**PIXELS["halves"], "guessed": ()}
    classifies = layout == "transformers" or any(key.endswith("head.weight") for key in keys)
    return {**PIXELS["halves" if classifies else "imagenet"], "guessed": ("mean", "std")}


def make_config(state: State, hints: dict[str, Any], stated: dict[str, Any]) -> ViTConfig:
    """A config from the shapes; what the layout implies overrides them, and stated values override both."""
    names = [field.name for field in dataclasses.fields(ViTConfig)]
    if unknown := sorted(str(name) for name in set(stated) - set(names)):
        raise WeightsError(f"{shorten(unknown)}: no such setting; ViTConfig has {', '.join(names)}")
    seen = config_from_shapes(state)
    settings: dict[str, Any] = {**seen, **hints, **stated}
    if "heads" not in settings:
        if seen["width"] % 64:
            raise WeightsError(f"width {seen['width']} is not a multiple of 64; pass config_overrides={{'heads': ...}}")
        settings["heads"] = seen["width"] // 64
    try:
        TypeAdapter(ViTConfig).validate_python(settings)
    except ValidationError as error:
        raise WeightsError(f"{explain(error, 'config')}; state the right values in config_overrides") from None
    return ViTConfig(**settings | {"mean": tuple(settings["mean"]), "std": tuple(settings["std"])})  # JSON has lists


def config_from_shapes(state: State) -> dict[str, Any]:
    for key, ndim in {"patch_embed.proj.weight": 4, "pos_embed": 3, "blocks.0.mlp.fc1.weight": 2}.items():
        if key not in state:
            raise WeightsError(f"missing {key} (timm's name), so it is not a whole ViT; fetch it again")
        if state[key].ndim != ndim:
            raise WeightsError(f"{key} has shape {state[key].shape} instead of {ndim} dimensions; fetch it again")
    if empty := [key for key, value in state.items() if not value.size]:
        raise WeightsError(f"{shorten(empty)}: no numbers in it; fetch it again")
    width, _, _, patch = state["patch_embed.proj.weight"].shape
    rows = state["pos_embed"].shape[1]
    side = math.isqrt(max(rows - 1, 0))
    if side == 0 or side * side + 1 != rows:
        raise WeightsError(
            f"pos_embed has {rows} rows, not a class token and a square of patches; take another variant"
        )
    ratio = state["blocks.0.mlp.fc1.weight"].shape[0] / width
    return {
        "width": width, "depth": depth_of(state), "patch": patch, "image_size": side * patch, "mlp_ratio": ratio,
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "pre_norm": "norm_pre.weight" in state,
    }  # fmt: skip


def depth_of(keys: Iterable[str]) -> int:
    """How many blocks the names count."""
    numbers = {block[1] for key in keys if (block := re.match(r"blocks\.(\d+)\.", key))}
    if absurd := [number for number in numbers if len(number) > 5 or int(number) >= MAX_DEPTH]:
        raise WeightsError(f"block {absurd[0][:20]}: a ViT has at most {MAX_DEPTH} blocks; fetch it again")
    return 1 + max(map(int, numbers), default=-1)


def check_fit(state: State, config: ViTConfig, origin: dict[str, str]) -> None:
    expected = weight_shapes(config)
    given = {key: value.shape for key, value in state.items()}
    wrong = [key for key in expected if key in given and given[key] != expected[key]]
    problems = {
        "missing (timm's names)": [key for key in expected if key not in given],
        "unexpected": [origin.get(key, key) for key in given if key not in expected],
        "wrong shape": [f"{origin.get(key, key)} {given[key]} instead of {expected[key]}" for key in wrong],
        "NaN or infinity": [origin.get(key, key) for key, value in state.items() if not np.isfinite(value).all()],
    }
    if lines := [f"\n  {what}: {shorten(keys)}" for what, keys in problems.items() if keys]:
        raise WeightsError(
            f"does not fit {config}{''.join(lines)}\n"
            "Fetch it again, take a plain ViT's checkpoint, or correct the config with config_overrides"
        )

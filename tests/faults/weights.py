"""Damaged and malicious weights files: a ViT with finite weights of the right shapes, or an error."""

from __future__ import annotations

import functools
import io
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from faults.damage import damaged
from vqprompt.core.backbones.load import load_backbone

WIDTH, DEPTH, HEADS, PATCH, SIZE = 16, 2, 2, 4, 8
HEADS_GIVEN = {"heads": HEADS}


def checkpoint() -> dict[str, torch.Tensor]:
    from vqprompt.core.backbones.vit import ViT, ViTConfig

    torch.manual_seed(0)
    return dict(ViT(ViTConfig(WIDTH, DEPTH, HEADS, PATCH, SIZE)).state_dict())


@functools.cache
def whole_files() -> dict[str, bytes]:
    """One file per kind, by name."""
    state, files = checkpoint(), {}
    files["a.safetensors"] = save(state, {"config": json.dumps(HEADS_GIVEN)})
    for name, legacy in (("a.pth", False), ("b.pt", True)):
        buffer = io.BytesIO()
        torch.save({"teacher": state, "epoch": 3}, buffer, _use_new_zipfile_serialization=not legacy)
        files[name] = buffer.getvalue()
    buffer = io.BytesIO()
    np.savez(buffer, **{key: value.numpy() for key, value in state.items()})
    files["c.npz"] = buffer.getvalue()
    return files


class RunsCode:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _lies(rng: random.Random, trap: Path) -> Any:
    """A well-formed file with content that no ViT has."""
    state: dict[str, Any] = checkpoint()
    key = rng.choice(list(state))
    for _ in range(rng.randint(1, 2)):
        lie = rng.randrange(10)
        if lie == 0:
            state[f"blocks.{rng.choice((3, 999, 10**9, 10**30))}.norm1.weight"] = torch.ones(WIDTH)
        elif lie == 1:
            state[key] = torch.ones(1).expand([rng.choice((1, 10**4, 10**6))] * rng.randint(1, 3))
        elif lie == 2:
            state[key] = torch.zeros([rng.choice((0, 1, 3))] * rng.randint(0, 5))
        elif lie == 3:
            state["model"] = state
        elif lie == 4:
            state[key] = rng.choice((None, "text", 3, [1], {"a": 1}, RunsCode(trap)))
        elif lie == 5:
            state[key] = torch.full((WIDTH,), float("nan"))
        elif lie == 6:
            state.pop(key, None)
        elif lie == 7:
            state[rng.choice(("", "\x1b[2J", "blocks.0.", "a" * 10_000, "blocks.-1.x"))] = torch.ones(2)
        elif lie == 8:
            state[key] = torch.ones(3, dtype=rng.choice((torch.int8, torch.bool, torch.complex64, torch.int64)))
        else:
            state = {rng.choice(("model", "state_dict", "teacher")): state}
            key = next(iter(state))
    return state


def try_weights(rng: random.Random, folder: Path) -> str:
    """One damaged or lying file, loaded as a backbone."""
    trap = folder / "code was run"
    if rng.random() < 0.5:
        name, data = rng.choice(sorted(whole_files().items()))
        path = folder / name
        path.write_bytes(damaged(data, rng))
    else:
        path = folder / "lies.pth"
        torch.save(_lies(rng, trap), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            vit = load_backbone(path, config_overrides=HEADS_GIVEN)
        finally:
            if trap.exists():
                raise RuntimeError("code in a weights file was run")
        if not all(value.isfinite().all() for value in vit.state_dict().values()):
            return "bad: weights that are not finite"
        config = vit.config
        vit(torch.zeros(1, 3, config.image_size, config.image_size))
    return "handled"

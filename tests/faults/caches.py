"""A damaged cache: the same pixels and arrays as without one, whatever lies there."""

from __future__ import annotations

import functools
import io
import os
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from faults.damage import damaged
from vqprompt.core.cache import cache_folder, load_array, save_array
from vqprompt.core.data import content
from vqprompt.core.data.source import Source
from vqprompt.core.data.store import build_store

SIDE = 8


@functools.cache
def pictures() -> dict[str, bytes]:
    rng, found = np.random.default_rng(0), {}
    for label in ("cat", "dog"):
        for i in range(3):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).save(buffer, "PNG")
            found[f"{label}/{i}.png"] = buffer.getvalue()
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _harm(home: Path, rng: random.Random) -> None:
    """Damage one file of the cache, or exchange two."""
    path = rng.choice(_files(home))
    action = rng.choice(("damage", "damage", "damage", "swap", "delete", "empty", "folder", "loop", "device"))
    if action == "damage":
        path.write_bytes(damaged(path.read_bytes(), rng))
    elif action == "swap":
        other = rng.choice(_files(home))
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    elif action == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if action == "folder":
            path.mkdir()
        elif action == "loop":
            path.symlink_to(path.name)
        elif action == "device":
            path.symlink_to("/dev/zero")


def try_cache(rng: random.Random, folder: Path) -> str:
    """Fill a cache, damage it, use it again."""
    home, images = folder / "home", folder / "images"
    os.environ["VQPROMPT_HOME"] = str(home)
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is lost here, and it takes long
    content.TICK = -1.0  # remember hashes at once: their file is to be damaged too
    for name, data in pictures().items():
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).write_bytes(data)
    first = build_store(Source(images), SIDE)
    pixels, aspect = np.array(first.pixels), first.aspect.clone()
    del first
    features = np.random.default_rng(rng.randrange(2**32)).normal(size=(6, 5)).astype(np.float32)
    kept = cache_folder() / "queries" / "features.npy"
    save_array(kept, features)
    other = kept.with_name("others.npy")
    save_array(other, features + 1)
    for _ in range(rng.randint(1, 3)):
        if _files(home):
            _harm(home, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, loaded = build_store(Source(images), SIDE), load_array(kept)
    if not np.array_equal(found.pixels, pixels) or not found.aspect.equal(aspect):
        return "bad: other pixels"
    if loaded is not None and not np.array_equal(loaded, features):
        return "bad: other features"
    shutil.rmtree(home, ignore_errors=True)
    return "handled"

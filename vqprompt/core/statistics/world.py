"""What ordinary things look like: means of a broad set of images, to compare taught classes with.

A model that was taught ten kinds of things has seen nothing else. The world tells it where other things are. Its means
belong to one backbone and one image size; those of the embedded backbone are in the package (assets/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vqprompt.core.cache import cache_folder
from vqprompt.core.files import replacing

Array = NDArray[Any]
EMBEDDED = Path(__file__).parents[2] / "assets" / "world.npz"
PER_MEAN = 20  # images of a mixed collection that make one mean, on average
MOST = 512  # means; more would make files of models grow by more than 1 MB


@dataclass(frozen=True, eq=False)
class World:
    """codes: int8 [2, W, D]: means of images of one kind, and an image of each kind, which its mean does not know.
    scales: float32 [2, W]: what they are multiples of."""

    codes: Array
    scales: Array

    def __len__(self) -> int:
        return self.codes.shape[1]

    @property
    def means(self) -> Array:
        """[W, D]."""
        return self.codes[0] * self.scales[0][:, None]

    @property
    def examples(self) -> Array:
        """[W, D]: images of ordinary things, to see what a model takes them for."""
        return self.codes[1] * self.scales[1][:, None]

    @classmethod
    def of(cls, features: Array, labels: Array) -> World:
        """features: [n, D]. labels: [n], the class of each image. A large class is taken for a mixed collection and
        has several means."""
        kinds: list[Array] = []
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            parts = k_means(x := features[rows], x[:: PER_MEAN if len(rows) >= 2 * PER_MEAN else len(rows)])
            kinds += [rows[parts == part] for part in np.unique(parts)]
        kinds = sorted(kinds, key=len, reverse=True)[:MOST]
        pairs = np.stack([np.stack([features[r[1:] if len(r) > 1 else r].mean(0), features[r[0]]]) for r in kinds], 1)
        scales = np.maximum(np.abs(pairs).max(2), 1e-6) / 127
        return cls(np.rint(pairs / scales[..., None]).astype(np.int8), scales.astype(np.float32))


def k_means(points: Array, centers: Array, rounds: int = 20) -> Array:
    """The cluster of each point [n], starting from these centers. Clusters without points are left out."""
    labels = np.zeros(len(points), int)
    for _ in range(rounds):
        distances = (centers**2).sum(1) - 2 * points @ centers.T
        _, now = np.unique(distances.argmin(1), return_inverse=True)
        if np.array_equal(now, labels):
            break
        labels = now
        centers = np.stack([points[labels == label].mean(0) for label in range(labels.max() + 1)])
    return labels


def save_worlds(path: Path, fingerprint: str, worlds: dict[int, World]) -> None:
    """fingerprint: of the backbone. worlds: by image size in px. Those of other sizes stay in the file."""
    arrays: dict[str, Any] = dict(np.load(path, allow_pickle=False)) if path.is_file() else {}
    for size, world in worlds.items():
        arrays |= {f"codes-{size}": world.codes, f"scales-{size}": world.scales}
    sizes = sorted(int(name.removeprefix("codes-")) for name in arrays if name.startswith("codes-"))
    arrays |= {"fingerprint": np.array(fingerprint), "sizes": np.array(sizes)}
    with replacing(path) as partial, open(partial, "wb") as file:  # every new model with this backbone reads it
        np.savez_compressed(file, **arrays)


def world_file(fingerprint: str) -> Path:
    """Where the world of a backbone is kept that is computed on this machine."""
    return cache_folder() / "worlds" / f"{fingerprint}.npz"


def find_world(fingerprint: str, size: int) -> World | None:
    """The world under a backbone, at the image size that is nearest; None if there is none, or not near."""
    for path in (world_file(fingerprint), EMBEDDED):
        if not path.is_file():
            continue
        with np.load(path, allow_pickle=False) as held:
            nearest = min(held["sizes"].tolist(), key=lambda other: abs(np.log(other / size)))
            if str(held["fingerprint"]) == fingerprint and 0.5 <= nearest / size <= 2:
                return World(held[f"codes-{nearest}"], held[f"scales-{nearest}"])
    return None

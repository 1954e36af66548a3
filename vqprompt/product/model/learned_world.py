"""Computes what ordinary images look like under a backbone, for new models with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.core.statistics.world import World, save_worlds, world_file
from vqprompt.product.model.model import Model
from vqprompt.product.model.sources import open_pictures


def learn_world(model: Model, folder: str | Path) -> tuple[World, Path]:
    """The world under a model's backbone, and where it is kept. folder: one folder per kind of images; a kind with many
    images is taken for a mixed collection. Images that cannot be read are left out."""
    pictures, _ = open_pictures(folder)
    features = {i: row for i, row in enumerate(model.extractor.of(pictures)) if isinstance(row, np.ndarray)}
    if not features:
        raise UserError(f"{folder}: none of the images can be read")
    world = World.of(np.stack([*features.values()]).astype(np.float64), pictures.labels[[*features]])
    fingerprint, size = model.backbone.fingerprint, model.backbone.size
    save_worlds(world_file(fingerprint), fingerprint, {size: world})
    return world, world_file(fingerprint)

"""A method on its backbone, on its device: what learners and predictors are built from."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vqprompt.core.backbones.load import fingerprint, load_backbone
from vqprompt.core.backbones.registry import BACKBONES, PIXELS, TIMM
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.backbones.weights import backbone_path
from vqprompt.core.errors import CheckpointError, UserError, explain
from vqprompt.core.runtime.device import Runtime, derive_seed, seeded
from vqprompt.research.learner.state import SavedState
from vqprompt.research.methods import find_method
from vqprompt.research.methods.base import Method
from vqprompt.research.training.settings import Normalize


@dataclass(frozen=True)
class Built:
    method: Method
    backbone: str  # a name, or the path of a weights file
    weights: str  # fingerprint of the backbone's weights as they are in their file
    fingerprint: str  # the same after resizing to the image size, which rounds differently on different processors


def build_method(
    backbone: str | Path | ViT, name: str, options: dict[str, Any], size: int | None, tasks: int, seed: int,
    runtime: Runtime, normalize: Normalize = "backbone",
) -> Built:  # fmt: skip
    kind = find_method(name)
    try:
        checked = kind.Options(**options)
    except ValidationError as error:
        raise UserError(explain(error, f"the options of {name}")) from None
    if isinstance(backbone, ViT):  # a copy: two learners share nothing
        vit, place = copy.deepcopy(backbone), "custom"
    else:
        vit, place = load_backbone(backbone), backbone_path(backbone)
    weights, own_size = fingerprint(vit), vit.config.image_size
    vit.resize(size or own_size)
    resized = weights if vit.config.image_size == own_size else fingerprint(vit)
    if normalize != "backbone":
        vit.config = replace(vit.config, **PIXELS[normalize])
    vit = runtime.place(vit, kind.tunes_backbone, kind.prompts_stay)
    with seeded(derive_seed(seed, "method")):
        method = kind(vit, checked, tasks).to(runtime.device)
    return Built(method, place, weights, resized)


def rebuild_method(state: SavedState, runtime: Runtime, backbone: str | Path | ViT | None = None) -> Built:
    """The method of a checkpoint, with what it has learned. backbone: where the weights are now, if they have moved."""
    saved, folder = state.record, state.folder
    named = saved.backbone in BACKBONES or saved.backbone.startswith(TIMM)
    if backbone is None and not named and not Path(saved.backbone).is_file():
        raise CheckpointError(
            f"{folder}: learned with the weights {saved.backbone}, which are not there; say where they are: "
            "backbone=… of Learner.load, --backbone of vqprompt predict"
        )
    place, numbers = backbone or saved.backbone, (saved.size, saved.planned_tasks, saved.seed)
    try:
        built = build_method(place, saved.method, saved.options, *numbers, runtime, saved.training.normalize)
        if built.weights != saved.weights:
            raise CheckpointError(
                f"{folder}: learned with other weights of {saved.backbone!r} than these; give the original backbone"
            )
        with seeded(0):  # new rows are drawn, and then replaced by what was saved
            state.fill(built.method)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{folder}: does not fit its method ({error}); restore it or start over") from None
    return built

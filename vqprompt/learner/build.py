"""A method on its backbone, on its device: what learners and predictors are built from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vqprompt.backbones.load import backbone_path, fingerprint, load_backbone
from vqprompt.backbones.vit import ViT
from vqprompt.errors import CheckpointError, UserError, explain
from vqprompt.learner.state import SavedState
from vqprompt.methods import find_method
from vqprompt.methods.base import Method
from vqprompt.runtime import Runtime, derive_seed, seeded


@dataclass(frozen=True)
class Built:
    method: Method
    backbone: str  # a name, or where the weights file is
    fingerprint: str  # of the backbone's weights as they were loaded


def build_method(
    backbone: str | Path | ViT, name: str, options: dict[str, Any], size: int | None, tasks: int, seed: int,
    runtime: Runtime,
) -> Built:  # fmt: skip
    kind = find_method(name)
    try:
        checked = kind.Options(**options)
    except ValidationError as error:
        raise UserError(explain(error, f"the options of {name}")) from None
    if isinstance(backbone, ViT):  # a copy: two learners share nothing
        vit, place = copy.deepcopy(backbone).resize(size or backbone.config.image_size), "custom"
    else:
        vit, place = load_backbone(backbone, size), backbone_path(backbone)
    print_of_weights = fingerprint(vit)
    vit = runtime.place(vit, kind.tunes_backbone, kind.prompts_stay)
    with seeded(derive_seed(seed, "method")):
        method = kind(vit, checked, tasks).to(runtime.device)
    return Built(method, place, print_of_weights)


def rebuild_method(state: SavedState, runtime: Runtime, backbone: str | Path | ViT | None = None) -> Built:
    """The method of a checkpoint, with what it has learned. backbone: where the weights are now, if not where they
    were."""
    info = state.info
    try:
        built = build_method(
            state.find_backbone(backbone), info["method"], info["options"], info["size"], info["planned_tasks"],
            info["seed"], runtime,
        )  # fmt: skip
        state.check_fingerprint(built.fingerprint)
        with seeded(0):  # new rows are drawn, and then replaced by what was saved
            state.fill(built.method)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{state.folder}: it does not fit this method ({error}); restore it or start over") from None
    return built

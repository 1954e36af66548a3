"""Run folders of earlier versions: what their files lack is added when they are read. Other modules know one format.

A setting that is newer than a run gets the value that was fixed when the run was made. Most defaults are these values;
the exceptions are in earlier_options.toml.
"""

from __future__ import annotations

import copy
import tomllib
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, cat, tensor

OLD_CHECKPOINT = 1  # the version without a checksum of its JSON
SAVED_SETTINGS = {"data", "tasks", "method", "seed", "precision", "options"}  # in every config.json that a run wrote
EARLIER_OPTIONS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("earlier_options.toml").read_text(encoding="utf-8")
)


def upgrade_checkpoint(info: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of a checkpoint.json."""
    if info["version"] == OLD_CHECKPOINT:
        warnings.warn(f"{path}: written by an older vqprompt, without a checksum of its settings", stacklevel=5)
        info = {"weights": "", **info}  # of the backbone; only those after resizing were noted
        if isinstance(open_task := info.get("unfinished"), dict):
            info["unfinished"] = {"images_seen": 0, "seconds": 0.0, **open_task}
    return _with_earlier_options(info)


def upgrade_tensors(tensors: dict[str, Tensor], method: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint. LwF's and BiC's teacher was a network and a classifier without corrections; SLDC
    went on with the corrected classifier, and RanPAC did not remember its ridge."""
    old, former = "method.teacher.", "method.former."
    names = {name: name.replace(f"{old}vit.", f"{former}vit.").replace(old, f"{former}head.") for name in tensors}
    renamed = {names[name]: tensor for name, tensor in tensors.items()}
    if names.keys() != renamed.keys() and "method.correction" in renamed:
        renamed[f"{former}correction"] = renamed["method.correction"][:, : len(renamed[f"{former}head.bias"])].clone()
    for owner in ("method.", former) if method == "sldc" else ():
        if f"{owner}head.bias" in renamed and f"{owner}unaligned" not in renamed:
            parts = renamed[f"{owner}head.weight"], renamed[f"{owner}head.bias"][:, None]
            renamed[f"{owner}unaligned"] = cat(parts, dim=1)
    if method == "ranpac":
        renamed.setdefault("method.chosen", tensor(-1))
    return renamed


def upgrade_config(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run's config.json. A file that a person wrote is returned as it is."""
    if not settings.keys() >= SAVED_SETTINGS:
        return settings
    return _with_earlier_options({"train_choice": "first", "batches_per_epoch": 0, **settings})


def _with_earlier_options(fields: dict[str, Any]) -> dict[str, Any]:
    saved = fields.get("options")
    if not isinstance(saved, dict):  # what is not a group of options is refused by validation
        return fields
    options = copy.deepcopy(EARLIER_OPTIONS.get(str(fields.get("method")), {}))
    for name, value in saved.items():
        if (name, value) == ("gradient", "straight-through"):  # for a while VQ-Prompt also had another one
            continue
        both = isinstance(value, dict) and isinstance(options.get(name), dict)
        options[name] = options[name] | value if both else value
    return {**fields, "options": options}

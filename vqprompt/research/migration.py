"""Runs and models that were saved before a setting existed: what they lack is added when they are read.

A setting that is newer than a run gets the value that was fixed when the run was made. Most defaults are these values;
the exceptions are in earlier_options.toml.
"""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

SAVED_SETTINGS = {"data", "tasks", "method", "seed", "precision", "options"}  # in every config.json that a run wrote
EARLIER_OPTIONS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("earlier_options.toml").read_text(encoding="utf-8")
)


def upgrade_config(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run's config.json. A file that a person wrote is returned as it is."""
    if not settings.keys() >= SAVED_SETTINGS:
        return settings
    return with_earlier_options({"train_choice": "first", "batches_per_epoch": 0, **settings})


def with_earlier_options(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, or the fields of its checkpoint."""
    earlier, saved = EARLIER_OPTIONS.get(str(fields.get("method"))), fields.get("options")
    if earlier is None or not isinstance(saved, dict):  # what is not a group of options is refused by validation
        return fields
    options = copy.deepcopy(earlier)
    for name, value in saved.items():
        both = isinstance(value, dict) and isinstance(options.get(name), dict)
        options[name] = options[name] | value if both else value
    return {**fields, "options": options}

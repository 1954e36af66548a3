"""Everything a run is: validated, saved with it. What a user leaves open, the method and the data set decide."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from vqprompt.datasets import DATASETS, parse_data
from vqprompt.errors import UserError, explain
from vqprompt.methods import find_method
from vqprompt.recipes import find_recipe, recipe_settings
from vqprompt.training.settings import Training

MACHINE = ("device", "compile", "deterministic")  # settings that say where a run happens, not what it is
WHERE = (*MACHINE, "precision")  # and with which a run can go on that began with others


class RunConfig(Training, extra="forbid"):
    data: str = Field("quickdraw50", description="a data set: NAME, NAME=PATH, or a folder or zip of images")
    tasks: int | list[int] | list[list[str]] = Field(
        10, description="how many, or the classes of each by count or name"
    )
    method: str = "vq-prompt"
    backbone: str = Field("vit-s14", description="a backbone's name, or a weights file")
    seed: int = Field(1, ge=0, description="0 keeps the natural class order")
    size: int = Field(224, ge=8, description="image size in px, a multiple of the backbone's patch")
    validation: float = Field(0.0, ge=0, lt=1, description="tune on this fraction of the training images, not on test")
    train_per_class: int | None = Field(None, ge=1, description="at most so many training images a class")
    test_per_class: int | None = Field(None, ge=1, description="at most so many test images a class")
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    deterministic: bool = Field(
        True, description="on CUDA, only kernels that repeat themselves; false is a little faster"
    )
    options: dict[str, Any] = Field({}, description="the method's own settings (vqprompt methods NAME)")

    @property
    def training(self) -> Training:
        return Training(**{name: getattr(self, name) for name in Training.model_fields})


def resolve(
    given: dict[str, Any], preset: str | None = None, file: dict[str, Any] | None = None, recipe: bool = False
) -> RunConfig:
    """Fill in what was not given: from the preset, else a file's settings, else the published recipe if asked for, else
    the method's habits, else the data set's, else the common ones.

    Keys are settings of the run, or of the method (dots reach into groups: `rebalancing.lr`).
    """
    file = file or {}
    method_name = str({**file, **given}.get("method", "vq-prompt"))
    if file.get("method", method_name) != method_name:  # another method's options are of no use here
        file = {key: value for key, value in file.items() if key != "options"}
    method = find_method(method_name)
    layers = [given]
    if preset is not None:
        if preset not in method.presets:
            there = f"there are {', '.join(method.presets)}" if method.presets else "it has none"
            raise UserError(f"{method_name} has no preset {preset!r}; {there}")
        layers.append(method.presets[preset])
    entry = DATASETS.get(parse_data(str({**file, **given}.get("data", "quickdraw50")))[0] or "")
    published = published_settings(method_name, {**(entry.defaults if entry else {}), **file, **given}, preset)
    if preset == "released":  # what the data set decides wins over the preset, which knows none
        layers.insert(1, published)
    layers += [file, *([published] if recipe else []), method.training_defaults]
    if entry is not None:
        layers.append(entry.defaults)
        if all(key.split(".")[0] in method.Options.model_fields for key in entry.options):
            layers.append(entry.options)
    run: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for layer in reversed(layers):
        for key, value in layer.items():
            if key == "options":
                if not isinstance(value, dict):
                    raise UserError(f"options={value!r}: expected settings by name, as in --set tau=5")
                for name, inner in value.items():
                    _put(options, name, inner)
            elif key in RunConfig.model_fields:
                run[key] = value
            elif key.split(".")[0] in method.Options.model_fields:
                _put(options, key, value)
            else:
                _unknown(key, method_name, [*RunConfig.model_fields, *method.Options.model_fields])
    try:
        checked = method.Options(**options)
    except ValidationError as error:
        raise UserError(explain(error, f"options of {method_name}")) from None
    try:
        return RunConfig(**run, options=checked.model_dump())
    except ValidationError as error:
        raise UserError(explain(error, "run settings")) from None


def published_settings(method: str, known: dict[str, Any], preset: str | None = None) -> dict[str, Any]:
    """The recipe of a run, from what is known of it: its data, backbone and tasks."""
    data, backbone = (str(known.get(key, RunConfig.model_fields[key].default)) for key in ("data", "backbone"))
    tasks = known.get("tasks", RunConfig.model_fields["tasks"].default)
    count = len(tasks) if isinstance(tasks, list) else tasks
    return recipe_settings(find_recipe(method, parse_data(data)[0], backbone, count, preset == "released"))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by their dotted names, as one writes them on the command line."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A saved run's settings; those that did not exist then as they were then."""
    try:
        options = find_method(str(config.get("method"))).complete_options(config.get("options", {}))
        then = {name: field.get_default() for name, field in Training.model_fields.items()}
        return resolve({**then, **config, "options": options}).model_dump(mode="json")
    except UserError:
        return config  # some do not exist any more: it is another run than any of today's


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    """`a.b=1` into {"a": {"b": 1}}; groups merge, so a later layer may change one of several."""
    head, _, rest = key.partition(".")
    if rest:
        _put(target, head, {rest: value})
    elif isinstance(value, dict):
        if not isinstance(target.get(head), dict):
            target[head] = {}
        for name, inner in value.items():
            _put(target[head], name, inner)
    else:
        target[head] = value


def _unknown(key: str, method: str, known: list[str]) -> None:
    near = difflib.get_close_matches(key.split(".")[0], known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no setting is called {key!r} for {method}; {hint}there are {', '.join(known)}")


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value`, the value as JSON where it is JSON."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r}: expected key=value, as in --set tau=5")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


def read_config_file(path: Path, option: str = "--config") -> dict[str, Any]:
    """Settings from a JSON or TOML file; a run's config.json is one."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{option} {path}: not valid {'TOML' if path.suffix == '.toml' else 'JSON'} ({error})"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{option} {path}: expected an object of settings")
    return found

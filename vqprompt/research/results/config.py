"""The settings of a run: one validated record, saved with the run as config.json.

A user gives some settings. The preset, the config file, the method and the data set fill in others, in this order;
what is still open gets the common default.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vqprompt.core.data.stream import StreamKind
from vqprompt.core.errors import UserError, explain, shown
from vqprompt.core.files import read_json, read_text
from vqprompt.core.words import did_you_mean
from vqprompt.research.datasets import DATASETS, parse_data
from vqprompt.research.methods import find_method
from vqprompt.research.methods.base import Method, StatisticsOptions
from vqprompt.research.methods.recipes import find_recipe, recipe_settings
from vqprompt.research.migration import upgrade_config
from vqprompt.research.training.settings import Training

FILE = "config.json"
DEVICES = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")

# Settings that say on which machine and how a run is computed. Two runs that differ only in these are the same run.
MACHINE_SETTINGS = ("device", "compile", "deterministic")
# A run may be resumed with other values of these. (Precision does change results, so it is not a machine setting.)
RESUMABLE_SETTINGS = (*MACHINE_SETTINGS, "precision")


class RunConfig(Training, extra="forbid"):
    data: str = Field("quickdraw50", description="a data set: NAME, NAME=PATH, or a folder or zip of images")
    tasks: int | list[int] | list[list[str]] = Field(
        10, description="number of tasks, or the classes of each task, by count or by name"
    )
    stream: str = Field("disjoint", description="its kind, such as domains or blurry:50,10 (core/data/stream.py)")
    first_tasks: int | None = Field(
        None, ge=1, description="learn only this many tasks, the first ones of the stream, as for a cheap search"
    )
    method: str = "vq-prompt"
    backbone: str = Field("vit-s14", description="a backbone's name, or a weights file")
    seed: int = Field(1, ge=0, le=2**63 - 1, description="0 keeps the natural class order")
    size: int = Field(224, ge=8, le=2048, description="image size in px, a multiple of the backbone's patch")
    validation: float = Field(
        0.0, ge=0, lt=1, description="fraction of the training images to hold out and test on, instead of the test set"
    )
    train_per_class: int | None = Field(None, ge=1, description="maximum number of training images per class")
    test_per_class: int | None = Field(None, ge=1, description="maximum number of test images per class")
    train_choice: Literal["first", "seed"] = Field(
        "first",
        description="which images train_per_class takes: the first ones (data sets by name, whose order is fixed), or "
        "some drawn by the seed (folders)",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, xpu")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    deterministic: bool = Field(
        True, description="on CUDA, use only kernels that give the same bits every time; false is a little faster"
    )
    options: dict[str, Any] = Field({}, description="the method's own settings (vqprompt methods NAME)")

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not DEVICES.fullmatch(device):
            raise ValueError("expected auto, cpu, cuda, cuda:N, mps or xpu")
        return device

    @model_validator(mode="after")
    def _known_stream(self) -> RunConfig:
        if self.kind.piece and self.epochs > 1:
            raise ValueError(f"epochs={self.epochs}: an online stream shows every image once; leave epochs out")
        tasks = self.tasks if isinstance(self.tasks, int) else len(self.tasks)
        if self.kind.divides and (self.first_tasks or 0) > tasks:
            raise ValueError(f"first_tasks={self.first_tasks}: there are {tasks} tasks; give fewer, or leave it out")
        return self

    @property
    def kind(self) -> StreamKind:
        return StreamKind.parse(self.stream)

    @property
    def training(self) -> Training:
        return Training(**{name: getattr(self, name) for name in Training.model_fields})


def resolve(
    given: dict[str, Any], preset: str | None = None, file: dict[str, Any] | None = None, recipe: bool = False
) -> RunConfig:
    """Fill in what was not given.

    For each setting the first of these that has it wins: what is given, the preset, the file, the published recipe (if
    `recipe`), the method's defaults, the data set's defaults, the common defaults. Keys are settings of the run or of
    the method; dots reach into groups (`rebalancing.lr`).
    """
    file = file or {}
    stated = {**file, **given}
    _refuse_what_cannot_be_shown(stated)
    method_name = str(stated.get("method", "vq-prompt"))
    if file.get("method", method_name) != method_name:  # the file's options are another method's: leave them out
        file = {key: value for key, value in file.items() if key != "options"}
    method = find_method(method_name)
    data = parse_data(str(stated.get("data", "quickdraw50")))[0]
    entry = DATASETS.get(data or "")
    so_far = {"backbone": "vit-s14", "tasks": 10, **(entry.defaults if entry else {}), **stated}
    count = len(so_far["tasks"]) if isinstance(so_far["tasks"], list) else so_far["tasks"]
    released, kind = preset == "released", StreamKind.parse(str(stated.get("stream", "disjoint")))
    published = recipe_settings(find_recipe(method_name, data, str(so_far["backbone"]), count, released))
    layers = [
        given,
        {"epochs": 1} if kind.piece else {},  # one pass, whatever suits the method otherwise
        published if released else {},  # settings for the data set win over the preset, which knows no data set
        _preset(method, method_name, preset),
        file,
        published if recipe else {},
        method.training_defaults,
        entry.defaults if entry else {"train_choice": "seed"},
        {key: value for key, value in entry.options.items() if _applies(key, method)} if entry else {},
    ]
    run: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for layer in reversed(layers):
        for key, value in layer.items():
            if key == "options":
                if not isinstance(value, dict):
                    raise UserError(f"options={shown(value)}: expected settings by name, as in --set tau=5")
                for name, inner in value.items():
                    _put(options, name, inner)
            elif key in RunConfig.model_fields:
                run[key] = value
            elif key.split(".")[0] in method.Options.model_fields:
                _put(options, key, value)
            else:
                known = (*RunConfig.model_fields, *method.Options.model_fields)
                hint = did_you_mean(key.split(".")[0], known)
                raise UserError(f"no setting is called {key!r} for {method_name}; {hint}")
    what = f"options of {method_name}"
    try:
        checked = method.Options(**options)
        what = "run settings"
        return RunConfig(**run, options=checked.model_dump())
    except ValidationError as error:
        raise UserError(explain(error, what)) from None


def _refuse_what_cannot_be_shown(settings: dict[str, Any]) -> None:
    """Python prints no numbers of thousands of digits, and no lists in lists in lists without end."""
    for key, value in settings.items():
        try:
            repr(value)
        except (ValueError, RecursionError):
            raise UserError(f"{key[:200]}: too many digits, or nested too deeply; give a simpler value") from None


def _preset(method: type[Method], method_name: str, preset: str | None) -> dict[str, Any]:
    if preset is None:
        return {}
    if preset not in method.presets:
        available = f"there are {', '.join(method.presets)}" if method.presets else "it has none"
        raise UserError(f"{method_name} has no preset {preset!r}; {available}")
    return method.presets[preset]


def _applies(key: str, method: type[Method]) -> bool:
    """Whether a data set's option applies to a method, which must have it. An option inside a group (`rebalancing.lr`)
    must also be one that the method left at its common default: SLCA and HiDe-Prompt have their own recipe, which a
    data set must not change in part."""
    group, _, inner = key.partition(".")
    if group not in method.Options.model_fields:
        return False
    common = StatisticsOptions.model_fields.get(group)
    return not inner or common is None or method.Options.model_fields[group].default == common.default


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
    """A saved run's settings. Settings that did not exist when it was saved get the values of that time."""
    try:
        saved = upgrade_config(config)
        options = find_method(str(saved.get("method", "vq-prompt"))).Options(**saved.get("options", {}))
        return RunConfig(**{**saved, "options": options.model_dump()}).model_dump(mode="json")
    except (UserError, ValidationError, TypeError):
        return config  # it has settings that no longer exist, so it equals no run of today


def read_saved_config(folder: Path) -> dict[str, Any]:
    """The settings in a run's folder, as they were saved. `completed` adds newer settings."""
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder}: no {FILE} here; give a folder that `vqprompt run` wrote")
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected an object of settings; restore it or do the run again")
    return settings


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    """Put `a.b=1` into {"a": {"b": 1}}. Groups merge, so that a later layer may change one setting of a group."""
    head, _, rest = key.partition(".")
    if rest:
        _put(target, head, {rest: value})
    elif isinstance(value, dict):
        group = target[head] = target[head] if isinstance(target.get(head), dict) else {}
        for name, inner in value.items():
            _put(group, name, inner)
    else:
        target[head] = value


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value`. The value is read as JSON if it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {shown(text)}: expected key=value, as in --set tau=5")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
        raise UserError(f"--set {shown(text)}: the value is too long or too deeply nested") from None


def read_config_file(path: Path, option: str = "--config") -> dict[str, Any]:
    """Settings from a JSON or TOML file. A run's config.json is such a file."""
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = read_text(path)
        settings = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise UserError(f"{option} {path}: not valid {kind} (nested too deeply)") from None
    except ValueError as error:  # bad syntax, bad encoding, or a number of thousands of digits
        raise UserError(f"{option} {path}: not valid {kind} ({str(error)[:200]})") from None
    if not isinstance(settings, dict):
        raise UserError(f"{option} {path}: expected an object of settings")
    return upgrade_config(settings)

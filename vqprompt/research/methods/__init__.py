"""Methods by name: those of this package, and those of packages with an entry point (docs/methods.md shows one)."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.errors import UserError
from vqprompt.core.plugins import Registry
from vqprompt.core.words import did_you_mean
from vqprompt.research.methods.base import OWN, Method, TaskInfo
from vqprompt.research.methods.recipes import FACTS

for _module in iter_modules(__path__):  # importing a method's module makes it known
    import_module(f"{__name__}.{_module.name}")
for _title, _facts in FACTS.items():
    if "variant_of" in _facts:  # making the class makes it known, and gives it its facts
        _other = OWN[_facts["variant_of"]]
        type(_title, (_other,), {"title": _title, "__module__": _other.__module__})
# a method's name is its title in small letters: "vq-prompt", "l2p++", "deep-l2p++"; the order is that of methods.toml
METHODS = Registry("vqprompt.methods", Method, {title.lower().replace(" ", "-"): OWN[title] for title in FACTS})


def after_all_tasks(method: type[Method], config: ViTConfig, tasks: int, **options: Any) -> Method:
    """A method as it is after its last task, to count parameters: it has shapes, but no values and no memory. (Some
    methods add parameters with every task.)"""
    with torch.device("meta"):
        made = method(ViT(config), method.Options(**options), tasks)
        for number in range(tasks):
            made.grow(TaskInfo(number, old_classes=number, new_classes=1))
    return made


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}; {did_you_mean(name, METHODS)}")
    return METHODS[name]

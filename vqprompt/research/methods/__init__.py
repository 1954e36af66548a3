"""Methods by name: those of this package, and those of packages with an entry point (docs/methods.md shows one)."""

from __future__ import annotations

from typing import Any

import torch

from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.errors import UserError
from vqprompt.core.plugins import Registry
from vqprompt.core.words import did_you_mean
from vqprompt.research.methods.base import Method, TaskInfo
from vqprompt.research.methods.bic import BiC
from vqprompt.research.methods.coda import CodaPrompt
from vqprompt.research.methods.dualprompt import DualPrompt
from vqprompt.research.methods.ease import EASE
from vqprompt.research.methods.evoprompt import EvoPrompt
from vqprompt.research.methods.fecam import FeCAM
from vqprompt.research.methods.finetuning import FT, FTPlusPlus, Joint, LinearProbe
from vqprompt.research.methods.hide_prompt import HidePrompt
from vqprompt.research.methods.l2p import L2P, L2PV2, DeepL2P
from vqprompt.research.methods.lwf import LwF
from vqprompt.research.methods.moving_prompts import MovingPrompts
from vqprompt.research.methods.moving_weights import MovingWeights
from vqprompt.research.methods.prototypes import APER, SimpleCIL
from vqprompt.research.methods.ranpac import RanPAC
from vqprompt.research.methods.sd_lora import SDLoRA
from vqprompt.research.methods.slca import SLCA
from vqprompt.research.methods.sldc import SLDC
from vqprompt.research.methods.ssiat import SSIAT
from vqprompt.research.methods.vq_prompt import SoftPrompt, VQPrompt, VQPromptS

OWN: list[type[Method]] = [
    MovingPrompts, MovingWeights, VQPrompt, VQPromptS, SoftPrompt, L2P, DeepL2P, L2PV2, DualPrompt, CodaPrompt,
    HidePrompt, EvoPrompt, LinearProbe, FT, FTPlusPlus, LwF, BiC, SLCA, SimpleCIL, APER, FeCAM, RanPAC, EASE, SSIAT,
    SDLoRA, SLDC, Joint,
]  # fmt: skip
# a method's name is its title in small letters: "vq-prompt", "l2p++", "deep-l2p++"
METHODS = Registry("vqprompt.methods", Method, {method.title.lower().replace(" ", "-"): method for method in OWN})


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

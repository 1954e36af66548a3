"""Methods by name. To add one: write its file, name it here (docs/methods.md walks through it)."""

from __future__ import annotations

import difflib

from vqprompt.errors import UserError
from vqprompt.methods.base import Method
from vqprompt.methods.finetuning import FT, FTPlusPlus, LinearProbe
from vqprompt.methods.vq_prompt import SoftPrompt, VQPrompt, VQPromptS

METHODS: dict[str, type[Method]] = {
    "vq-prompt": VQPrompt,
    "vq-prompt-s": VQPromptS,
    "soft-prompt": SoftPrompt,
    "linear": LinearProbe,
    "ft": FT,
    "ft++": FTPlusPlus,
}


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown method {name!r}; {hint}there are {', '.join(METHODS)}")
    return METHODS[name]

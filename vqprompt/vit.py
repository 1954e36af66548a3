"""The old home of `vqprompt.backbones.vit`. Its names still work here, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from typing import Any

from vqprompt.backbones import vit


def __getattr__(name: str) -> Any:
    value = getattr(vit, name)
    warnings.warn(f"vqprompt.vit.{name} is now vqprompt.backbones.vit.{name}", DeprecationWarning, stacklevel=2)
    return value

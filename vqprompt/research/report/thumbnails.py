"""Small pictures inside a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

from vqprompt.core.data import decode as decoding

SIDE = 112


def thumbnail(opened: Callable[[], Any] | None, where: str = "image", side: int = SIDE) -> str | None:
    """A data: address of a small JPEG; None for what cannot be read."""
    if opened is None:
        return None
    try:
        content = opened()
        image = decoding.decode(content, where) if isinstance(content, bytes) else decoding.open_image(content)
    except (ValueError, OSError):
        return None
    image.thumbnail((side, side))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(packed.getvalue()).decode()

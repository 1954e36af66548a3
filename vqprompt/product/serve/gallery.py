"""Thumbnails of what was taught, so that people can look at mistakes. Only in memory, and only the newest.

A model keeps no image. A gallery belongs to a server, and is lost when the server ends.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from vqprompt.core.data import decode as decoding
from vqprompt.core.errors import UserError
from vqprompt.product.model.pictures import content_id

SIDE = 96
PER_TEACHING = 500


class Gallery:
    """most: how many thumbnails are kept; the oldest are dropped first."""

    def __init__(self, most: int) -> None:
        self.most, self._lock = most, threading.Lock()
        self._held: OrderedDict[tuple[str, int], tuple[str, bytes]] = OrderedDict()

    def add(self, model: str, name: int, label: str, picture: bytes) -> None:
        with self._lock:
            self._held[model, name] = (label, picture)
            while len(self._held) > self.most:
                self._held.popitem(last=False)

    def get(self, model: str, name: int) -> bytes | None:
        with self._lock:
            found = self._held.get((model, name))
        return None if found is None else found[1]

    def forget(self, model: str, label: str) -> None:
        """Drop the thumbnails of a class that is forgotten."""
        with self._lock:
            for key in [k for k, held in self._held.items() if k[0] == model and held[0] == label]:
                del self._held[key]

    def rename(self, model: str, old: str, new: str) -> None:
        with self._lock:
            for key, (label, picture) in self._held.items():
                if key[0] == model and label == old:
                    self._held[key] = (new, picture)


def thumbnails(images: Sequence[Path], labels: Sequence[str]) -> Iterator[tuple[int, str, bytes]]:
    """Of image files: the name of the content, the class, and a small JPEG. What cannot be read is left out."""
    for path, label in list(zip(images, labels, strict=True))[:PER_TEACHING]:
        try:
            content = path.read_bytes()
            yield content_id(content), label, small_jpeg(decoding.decode(content, path.name, SIDE))
        except (UserError, OSError):
            continue


def small_jpeg(image: Image.Image) -> bytes:
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=80)
    return packed.getvalue()

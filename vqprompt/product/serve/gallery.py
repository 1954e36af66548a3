"""Thumbnails of what was taught, so that people can look at mistakes. Only in memory, and only the newest.

A model keeps no image. A gallery belongs to a server, and is lost when the server ends.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
from PIL import Image

from vqprompt.core.data import decode as decoding
from vqprompt.core.errors import UserError
from vqprompt.product.model.pictures import content_id

SIDE = 96
PER_TEACHING = 500
Thumbnail = tuple[int, bytes]  # the name of the image by its content, and a small JPEG


class Gallery:
    """most: how many thumbnails are kept; the oldest are dropped first."""

    def __init__(self, most: int) -> None:
        self.most, self._lock = most, threading.Lock()
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def add(self, model: str, thumbnails: Iterable[Thumbnail]) -> None:
        with self._lock:
            for name, picture in thumbnails:
                self._held[model, name] = picture
            while len(self._held) > self.most:
                self._held.popitem(last=False)

    def get(self, model: str, name: int) -> bytes | None:
        with self._lock:
            return self._held.get((model, name))

    def keep_only(self, model: str, images: np.ndarray) -> None:
        """Drop the thumbnails of images that a model no longer knows. images: those it knows, uint64 [n]."""
        with self._lock:
            mine = [key for key in self._held if key[0] == model]
            known = np.isin(np.array([name for _, name in mine], np.uint64), images)
            for key, stays in zip(mine, known, strict=True):
                if not stays:
                    del self._held[key]


def thumbnails(images: Iterable[tuple[str, Callable[[], bytes]]]) -> Iterator[Thumbnail]:
    """Of image files: what each is called, and a function that reads it. What cannot be read is left out."""
    for name, read in islice(images, PER_TEACHING):
        try:
            content = read()
            yield content_id(content), small_jpeg(decoding.decode(content, name, SIDE))
        except (UserError, OSError):
            continue


def small_jpeg(image: Image.Image) -> bytes:
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=80)
    return packed.getvalue()

"""What computes the features of images, whatever it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from vqprompt.product.model.pictures import Picture


class Extractor(Protocol):
    """Features of images under one network, size and crop. Never changes; many threads may use it.

    fingerprint: of the network's weights. size: of images, in px. width: of a feature.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def width(self) -> int: ...

    def of(self, pictures: Iterable[Picture]) -> Iterator[np.ndarray | Exception]:
        """Features [D] of each image in order, or the exception that reading it raised."""

    def of_one(self, picture: Picture) -> np.ndarray | Exception:
        """As `of`, for one image, as fast as possible."""

    def seconds_per_image(self) -> float:
        """About how long an image takes."""


Opener = Callable[[str, int | None, float, str], Extractor]
"""Opens an extractor: backbone (a name or the path of a weights file), size (None: its own), crop, device."""


def measure_seconds(extractor: Extractor, side: int, at_once: int) -> float:
    """About how long an image takes, measured on blank ones of this side in px. at_once: images that are computed at
    the same time. The first try only warms up; of the others the fastest counts, as it was disturbed least."""
    blank = Picture("blank", "", decoded=lambda: (np.zeros((3, side, side), np.uint8), 1.0), open=bytes)
    seconds = []
    for _ in range(4):
        started = time.monotonic()
        count = len(list(extractor.of([blank] * 4 * at_once)))
        seconds.append((time.monotonic() - started) / count)
        if len(seconds) > 1 and sum(seconds) * count > 1:
            break
    return 1.1 * min(seconds[1:])  # a tenth more, for opening the file

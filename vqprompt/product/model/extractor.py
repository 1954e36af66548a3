"""What computes the features of images, whatever it runs on."""

from __future__ import annotations

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

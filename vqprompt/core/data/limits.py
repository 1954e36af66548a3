"""How large an image or archive may be before it is refused, and the environment variable that raises each limit.

The defaults are far above what photographs and data sets need. They stop files that are small on disk and enormous
once decoded ("bombs") before anything large is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vqprompt.core.errors import ImageError, number_from_environment


@dataclass(frozen=True)
class Limit:
    """One limit: its default, the variable that overrides it, and what it counts in."""

    variable: str
    default: float
    unit: str

    @property
    def value(self) -> float:
        return number_from_environment(self.variable, self.default)

    def check(self, name: str, what: str, given: float, factor: float = 1.0, so_far: bool = False) -> None:
        """Refuse what is above the limit; the error names the file, the limit and the setting that raises it.

        given: in the limit's unit. factor: raises the limit for this file. so_far: more would follow.
        """
        if given > self.value * factor:
            higher = math.ceil(given / factor * (2 if so_far else 1))
            raise ImageError(
                f"{name}: {what} is more than the {self.value * factor:g} {self.unit} accepted (a decompression "
                f"bomb?); if you trust it, set {self.variable}={higher}; else shrink it or take it out"
            )


MEGAPIXELS = Limit("VQPROMPT_MAX_MEGAPIXELS", 100, "megapixels")
SIDE = Limit("VQPROMPT_MAX_SIDE", 65_535, "pixels per side")  # as many as a JPEG can have
FILE_MB = Limit("VQPROMPT_MAX_FILE_MB", 512, "MB per file")
UNPACKED_GB = Limit("VQPROMPT_MAX_UNPACKED_GB", 200, "GB per archive")
RATIO = Limit("VQPROMPT_MAX_RATIO", 250, "times its packed size")
ENTRIES = Limit("VQPROMPT_MAX_ENTRIES", 3_000_000, "files")
CACHE_GB = Limit("VQPROMPT_CACHE_GB", math.inf, "GB of decoded images")  # beyond it, images are decoded when needed

RATIO_FROM = 64 << 20  # bytes: below this even an absurd compression ratio does no harm
JPEG_FACTOR = 2.5  # a JPEG may have this many times more pixels, because it shrinks while it is decoded


def check_file_size(name: str, size: int) -> None:
    """Refuse a file too large to be read into memory."""
    FILE_MB.check(name, f"its size of {size / 1e6:,.0f} MB", size / 1e6)


def check_ratio(name: str, unpacked: int, packed: int) -> None:
    """Refuse what grows too much when it is unpacked."""
    if unpacked > RATIO_FROM:
        what = f"{unpacked / 1e6:,.0f} MB unpacked from {packed / 1e6:,.1f} MB"
        RATIO.check(name, what, unpacked / max(packed, 1))


def check_pixels(name: str, width: int, height: int, factor: float) -> None:
    """Refuse an image with too many pixels, or a very long one: it may have few pixels, but resizing takes memory for
    each of them. `factor` raises the limit on pixels for formats that shrink while decoding."""
    SIDE.check(name, f"{width}×{height} pixels", max(width, height))
    MEGAPIXELS.check(name, f"{width}×{height} pixels", width * height / 1e6, factor)

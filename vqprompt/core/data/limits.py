"""How large an image or archive may be before it is refused, and the environment variable that raises each limit.

The defaults are far above what photographs and data sets need. They stop files that are small on disk and enormous
once decoded ("bombs") before anything large is allocated.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from vqprompt.core.errors import ImageError, UserError


@dataclass(frozen=True)
class Limit:
    """One limit: its default, the variable that overrides it, and what it counts in."""

    variable: str
    default: float
    unit: str

    @property
    def value(self) -> float:
        """The default, or what the environment says."""
        text = os.environ.get(self.variable, "").strip()
        if not text:
            return self.default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value > 0:
            raise UserError(f"{self.variable}={text!r}: give a number above 0, such as {self.example:g}")
        return value

    @property
    def example(self) -> float:
        return self.default if math.isfinite(self.default) else 50

    def refuse(self, name: str, what: str, given: float | None = None) -> ImageError:
        """An error that names the file, the limit and the setting that raises it."""
        higher = math.ceil(given) if given is not None and math.isfinite(given) else math.ceil(2 * self.value)
        return ImageError(
            f"{name}: {what} is more than the {self.value:g} {self.unit} accepted (a decompression bomb?); "
            f"if you trust it, set {self.variable}={higher}; else shrink it or take it out"
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
    if size > FILE_MB.value * 1e6:
        raise FILE_MB.refuse(name, f"its size of {size / 1e6:,.0f} MB", size / 1e6)


def check_ratio(name: str, unpacked: int, packed: int) -> None:
    """Refuse what grows too much when it is unpacked."""
    if unpacked > RATIO_FROM and unpacked > RATIO.value * max(packed, 1):
        ratio = unpacked / max(packed, 1)
        raise RATIO.refuse(name, f"{unpacked / 1e6:,.0f} MB unpacked from {packed / 1e6:,.1f} MB", ratio)


def check_sides(name: str, width: int, height: int) -> None:
    """Refuse an image that is very long. It may have few pixels, but resizing takes memory for each of them."""
    if max(width, height) > SIDE.value:
        raise SIDE.refuse(name, f"{width}×{height} pixels", max(width, height))


def check_pixels(name: str, width: int, height: int, factor: float = 1.0) -> None:
    """Refuse an image with too many pixels; `factor` raises the limit for formats that shrink while decoding."""
    check_sides(name, width, height)
    if width * height > MEGAPIXELS.value * 1e6 * factor:
        limit = Limit(MEGAPIXELS.variable, MEGAPIXELS.value * factor, MEGAPIXELS.unit)
        raise limit.refuse(name, f"{width}×{height} pixels", width * height / 1e6 / factor)

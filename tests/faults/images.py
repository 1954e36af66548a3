"""Damaged image files: pixels of the right shape, or an error that names the file."""

from __future__ import annotations

import functools
import io
import math
import random
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, features

from faults.damage import damaged
from vqprompt.core.data.decode import load_pixels
from vqprompt.core.errors import ImageError

SIDE = 16
MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "GIF": ("P", "L"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "RGBA", "L", "I;16", "F", "CMYK"),
    "PPM": ("RGB", "L", "1"),
}
FOREIGN = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n",
    b"%PDF-1.7\n",
    b"\0\0\0\x18ftypheic" + bytes(40),
    b"PK\x03\x04" + bytes(40),
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"",
)


@functools.cache
def whole_images() -> list[tuple[str, bytes]]:
    """One file per format, mode and variant."""
    pixels = np.random.default_rng(0).integers(0, 256, (75, 90, 3), np.uint8)
    found = []
    formats = {**MODES, **({"AVIF": ("RGB",)} if features.check("avif") else {})}
    for kind, modes in formats.items():
        for mode in modes:
            image = Image.fromarray(pixels)
            if mode == "I;16":
                image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
            else:
                image = image.convert(mode)
            for options in VARIANTS.get(kind, ({},)):
                buffer = io.BytesIO()
                image.save(buffer, kind, **options)
                found.append((f"{kind.lower()}-{mode}", buffer.getvalue()))
    return found


def _exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "some text that is stored outside its entry"
    return exif.tobytes()


VARIANTS: dict[str, tuple[dict, ...]] = {
    "JPEG": ({}, {"progressive": True}, {"exif": _exif()}),
    "PNG": ({}, {"exif": _exif()}),
    "TIFF": ({}, {"compression": "tiff_lzw"}),
}


def try_image(rng: random.Random, folder: Path) -> str:
    """One damaged file, opened as `predict` would."""
    name, data = rng.choice(whole_images())
    if rng.random() < 0.03:
        data = rng.choice(FOREIGN)
    elif rng.random() < 0.05:
        data = rng.randbytes(rng.randrange(400))
    data = damaged(data, rng)
    path = folder / f"{name}.jpg"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about metadata
        try:
            pixels, aspect = load_pixels(path, SIDE)
        except ImageError as error:
            return "handled" if str(error).startswith(f"{path}: ") else f"bad: does not name the file: {error}"
    if pixels.shape != (3, SIDE, SIDE) or pixels.dtype != np.uint8:
        return f"bad: {pixels.dtype} {pixels.shape}"
    return "handled" if math.isfinite(aspect) and aspect > 0 else f"bad: aspect {aspect}"

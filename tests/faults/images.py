"""Damaged image files: pixels of the right shape, or an error that names the file."""

from __future__ import annotations

import functools
import io
import math
import random
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, features

from faults.damage import damaged
from vqprompt.core.data.decode import decode_pixels
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


def black_png(width: int, height: int, bits: int = 8, filled: bool = True) -> bytes:
    """A grey PNG that compresses to almost nothing. filled: with its pixels, not only the header."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    size = (1 + width * bits // 8) * height if filled else 0
    packer, parts = zlib.compressobj(1), [min(1 << 20, size - start) for start in range(0, size, 1 << 20)]
    body = b"".join([packer.compress(bytes(part)) for part in parts]) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


SIDES = (1, 2, 3, 255, 4096, 8193, 65_535, 65_536, 99_999, 1_000_000, 50_000_000, 99_999_999, 2**31 - 1)


def try_thin_image(rng: random.Random, folder: Path) -> str:
    """Thin and huge pictures, small on disk, several at once: pixels or an error, in little memory."""
    long, other = rng.choice(SIDES), rng.choice(SIDES)
    width, height = (long, min(other, max(1, 10_000_000 // long)) if rng.random() < 0.8 else other)
    if rng.random() < 0.5:
        width, height = height, width
    data = black_png(width, height, rng.choice((8, 16)), filled=width * height <= 10_000_000)
    if rng.random() < 0.2:
        data = damaged(data, rng, 1)
    path = folder / "thin.png"
    path.write_bytes(data)
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: _load(path), range(4)))
    return next((outcome for outcome in outcomes if outcome != "handled"), "handled")


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
    return _load(path)


def _load(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about metadata
        try:
            pixels, aspect = decode_pixels(path, "x", SIDE)
        except ImageError as error:
            return "handled" if str(error).startswith(f"{path}: ") else f"bad: does not name the file: {error}"
    if pixels.shape != (3, SIDE, SIDE) or pixels.dtype != np.uint8:
        return f"bad: {pixels.dtype} {pixels.shape}"
    return "handled" if math.isfinite(aspect) and aspect > 0 else f"bad: aspect {aspect}"

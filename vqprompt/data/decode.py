"""One image: from a file, a Pillow image or an array to 8-bit RGB pixels."""

from __future__ import annotations

import io
import struct
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vqprompt.errors import ImageError, UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jfif"}
MAX_PIXELS = 100_000_000  # beyond this an image is more likely a decompression bomb than a photograph


def decode(data: bytes, name: str) -> Image.Image:
    """Any common image file to an RGB image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit, below, is stricter
            image = Image.open(io.BytesIO(data))
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ImageError(
                f"{name}: {width}×{height} pixels is more than the {MAX_PIXELS // 10**6} megapixels accepted "
                "(a decompression bomb?); shrink it or take it out"
            )
        return to_rgb(image)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: {error}; shrink it or take it out") from None
    except Exception as error:  # decoders stumble over damaged files in every way there is
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else f"damaged image ({error})"
        raise ImageError(f"{name}: {reason}; replace the file or take it out") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright, 8 bits, three channels; transparency becomes white paper."""
    with suppress(struct.error, SyntaxError, ValueError, TypeError, KeyError):  # damaged EXIF: then it stays as it lies
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # 16- and 32-bit grey: Pillow would clip, not scale
        values = np.asarray(image, dtype=np.float64)
        top = 65535 if image.mode != "F" else max(1.0, float(values.max()))
        return Image.fromarray((values / top * 255).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image).convert("RGB")
    return image.convert("RGB")


def to_pixels(image: Image.Image, side: int) -> np.ndarray:
    """RGB image to uint8 [3, side, side], squashed."""
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def open_image(image: str | Path | Image.Image | np.ndarray) -> Image.Image:
    if isinstance(image, str | Path):
        path = Path(image).expanduser()
        if not path.is_file():
            raise UserError(f"{image}: no such image file")
        return decode(path.read_bytes(), str(image))
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
            raise UserError(
                f"image arrays must be uint8 [H, W], [H, W, 3] or [H, W, 4], not {image.dtype} {list(image.shape)}"
            )
        image = Image.fromarray(image)
    return to_rgb(image)

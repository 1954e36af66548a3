"""One image: from a file, a Pillow image or an array to 8-bit RGB pixels.

- Only formats on a list are decoded. Pillow knows many more, and some of them start other programs (PostScript).
- A large image shrinks while it is opened, so that 100 megapixels need little more memory than a thumbnail. Images
  with a short side below four times the stored side are not touched by this: their pixels are exactly Pillow's. Only
  if the other side is very long, that one shrinks alone.
- Threads decode as many images at a time as have 100 megapixels together.
- What is too large is refused by its header, before pixels are allocated (see limits.py).
"""

from __future__ import annotations

import io
import math
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vqprompt.core.data.limits import JPEG_FACTOR, check_file_size, check_pixels
from vqprompt.core.errors import ImageError, UserError, missing
from vqprompt.core.files import open_regular

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
    | {".heic", ".heif", ".avif"}
)
COMMON = ("JPEG", "PNG")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
LARGE = 8_000_000  # pixels from which an image is worked on in strips
LONG = 8192  # px of a side from which it shrinks alone, if the other one is short
AT_A_TIME = 100_000_000  # pixels that all threads together decode at a time
STRIP = 2_000_000  # pixels per strip
STORED_MARGIN = 8 / 7  # stored images are larger than those for the ViT by this factor, to leave room for crops

ImageLike = str | Path | bytes | Image.Image | np.ndarray  # a path, the content of a file, or what is in memory


_in_work, _changed = 0, threading.Condition()  # pixels that all threads decode now


@contextmanager
def _in_turn(pixels: int) -> Iterator[None]:
    """Lets threads work at the same time on images of `AT_A_TIME` pixels together, or on a single larger one."""
    global _in_work
    with _changed:
        _changed.wait_for(lambda: not _in_work or _in_work + pixels <= AT_A_TIME)
        _in_work += pixels
    try:
        yield
    finally:
        with _changed:
            _in_work -= pixels
            _changed.notify_all()


@cache
def accepted_formats() -> tuple[str, ...]:
    """Names of the formats that are decoded on this machine."""
    Image.init()
    with suppress(Exception):  # not installed, or without its library
        import pi_heif

        pi_heif.register_heif_opener()
    return tuple(name for name in (*FORMATS, "AVIF", "HEIF") if name in Image.OPEN)


def decode(image: ImageLike, name: str = "an image", side: int | None = None) -> Image.Image:
    """An upright RGB image. name: for messages; a path is its own.

    side: the image will be squashed to a square of this side. Then it may come back smaller than it is in the file,
    but never with a side below twice this.
    """
    return _decoded(image, name, side)[0]


def stored_side(size: int, margin: float = STORED_MARGIN) -> int:
    """The side in px of the stored squares for a ViT that takes images of `size` px."""
    return round(size * margin)


def decode_pixels(image: ImageLike, name: str, side: int) -> tuple[np.ndarray, float]:
    """uint8 pixels [3, side, side], squashed, and the true width / height."""
    rgb, aspect = _decoded(image, name, side)
    return to_pixels(rgb, side), aspect


def _decoded(image: ImageLike, name: str, side: int | None) -> tuple[Image.Image, float]:
    if isinstance(image, str | Path):
        image, name = read_image(image), str(image)
    if not isinstance(image, bytes):
        rgb = _from_memory(image)
        return rgb, rgb.width / rgb.height
    with _refusing(image, name):
        return _shrunk(_identify(image), name, side)


def aspect_of(data: bytes, name: str) -> float:
    """The true width / height of an image file, from its header: as `decode_pixels` gives it, without decoding."""
    with _refusing(data, name):
        image = _identify(data)
        _check_size(image, name, squashed=True)
        width, height = image.size
        return height / width if _orientation(image) >= 5 else width / height


@contextmanager
def _refusing(data: bytes, name: str) -> Iterator[None]:
    """Turn every error of a decoder into an `ImageError` that names the file."""
    try:
        yield
    except ImageError:
        raise
    except MemoryError:
        raise ImageError(f"{name}: there is not enough memory to decode it; shrink it or take it out") from None
    except Exception as error:  # decoders fail on damaged files in every possible way
        raise ImageError(f"{name}: {_reason(data, error)}; replace the file or take it out") from None


def _orientation(image: Image.Image) -> int:
    """EXIF's: 1 is upright, from 5 on it lies on its side."""
    with suppress(Exception):  # damaged EXIF: the image stays as it is
        orientation = image.getexif().get(0x0112)
        return orientation if isinstance(orientation, int) and orientation in range(2, 9) else 1
    return 1


def _identify(data: bytes) -> Image.Image:
    """An image by its header, in one of the accepted formats.

    `Image.open(..., formats=...)` without Pillow's own limit on pixels, which is one for all formats and global to the
    process; ours follows as soon as the size is known. All of Pillow's formats are slow to import, so they are not for
    a JPEG or PNG.
    """
    Image.preinit()
    for name in COMMON if data.startswith((b"\xff\xd8\xff", b"\x89PNG")) else accepted_formats():
        factory, accepts = Image.OPEN[name]
        with suppress(SyntaxError, IndexError, TypeError, KeyError, EOFError, struct.error):
            answer = True if accepts is None else accepts(data[:16])
            if answer and not isinstance(answer, str):  # a text says what Pillow lacks for this format
                return factory(io.BytesIO(data), "")
    raise UnidentifiedImageError("no accepted format")


def _reason(data: bytes, error: Exception) -> str:
    if not isinstance(error, UnidentifiedImageError):
        return f"damaged image ({error})"
    brand = data[8:12] if data[4:8] == b"ftyp" else b""
    if brand in (b"avif", b"avis") and "AVIF" not in accepted_formats():
        return "an AVIF image, which this Pillow cannot decode (pip install --upgrade pillow)"
    if brand and brand not in (b"avif", b"avis") and "HEIF" not in accepted_formats():
        return "a HEIC/HEIF image, which takes a plug-in (pip install 'vqprompt[heif]')"
    for kind in Image.OPEN.keys() - set(accepted_formats()):
        with suppress(Exception):
            accepts = Image.OPEN[kind][1]
            if accepts is not None and accepts(data[:16]):  # by the first bytes; nothing is decoded
                read = "JPEG, PNG, WebP, GIF, BMP, TIFF and PPM"
                return f"an image of the kind {kind}, which is not read here ({read} are)"
    return "not an image"


def _check_size(image: Image.Image, name: str, squashed: bool) -> bool:
    """Refuse what is too large, or has no pixels. Returns whether it is a JPEG that will shrink while it is opened."""
    width, height = image.size
    jpeg = image.format in ("JPEG", "MPO") and squashed  # MPO: a JPEG with a second picture in it
    if min(width, height) < 1:
        raise ImageError(f"{name}: it has no pixels ({width}×{height}); replace the file or take it out")
    factor = JPEG_FACTOR / 2 if _is_progressive(image) else JPEG_FACTOR
    check_pixels(name, width, height, factor if jpeg else 1.0)
    return jpeg


def _shrunk(image: Image.Image, name: str, side: int | None) -> tuple[Image.Image, float]:
    """An opened image as RGB and its true aspect ratio; it shrinks while its pixels are read where `side` allows."""
    jpeg = _check_size(image, name, squashed=side is not None)
    width, height = image.size
    if jpeg and side is not None and min(width, height) >= 4 * side:
        image.draft(image.mode, (2 * side, 2 * side))
    with _in_turn(width * height if _is_progressive(image) else image.width * image.height):
        small = _in_strips(image, side) if side is not None else image
        rgb = to_rgb(small)
    turned = rgb.size != small.size or (rgb.width == rgb.height and _orientation(image) >= 5)
    return rgb, height / width if turned else width / height


def _is_progressive(image: Image.Image) -> bool:
    """A progressive JPEG: all its coefficients are in memory, however much it shrinks."""
    return bool(image.info.get("progressive") or image.info.get("progression"))


def _in_strips(image: Image.Image, side: int) -> Image.Image:
    """A large image reduced strip by strip, so that conversions never copy all of it."""
    width, height = image.size
    factor = min(width, height) // (2 * side)
    across, down = factor, factor
    if factor < 2 and max(width, height) > LONG:
        across, down = max(1, width // (2 * side)), max(1, height // (2 * side))
    elif factor < 2 or width * height < LARGE:
        return image
    orientation = _orientation(image)
    small = Image.new("RGB", (-(-width // across), -(-height // down)))
    top = _brightest(image)
    rows = max(1, STRIP // width // down) * down
    for start in range(0, height, rows):
        strip = image.crop((0, start, width, min(start + rows, height)))
        small.paste(_flatten(strip, top).reduce((across, down)), (0, start // down))
    if orientation > 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        small.info["exif"] = exif.tobytes()
    return small


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright, 8 bits, three channels; what is transparent becomes white."""
    with suppress(struct.error, SyntaxError, ValueError, TypeError, KeyError):  # damaged EXIF: it stays as it is
        image = ImageOps.exif_transpose(image)
    return _flatten(image, _brightest(image))


def _brightest(image: Image.Image) -> float:
    """The value that becomes white in an image of more than 8 bits."""
    if image.mode != "F":
        return 65535.0
    high = float(image.getextrema()[1])  # type: ignore[arg-type]
    return max(1.0, high) if math.isfinite(high) else 1.0


def _flatten(image: Image.Image, top: float) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16 and 32 bits per pixel, which Pillow would clip instead of scaling
        values = np.asarray(image, dtype=np.float64)
        return Image.fromarray(np.nan_to_num(values / top * 255).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def to_pixels(image: Image.Image, side: int) -> np.ndarray:
    """RGB image to uint8 [3, side, side], squashed."""
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def _from_memory(image: Image.Image | np.ndarray) -> Image.Image:
    """A Pillow image or uint8 array to an upright RGB image."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
            raise UserError(
                f"image arrays must be uint8 [H, W], [H, W, 3] or [H, W, 4], not {image.dtype} {list(image.shape)}"
            )
        if not image.size:
            raise UserError(f"image arrays need pixels, and this one has the shape {list(image.shape)}")
        image = Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise UserError(f"give a path, a Pillow image or a uint8 array as an image, not {type(image).__name__}")
    if min(image.size) < 1:
        raise UserError(f"a Pillow image needs pixels, and this one has {image.width}×{image.height}")
    check_pixels("an image", *image.size, factor=math.inf)  # only its sides: its pixels are in memory already
    try:
        return to_rgb(image)
    except OSError as error:  # Pillow reads a file only when its pixels are asked for
        raise ImageError(f"a Pillow image cannot be decoded ({error}); open a whole file") from None


def read_image(given: str | Path) -> bytes:
    """The content of an image file, within the limit on its size."""
    try:
        with open_regular(Path(given).expanduser()) as file:
            size = os.fstat(file.fileno()).st_size
            check_file_size(str(given), size)
            return file.read(size)
    except UserError:
        raise
    except FileNotFoundError:
        raise missing(given, "image file") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte in the path; RuntimeError: no home
        raise ImageError(f"{given}: no image file that can be read ({error}); give a regular file") from None

"""From stored pixels to what the ViT sees: crop, flip, resize and normalize as batched tensor operations.

Every transform is a box. Stored images are whole images squashed to a square (see store.py); a box is given in
fractions of the ORIGINAL image, so a crop keeps the aspect ratio it would have had without the squashing.
Resampling a box is separable: rows times pixels times columns, two batched matrix products, with the triangle filter
widening when it shrinks (as Pillow's bilinear does). It is deterministic and runs at matrix-product speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from vqprompt.core.backbones.vit import ViTConfig, any_batch

ATTEMPTS = 10  # random boxes to try before the central one is taken, as in Inception
RATIOS = (3 / 4, 4 / 3)  # least and largest width / height of a random box


def central_boxes(aspect: Tensor, fraction: float) -> Tensor:
    """The central square whose side is `fraction` of the short side; 0 means the whole image, squashed.

    aspect: width / height [B]. Returns x0, y0, x1, y1 in fractions of the image [B, 4].
    """
    if not fraction:
        return torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(aspect.shape[0], 1)
    half_x = fraction / 2 * (1 / aspect).clamp(max=1)
    half_y = fraction / 2 * aspect.clamp(max=1)
    return torch.stack([0.5 - half_x, 0.5 - half_y, 0.5 + half_x, 0.5 + half_y], dim=1)


def random_boxes(aspect: Tensor, generator: torch.Generator, scale: tuple[float, float] = (0.08, 1.0)) -> Tensor:
    """Inception's random resized crops: an area fraction, a log-uniform aspect ratio, a uniform position [B, 4]."""
    count = len(aspect)
    draws = torch.rand(4, count, ATTEMPTS, generator=generator)
    area = scale[0] + draws[0] * (scale[1] - scale[0])
    flattest, tallest = math.log(RATIOS[0]), math.log(RATIOS[1])
    shape = torch.exp(flattest + draws[1] * (tallest - flattest))
    # a crop of pixel area `area * w * h` and pixel aspect `shape`, in fractions of width and height
    width = torch.sqrt(area * shape / aspect[:, None])
    height = torch.sqrt(area / shape * aspect[:, None])
    fits = (width <= 1) & (height <= 1)
    first = fits.float().argmax(dim=1, keepdim=True)
    width, height, left, top = (t.gather(1, first)[:, 0] for t in (width, height, draws[2], draws[3]))
    x0, y0 = left * (1 - width), top * (1 - height)
    boxes = torch.stack([x0, y0, x0 + width, y0 + height], dim=1)
    # the fallback: the largest central box within the allowed aspect ratios
    clamped = aspect.clamp(*RATIOS)
    half_x, half_y = (clamped / aspect).clamp(max=1) / 2, (aspect / clamped).clamp(max=1) / 2
    central = torch.stack([0.5 - half_x, 0.5 - half_y, 0.5 + half_x, 0.5 + half_y], dim=1)
    return torch.where(fits.any(dim=1, keepdim=True), boxes, central)


def window_boxes(count: int, generator: torch.Generator, share: float = 224 / 300) -> Tensor:
    """Random windows of a whole image that is squashed to a square (SLCA on CUB-200: 224 of 300 px)."""
    corner = torch.rand(count, 2, generator=generator) * (1 - share)
    return torch.cat([corner, corner + share], dim=1)


def random_colors(count: int, generator: torch.Generator) -> Tensor:
    """Changes of color [count, 5], as EvoPrompt has them: for half of the images factors of brightness, contrast and
    saturation within 40 % and a turn of the hue by up to a tenth; a fifth become grey."""
    draws = torch.rand(count, 6, generator=generator)
    factors, hue = 0.6 + 0.8 * draws[:, :3], 0.2 * draws[:, 3:4] - 0.1
    jittered = draws[:, 4:5] < 0.5
    grey = (draws[:, 5:] < 0.2).to(draws)
    return torch.cat([torch.where(jittered, factors, 1.0), torch.where(jittered, hue, 0.0), grey], dim=1)


def change_colors(images: Tensor, colors: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] with brightness, contrast, saturation and hue changed [B, 5], in this order."""
    brightness, contrast, saturation, hue, grey = (c.view(-1, 1, 1, 1) for c in colors.to(images.dtype).unbind(1))
    images = (images * brightness).clamp(0, 1)
    mean = _luminance(images).mean(dim=(2, 3), keepdim=True)
    images = (mean + contrast * (images - mean)).clamp(0, 1)
    light = _luminance(images)
    images = (light + saturation * (images - light)).clamp(0, 1)
    images = _turn_hue(images, hue)
    return torch.where(grey > 0, _luminance(images).expand_as(images), images)


def _luminance(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Hue turned by a share of the full circle [B, 1, 1, 1]; value and chroma stay."""
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    safe = torch.where(chroma > 0, chroma, 1.0)
    sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = (sixth + 6 * turn[:, 0]) % 6
    # each channel is the value less the chroma, as far as its own hue is away
    offsets = torch.arange(5.0, 0.0, -2.0, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    distance = (offsets + hue[:, None]) % 6
    turned = value[:, None] - chroma[:, None] * torch.minimum(distance, 4 - distance).clamp(0, 1)
    return torch.where(turn == 0, images, turned)


def _resampling(low: Tensor, high: Tensor, source: int, target: int) -> Tensor:
    """Rows of weights [B, target, source] that resample the interval low..high of `source` pixels to `target` ones."""
    steps = (torch.arange(target, device=low.device) + 0.5) / target
    centers = (low[:, None] + steps * (high - low)[:, None]) * source - 0.5
    support = ((high - low).abs() * source / target).clamp(min=1)
    distance = (torch.arange(source, device=low.device) - centers[..., None]).abs()
    weights = (1 - distance / support[:, None, None]).clamp(min=0)
    return weights / weights.sum(dim=-1, keepdim=True)


@lru_cache
def _normalization(config: ViTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cached, because creating them copies to the device, and a recorded step may not contain such a copy."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) * 255 for values in (config.mean, config.std))
    return mean, std


def _draw(
    pixels: Tensor, boxes: Tensor, flips: Tensor | None, size: int, mean: Tensor, std: Tensor, dtype: torch.dtype,
    colors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x0, y0, x1, y1 = boxes.unbind(1)
    if flips is not None:  # read the box from right to left
        x0, x1 = torch.where(flips, x1, x0), torch.where(flips, x0, x1)
    source = pixels.shape[-1]
    across = _resampling(x0, x1, source, size).to(dtype)
    down = _resampling(y0, y1, source, size).to(dtype)[:, None]
    rows = pixels.to(dtype).flatten(1, 2) @ across.mT
    images: Tensor = down @ rows.unflatten(1, (-1, source))
    if colors is not None:
        images = change_colors((images.expand(-1, 3, -1, -1).float() / 255).clamp(0, 1), colors) * 255
    return ((images - mean) / std).to(dtype)


@lru_cache
def _compiled_draw() -> Callable[..., Tensor]:
    return torch.compile(_draw, dynamic=False)  # only when needed, because importing the compiler takes seconds


def render(
    pixels: Tensor, boxes: Tensor, flips: Tensor | None, config: ViTConfig, dtype: torch.dtype = torch.float32,
    compiled: bool = False, colors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """uint8 pixels [B, 1 or 3, S, S] to normalized images [B, 3, size, size], all on one device.

    boxes: [B, 4]. flips: bool [B] or None. compiled: fuse what surrounds the two matrix products. colors: [B, 5],
    see `change_colors`.
    """
    mean, std = _normalization(config, pixels.device)
    if compiled:
        any_batch(pixels, boxes, flips, colors)
    return (_compiled_draw() if compiled else _draw)(pixels, boxes, flips, config.image_size, mean, std, dtype, colors)

"""From stored pixels to what the ViT sees: crop, flip, resize and normalize as batched tensor operations.

Every transform is a box. Stored images are whole images squashed to a square (see images.py); a box is given in
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

from vqprompt.backbones.vit import ViTConfig

ATTEMPTS = 10  # random boxes tried before falling back to a central one, as everyone since Inception does


def central_boxes(aspect: Tensor, fraction: float) -> Tensor:
    """Central square whose side is `fraction` of the short side; 0 stands for the whole image, squashed.

    aspect: width / height [B]. Returns x0, y0, x1, y1 in fractions of the image [B, 4].
    """
    if not fraction:
        return torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(aspect.shape[0], 1)
    half_x = fraction / 2 * (1 / aspect).clamp(max=1)
    half_y = fraction / 2 * aspect.clamp(max=1)
    return torch.stack([0.5 - half_x, 0.5 - half_y, 0.5 + half_x, 0.5 + half_y], dim=1)


def random_boxes(
    aspect: Tensor,
    generator: torch.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Inception's random resized crops: an area fraction, a log-uniform aspect ratio, a uniform position [B, 4]."""
    count = len(aspect)
    draws = torch.rand(4, count, ATTEMPTS, generator=generator)
    area = scale[0] + draws[0] * (scale[1] - scale[0])
    shape = torch.exp(math.log(ratio[0]) + draws[1] * (math.log(ratio[1]) - math.log(ratio[0])))
    # a crop of pixel area `area * w * h` and pixel aspect `shape`, in fractions of width and height
    width = torch.sqrt(area * shape / aspect[:, None])
    height = torch.sqrt(area / shape * aspect[:, None])
    fits = (width <= 1) & (height <= 1)
    first = fits.float().argmax(dim=1, keepdim=True)
    width, height, left, top = (t.gather(1, first)[:, 0] for t in (width, height, draws[2], draws[3]))
    x0, y0 = left * (1 - width), top * (1 - height)
    boxes = torch.stack([x0, y0, x0 + width, y0 + height], dim=1)
    # the fallback: the largest central box within the allowed aspect ratios
    clamped = aspect.clamp(ratio[0], ratio[1])
    half_x, half_y = (clamped / aspect).clamp(max=1) / 2, (aspect / clamped).clamp(max=1) / 2
    central = torch.stack([0.5 - half_x, 0.5 - half_y, 0.5 + half_x, 0.5 + half_y], dim=1)
    return torch.where(fits.any(dim=1, keepdim=True), boxes, central)


def _resampling(low: Tensor, high: Tensor, source: int, target: int) -> Tensor:
    """Rows of weights [B, target, source] that read `target` pixels off the interval low..high of `source` pixels."""
    steps = (torch.arange(target, device=low.device) + 0.5) / target
    centers = (low[:, None] + steps * (high - low)[:, None]) * source - 0.5
    support = ((high - low).abs() * source / target).clamp(min=1)
    distance = (torch.arange(source, device=low.device) - centers[..., None]).abs()
    weights = (1 - distance / support[:, None, None]).clamp(min=0)
    return weights / weights.sum(dim=-1, keepdim=True)


@lru_cache
def _normalization(config: ViTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, because making them anew means a copy to the device, which a recorded step may not contain."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) * 255 for values in (config.mean, config.std))
    return mean, std


def _draw(
    pixels: Tensor, boxes: Tensor, flips: Tensor | None, size: int, mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    x0, y0, x1, y1 = boxes.unbind(1)
    if flips is not None:  # read the box from right to left
        x0, x1 = torch.where(flips, x1, x0), torch.where(flips, x0, x1)
    source = pixels.shape[-1]
    across = _resampling(x0, x1, source, size).to(dtype)
    down = _resampling(y0, y1, source, size).to(dtype)[:, None]
    images = down @ (pixels.to(dtype).flatten(1, 2) @ across.mT).unflatten(1, (-1, source))
    return ((images - mean) / std).to(dtype)


@lru_cache
def _compiled_draw() -> Callable[..., Tensor]:
    return torch.compile(_draw, dynamic=False)  # when first needed: the compiler takes seconds to import


def render(
    pixels: Tensor,
    boxes: Tensor,
    flips: Tensor | None,
    config: ViTConfig,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> Tensor:
    """uint8 pixels [B, 1 or 3, S, S] to normalized images [B, 3, size, size], all on one device.

    boxes: [B, 4]. flips: bool [B] or None. compiled: fuse what surrounds the two matrix products.
    """
    mean, std = _normalization(config, pixels.device)
    return (_compiled_draw() if compiled else _draw)(pixels, boxes, flips, config.image_size, mean, std, dtype)

"""Computes features of images with PyTorch: on GPUs, and while a network is trained; and where a network looks.

On GPUs all batches have the same size, and the last one is filled up, so that every row is computed in the same way. On
CPUs, images are computed one after another.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vqprompt.core.backbones.load import make_vit
from vqprompt.core.backbones.vit import ViT
from vqprompt.core.backbones.weights import Weights
from vqprompt.core.data.decode import stored_side
from vqprompt.core.data.views import central_boxes, render
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.cores import parallel
from vqprompt.core.runtime.device import pick_device
from vqprompt.product.model.extractor import Array, joined_blocks, load, try_load, unless_error
from vqprompt.product.model.pictures import Picture

BATCH = 64  # images at a time on GPUs


class Features:
    """An `Extractor`: class-token features of images under one backbone, size and crop.

    vit: frozen, in fp32. crop: side of the central crop, as a fraction of the short side; 0: the whole image,
    squashed. encode: normalized images [B, 3, S, S] to features [B, D], if a network was trained (see trained.py).
    fingerprint: of the backbone's weights.
    """

    precision = "fp32"

    def __init__(
        self,
        vit: ViT,
        crop: float,
        device: torch.device | None = None,
        encode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.device, self.fingerprint = device or torch.device("cpu"), fingerprint
        self.vit, self.crop = vit.to(self.device).eval().requires_grad_(False), crop
        self.encode = partial(class_tokens, self.vit) if encode is None else encode
        self.size, self.width = vit.config.image_size, vit.config.width * joined_blocks(vit.config)
        self.side, self.at_once = stored_side(self.size), 1 if self.device.type == "cpu" else BATCH

    def of(self, pictures: Iterable[Picture]) -> Iterator[Array | Exception]:
        return map(self.of_one, pictures) if self.device.type == "cpu" else self._batched(pictures)

    def of_one(self, picture: Picture) -> Array | Exception:
        loaded = try_load(picture, self.side)
        return loaded if isinstance(loaded, Exception) else self._forward(loaded[0][None], [loaded[1]])[0]

    def seconds_in_batches(self, size: int) -> float:
        """How long an image takes in a batch, as in training. The fastest of three counts: it was disturbed least."""
        blank = np.zeros((size, 3, self.side, self.side), np.uint8)
        return min(timeit.repeat(lambda: self._forward(blank, [1.0] * size), number=1, repeat=3)) / size

    @torch.inference_mode()
    def _forward(self, pixels: Array, aspects: list[float]) -> Array:
        on_device = torch.from_numpy(np.ascontiguousarray(pixels)).to(self.device)
        boxes = central_boxes(torch.tensor(aspects, dtype=torch.float32), self.crop).to(self.device)
        images = render(on_device, boxes, None, self.vit.config, self.vit.dtype, False)
        features: Array = self.encode(images).float().cpu().numpy()
        return features

    def _batched(self, pictures: Iterable[Picture]) -> Iterator[Array | Exception]:
        ready = parallel(partial(try_load, side=self.side), pictures)
        while part := list(islice(ready, BATCH)):
            good = [p for p in part if not isinstance(p, Exception)]
            features: Iterator[Array] = iter(())
            if good:
                filled = good + [good[-1]] * (BATCH - len(good))
                features = iter(self._forward(np.stack([p for p, _ in filled]), [a for _, a in filled]))
            for p in part:
                yield p if isinstance(p, Exception) else next(features)


@lru_cache(maxsize=2)
def open_features(weights: Weights, size: int | None, crop: float, device: str) -> Features:
    """Models of one process share them."""
    return Features(make_vit(weights, size), crop, pick_device(device), fingerprint=weights.fingerprint)


def class_tokens(vit: ViT, images: torch.Tensor) -> torch.Tensor:
    """Normalized images [B, 3, S, S] to the class tokens of the last blocks, side by side [B, blocks * D]."""
    return vit.encode(vit.embed(images), class_tokens=range(-joined_blocks(vit.config), 0))


class _ClassTokenAttention(TorchFunctionMode):
    """Notes the attention of a single token: only the last block computes the class token alone. The first call counts;
    a trained network then sees the mirror image too. Calls of other threads are not seen."""

    shares: torch.Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and self.shares is None and arguments[0].shape[2] == 1:
            queries, keys = arguments[:2]
            self.shares = (queries @ keys.mT / queries.shape[-1] ** 0.5).softmax(-1)[0, :, 0].mean(0)
        return function(*arguments, **(named or {}))


def attention(network: Features, picture: Picture) -> tuple[list[list[float]], float, list[float]]:
    """Shares of the attention, all heads averaged: of parts of the image [rows, columns], and of prompts that were
    trained; the rest is the class token's own. Then the part of the image that the network sees: left, top, right and
    bottom, as fractions."""
    if network.vit.config.pooled:
        raise UserError("this backbone has no class token whose attention could be shown; take another")
    pixels, aspect = load(picture, network.side)
    with _ClassTokenAttention() as noted:
        unless_error(network.of_one(replace(picture, decoded=lambda: (pixels, aspect))))
    assert noted.shares is not None
    side = network.size // network.vit.config.patch
    others = side**2 + 1 + network.vit.config.registers  # prompts are first, then come the class token and registers
    prompt, patches = noted.shares[:-others], noted.shares[-(side**2) :]
    box = central_boxes(torch.tensor([aspect]), network.crop)[0]
    return patches.reshape(side, side).tolist(), float(prompt.sum()), box.tolist()

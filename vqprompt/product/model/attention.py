"""Where a network looks in an image: the attention of the class token in the last block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vqprompt.core.data.views import central_boxes
from vqprompt.core.errors import UserError
from vqprompt.product.model.extractor import load, unless_error
from vqprompt.product.model.features import Features
from vqprompt.product.model.pictures import Picture


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

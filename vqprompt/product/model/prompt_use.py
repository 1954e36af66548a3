"""Which prompts an image uses, and how much of the class token's attention each of them gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vqprompt.core.data.views import central_boxes, render
from vqprompt.product.model.answers import PromptUse
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.extractor import load
from vqprompt.product.model.features import Features
from vqprompt.product.model.pictures import Picture


@torch.inference_mode()
def prompts_used(features: Features, trained: Trained, pictures: Iterable[Picture]) -> list[list[PromptUse]]:
    """One list per image, with one entry per block that has a prompt."""
    vit, uses_per_image = features.vit, []
    pool = torch.from_numpy(trained.tensors["pool.prompts"].copy()).to(features.device)
    prompts = {block: pool[place, 0][None] for place, block in enumerate(trained.options["blocks"])}
    blocks: Any = vit.blocks
    for picture in pictures:
        pixels, aspect = load(picture, features.side)
        boxes = central_boxes(torch.tensor([aspect], dtype=torch.float32), features.crop).to(features.device)
        given = torch.from_numpy(pixels.copy())[None].to(features.device)
        x = vit.embed(render(given, boxes, None, vit.config, vit.dtype, False))
        uses = []
        for number, block in enumerate(blocks):
            prompt = prompts.get(number)
            if prompt is not None:
                uses.append(PromptUse(block=number, prompt=0, attention=_attention(block, x, prompt)))
            x = block(x, prompt)
        uses_per_image.append(uses)
    return uses_per_image


def _attention(block: Any, x: Tensor, prompt: Tensor) -> float:
    """The share of the class token's attention that the prompt's keys get, averaged over the heads. x: [1, L, D]."""
    attention, width = block.attn, x.shape[-1]
    q, k, _ = attention.qkv(block.norm1(x)).chunk(3, dim=-1)
    keys = torch.cat([attention.prefix(prompt, "after")[0], k], dim=1)
    q, keys = (t.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for t in (q[:, :1], keys))
    shares = torch.softmax(q @ keys.transpose(-1, -2) * (width / attention.heads) ** -0.5, dim=-1)
    return float(shares[..., : prompt.shape[1] // 2].sum(-1).mean())

"""A backbone whose weights change only by low-rank matrices (LoRA, Hu et al. 2022): W + U V, with U and V learned.

The change of a ViT-S at rank 16 is a twentieth of the network, so a model that keeps only the change is small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT


class LowRankLinear(nn.Module):
    """A frozen linear layer plus `up @ down`. `up` starts at zero, so nothing changes at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        rows, columns = layer.weight.shape
        self.original, self.bias = layer.weight.requires_grad_(False), layer.bias.requires_grad_(False)
        down = nn.init.kaiming_uniform_(torch.empty(rank, columns), a=5**0.5)  # on the CPU, whose draws are seeded
        self.down = nn.Parameter(down.to(layer.weight.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=layer.weight.device))

    @property
    def weight(self) -> Tensor:
        return self.original + (self.up @ self.down).to(self.original.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def linear_layers(vit: ViT) -> list[nn.Linear]:
    """The layers that can get a low-rank change: those of attention and MLP, in every block."""
    blocks: Any = vit.blocks
    return [layer for b in blocks for layer in (b.attn.qkv, b.attn.proj, b.mlp.fc1, b.mlp.fc2)]


def add_low_rank(vit: ViT, rank: int) -> None:
    """From now on the backbone itself is frozen, and its low-rank changes learn."""
    vit.requires_grad_(False)
    blocks: Any = vit.blocks
    for block in blocks:
        for owner, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
            setattr(owner, name, LowRankLinear(getattr(owner, name), rank))


def low_rank_changes(vit: ViT) -> list[LowRankLinear]:
    return [module for module in vit.modules() if isinstance(module, LowRankLinear)]

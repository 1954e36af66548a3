"""A backbone whose weights change by low-rank matrices alone (LoRA, Hu et al. 2022): W + U V, with U and V learned.

The change of a ViT-S at rank 16 is a fortieth of the network, so a model that keeps only the change is small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vqprompt.backbones.vit import ViT


class LowRank(nn.Module):
    """Adds `up @ down` to a weight matrix. `up` starts at zero, so nothing changes at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.empty(rank, columns, device=weight.device))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).to(weight.dtype)


def linear_layers(vit: ViT) -> list[nn.Linear]:
    """Those that get a low-rank change: of attention and MLP, in every block."""
    blocks: Any = vit.blocks
    return [layer for b in blocks for layer in (b.attn.qkv, b.attn.proj, b.mlp.fc1, b.mlp.fc2)]


def add_low_rank(vit: ViT, rank: int) -> None:
    """From now on the backbone itself is frozen, and its low-rank changes learn."""
    vit.requires_grad_(False)
    for layer in linear_layers(vit):
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))


def low_rank_changes(vit: ViT) -> list[LowRank]:
    return [module for module in vit.modules() if isinstance(module, LowRank)]

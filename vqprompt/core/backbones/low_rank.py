"""A backbone whose weights change only by low-rank matrices (LoRA, Hu et al. 2022): W + U V, with U and V learned.

The change of a ViT-S at rank 16 is a twentieth of the network, so a model that keeps only the change is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT


class LowRankLinear(nn.Module):
    """A frozen linear layer plus `scale * up @ down`. `up` starts at zero, so nothing changes at first.

    principal: `down` starts as the first right singular vectors of the weight, not at random.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float = 1.0, principal: bool = False) -> None:
        super().__init__()
        rows, columns = layer.weight.shape
        self.scale = scale
        self.original, self.bias = layer.weight.requires_grad_(False), layer.bias.requires_grad_(False)
        if principal:
            down = torch.linalg.svd(layer.weight.float(), full_matrices=False).Vh[:rank].contiguous()
        else:
            down = nn.init.kaiming_uniform_(torch.empty(rank, columns), a=5**0.5)  # on the CPU, whose draws are seeded
        self.down = nn.Parameter(down.to(layer.weight.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=layer.weight.device))

    @property
    def weight(self) -> Tensor:
        return self.original + (self.scale * (self.up @ self.down)).to(self.original.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def linear_layers(vit: ViT) -> list[nn.Linear]:
    """The layers that can get a low-rank change: those of attention and MLP, in every block."""
    return [cast(nn.Linear, block.get_submodule(name)) for block in vit.blocks for name in LAYERS]


def add_low_rank(vit: ViT, rank: int, layers: Sequence[str] = LAYERS, **how: Any) -> None:
    """From now on the backbone itself is frozen, and its low-rank changes learn. how: as LowRankLinear takes it."""
    vit.requires_grad_(False)
    for block in vit.blocks:
        for name in layers:
            block.set_submodule(name, LowRankLinear(cast(nn.Linear, block.get_submodule(name)), rank, **how))

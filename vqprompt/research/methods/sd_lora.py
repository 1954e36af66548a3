"""SD-LoRA (Wu et al., ICLR 2025): low-rank changes whose directions stay while their magnitudes go on learning.

Every task adds low-rank changes of the query and value projections. When the task is over, their directions are fixed,
but how far the network goes along each of them is learned again in every later task. Nothing of old tasks is kept, and
one network serves all tasks.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import Method, ReadoutOptions, TaskInfo

MAGNITUDE = 0.8  # at the start of a task


class SDLoRAOptions(ReadoutOptions):
    rank: int = Field(10, ge=1, description="rank of the change that a task adds to each matrix")


class DirectionsLinear(nn.Module):
    """The frozen projection to queries, keys and values, plus directions for queries and values: up @ down, of unit
    size but for the newest, each times its magnitude."""

    magnitudes: nn.Parameter  # [T]

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.original, self.bias = layer.weight.requires_grad_(False), layer.bias.requires_grad_(False)
        self.ups, self.downs = nn.ParameterList(), nn.ParameterList()  # [2, D, rank] and [2, rank, D] per task
        self.magnitudes = nn.Parameter(torch.zeros(0))

    def grow(self) -> None:
        width, device = self.original.shape[1], self.original.device
        down = nn.init.kaiming_uniform_(torch.empty(2 * self.rank, width), a=5**0.5).unflatten(0, (2, -1))
        self.requires_grad_(False)
        self.downs.append(nn.Parameter(down.to(device)))
        self.ups.append(nn.Parameter(torch.zeros(2, width, self.rank, device=device)))
        self.magnitudes = nn.Parameter(torch.full((len(self.ups),), MAGNITUDE, device=device))

    @property
    def weight(self) -> Tensor:
        if not len(self.ups):
            return self.original
        sizes = [up.norm(dim=(1, 2)) * down.norm(dim=(1, 2)) for up, down in zip(self.ups, self.downs, strict=True)]
        sizes[-1] = torch.ones_like(sizes[-1])  # what is being learned starts at zero, so it has no direction yet
        factors = self.magnitudes / torch.stack(sizes, dim=1).clamp(min=1e-12)  # [2, T]
        ups = torch.cat(list(self.ups), dim=2) * factors.repeat_interleave(self.rank, dim=1)[:, None]
        queries, values = ups @ torch.cat(list(self.downs), dim=1)
        change = torch.cat([queries, torch.zeros_like(queries), values])
        return self.original + change.to(self.original.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class SDLoRA(Method):
    title = "SD-LoRA"
    Options: ClassVar[Any] = SDLoRAOptions
    tunes_backbone = True
    backbone_parts = (".ups.", ".downs.", ".magnitudes")

    def __init__(self, vit: ViT, options: SDLoRAOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        vit.requires_grad_(False)
        for block in vit.blocks:
            qkv = cast(nn.Linear, block.get_submodule("attn.qkv"))
            block.set_submodule("attn.qkv", DirectionsLinear(qkv, options.rank))

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        for module in self.vit.modules():
            if task.new_classes and isinstance(module, DirectionsLinear):
                module.grow()

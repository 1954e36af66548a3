"""L2P++ (Wang et al. 2022, as rebuilt by Smith et al. 2023): the five prompts whose keys are nearest to the query.

L2P++ prompts block 0 with prefixes, Deep L2P++ blocks 0–4, L2P++ V2 adds VQ-Prompt's class statistics. Keys learn
only from the key-pull loss, prompts only from the classification.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from vqprompt.core.backbones.vit import Prompts, ViT
from vqprompt.research.methods.base import Losses, Method, PromptOptions, StatisticsOptions, View
from vqprompt.research.methods.prompts import PromptPool, cosine_similarity, pick


class L2POptions(PromptOptions, StatisticsOptions):
    pool: int = Field(30, ge=1, description="prompts per block (N)")
    top: int = Field(5, ge=1, description="prompts per image and block")
    key_weight: float = Field(1.0, ge=0, description="weight of the loss that pulls chosen keys to the queries")
    key_loss: Literal["own", "batch"] = Field(
        "own", description="chosen keys are pulled to the images that chose them (L2P), or to the whole batch (CODA)"
    )

    @model_validator(mode="after")
    def _enough(self) -> L2POptions:
        if self.top > self.pool:
            raise ValueError(f"top={self.top} prompts cannot be chosen from a pool of {self.pool}")
        return self


class L2P(Method):
    title = "L2P++"
    Options: ClassVar[Any] = L2POptions
    uses_query = True

    def __init__(self, vit: ViT, options: L2POptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.pool = PromptPool(len(options.blocks), options.pool, options.length, vit.config.width)
        self.choosable = options.pool

    def prompts_of(self, view: View) -> tuple[Prompts, Losses]:
        cosines = cosine_similarity(view.query, self.pool.keys)
        nearness, choice = cosines.topk(self.options.top, dim=-1)
        if self.options.key_loss == "batch":
            pull = pull_to_batch(view.part.whole_batch(cosines), view.part.whole_batch(choice))
        else:
            pull = (1 - nearness).sum(dim=(1, 2)).mean()  # summed over blocks and chosen keys, mean over images
        return self.by_block(pick(self.pool.prompts, choice)), {"key": self.options.key_weight * pull}

    @torch.no_grad()
    def choices(self, query: Tensor) -> Tensor:
        """The `top` prompts of each image and block [B, M, top], nearest first."""
        return cosine_similarity(query, self.pool.keys).topk(self.options.top, dim=-1).indices


def pull_to_batch(cosines: Tensor, choice: Tensor) -> Tensor:
    """Distances 1 − cosine [B, M, N] of all queries to all chosen keys [B, M, k], a key as often as it is chosen: sum
    over blocks and chosen keys, mean over both images. CODA-Prompt's code adds them up; keys learn from this loss alone
    and with Adam, which takes no notice of the factor."""
    chosen = F.one_hot(choice, cosines.shape[-1]).sum(2).to(cosines).mean(0)  # [M, N], times per image
    return (chosen * (1 - cosines.mean(0))).sum()

"""Moving-Prompts, ours: prompts in every block of a frozen backbone, with a memory that moves along.

The backbone stays as it is, so a model is its prompts and its memory: a few megabytes. A `pool` above 1 selects prompts
by vector quantization, as VQ-Prompt does. On held-out images of CUB-200 it is not better, and a single prompt saves the
query, a third of a step's work. So one prompt is the default.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from vqprompt.core.backbones.vit import Prompts, ViT
from vqprompt.research.methods.base import Losses, PromptOptions, TaskData, View
from vqprompt.research.methods.moving import MovingMemory, MovingOptions
from vqprompt.research.methods.prompts import PromptPool, Spread


class MovingPromptsOptions(PromptOptions, MovingOptions):
    pool: int = Field(1, ge=1, description="prompts per block (N); with one, nothing is selected")
    blocks: list[int] | None = Field(None, description="attention blocks that get a prompt; null: all")  # type: ignore[assignment]
    tau: float = Field(1.0, gt=0, description="temperature of the soft selection")
    vq_weight: float = Field(0.4, ge=0, description="λ_q, pulls pool elements to the soft prompts")
    commitment_weight: float = Field(0.1, ge=0, description="λ_c, pulls soft prompts to the pool elements")
    spread: Spread = Spread()


class MovingPrompts(MovingMemory):
    title = "Moving-Prompts"
    Options: ClassVar[Any] = MovingPromptsOptions
    uses_query = True

    def __init__(self, vit: ViT, options: MovingPromptsOptions, tasks: int) -> None:
        blocks = list(range(vit.config.depth)) if options.blocks is None else options.blocks
        super().__init__(vit, options.model_copy(update={"blocks": blocks}), tasks)
        self.uses_query = options.pool > 1
        self.uses_frozen = options.frozen_beside and not self.uses_query  # one of the two is kept
        self.pool = PromptPool(len(blocks), options.pool, options.length, vit.config.width, options.spread)
        self.choosable = options.pool

    def prepare_training(self, data: TaskData) -> None:
        super().prepare_training(data)
        if data.task.number == 0 and self.uses_query and self.options.spread.keys == "k-means":
            self.pool.start_keys(data.queries, data.seed)

    def encode(self, view: View, class_tokens: tuple[int, ...] = (-1,)) -> tuple[Tensor, Losses]:
        # prompts start at random: without training they say nothing
        return super().encode(view, class_tokens) if self.trained else (self.encode_frozen(view, class_tokens), {})

    def prompts_of(self, view: View) -> tuple[Prompts, Losses]:
        o = self.options
        if o.pool == 1:
            return dict(zip(o.blocks, self.pool.prompts, strict=True)), {}
        alpha = self.pool.weights(view.query, o.tau)
        quantized = self.pool.quantize(self.pool.mix(alpha))
        losses = {"vq": o.vq_weight * quantized.vq, "commitment": o.commitment_weight * quantized.commitment}
        losses |= self.pool.balance(view.part.whole_batch(alpha)) if o.spread.balance else {}
        return self.by_block(quantized.prompt), losses

    @torch.no_grad()
    def choices(self, query: Tensor) -> Tensor | None:
        if self.options.pool == 1:
            return None
        return self.pool.nearest(self.pool.mix(self.pool.weights(query, self.options.tau)))

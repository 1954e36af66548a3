"""VQ-Prompt (Jiao et al., NeurIPS 2024), and the two simpler forms it is compared with.

A query softly selects from a pool; the soft prompt is replaced by its nearest pool element (straight-through); five
blocks have one pool each; class statistics rebalance the classifier. VQ-Prompt-S leaves out the
statistics, Soft-Prompt the quantization too.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vqprompt.core.backbones.vit import Prompts, ViT
from vqprompt.research.methods.base import Losses, Method, PromptOptions, StatisticsOptions
from vqprompt.research.methods.prompts import Gradient, PromptPool, Spread
from vqprompt.research.methods.task import TaskData, TaskInfo
from vqprompt.research.training.view import View


class VQOptions(PromptOptions, StatisticsOptions):
    pool: int = Field(10, ge=1, description="prompts per block (N)")
    tau: float = Field(1.0, gt=0, description="temperature of the soft selection; 5 with the in21k backbone")
    normalize_keys: bool = Field(True, description="unit-length keys, as in the released code")
    normalize_query: bool = Field(False, description="unit-length query")
    placement: Literal["after", "before"] = Field("after", description="prompts join after or before W_K, W_V")
    quantize: bool = Field(True, description="replace the soft prompt by its nearest pool element")
    gradient: Gradient = Field("straight-through", description="gradient estimator")
    vq_weight: float = Field(0.4, ge=0, description="λ_q, pulls pool elements to the soft prompts")
    commitment_weight: float = Field(0.1, ge=0, description="λ_c, pulls soft prompts to the pool elements")
    loss_reduction: Literal["mean", "sum"] = Field("mean", description="mean over elements, or the squared L2 norm")
    learn: Literal["always", "first-task"] = Field(
        "always", description="prompts learn in every task, or only in the first; then old statistics stay valid"
    )
    spread: Spread = Spread()


class VQPrompt(Method):
    title = "VQ-Prompt"
    Options: ClassVar[Any] = VQOptions
    uses_query = True

    def __init__(self, vit: ViT, options: VQOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        self.pool = PromptPool(len(options.blocks), options.pool, options.length, vit.config.width, options.spread)
        self.choosable = options.pool if options.quantize else 0

    def prepare_training(self, data: TaskData) -> None:
        if data.task.number == 0 and self.options.spread.keys == "k-means":
            self.pool.start_keys(data.queries, data.seed)

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        self.pool.requires_grad_(self.options.learn == "always" or task.number == 0)

    def trains_in(self, task: int) -> bool:
        return self.options.learn == "always" or task == 0 or not self.solves_classifier

    def prompts_of(self, view: View) -> tuple[Prompts, Losses]:
        o = self.options
        alpha = self.prompt_weights(view.query)
        prompt = self.pool.mix(alpha)
        losses = self.pool.balance(view.part.whole_batch(alpha)) if o.spread.balance else {}
        if o.quantize:
            quantized = self.pool.quantize(prompt, o.gradient, o.loss_reduction)
            prompt = quantized.prompt
            losses |= {"vq": o.vq_weight * quantized.vq, "commitment": o.commitment_weight * quantized.commitment}
        return self.by_block(prompt), losses

    def prompt_weights(self, query: Tensor) -> Tensor:
        return self.pool.weights(query, self.options.tau, self.options.normalize_keys, self.options.normalize_query)

    @torch.no_grad()
    def choices(self, query: Tensor) -> Tensor | None:
        return self.pool.nearest(self.pool.mix(self.prompt_weights(query))) if self.options.quantize else None

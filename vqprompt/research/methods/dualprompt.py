"""DualPrompt (Wang et al. 2022): a general prompt that all tasks share, and an expert prompt for each task.

In training the task's own expert is used, and its key is pulled to the queries. At test time each block takes the
expert whose key is nearest. Experts of earlier tasks do not change.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import Prompts, ViT
from vqprompt.research.methods.base import Losses, Method, PromptOptions, TaskInfo, View
from vqprompt.research.methods.prompts import PromptPool, check_blocks, cosine_similarity, pick, train_only


class DualPromptOptions(PromptOptions):
    general_length: int = Field(6, ge=2, multiple_of=2, description="length of the general prompt")
    general_blocks: list[int] = Field([0, 1], description="attention blocks that get the general prompt")
    pool: int | None = Field(None, ge=1, description="experts at the start; null: one per planned task")
    key_weight: float = Field(1.0, ge=0, description="weight of the loss that pulls the task's key to the queries")
    unlearned_experts: bool = Field(
        False, description="at test time, match the keys of future tasks as well, as the released code does"
    )


class DualPrompt(Method):
    title = "DualPrompt"
    Options: ClassVar[Any] = DualPromptOptions
    uses_query = True

    def __init__(self, vit: ViT, options: DualPromptOptions, tasks: int) -> None:
        super().__init__(vit, options.model_copy(update={"pool": options.pool or tasks}), tasks)
        check_blocks(options.general_blocks + options.blocks, vit.config.depth)
        self.general = nn.ParameterList(
            torch.rand(1, options.general_length, vit.config.width) for _ in options.general_blocks
        )
        self.experts = nn.ModuleList(self._expert() for _ in range(self.options.pool))

    def _expert(self) -> PromptPool:
        return PromptPool(len(self.options.blocks), 1, self.options.length, self.vit.config.width)

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        if task.number >= len(self.experts) and task.new_classes:  # more tasks than were planned
            self.experts.append(self._expert().to(self.head.weight.device))
        self.choosable = len(self.experts)
        train_only(self.experts, min(task.number, len(self.experts) - 1))

    def prompts_of(self, view: View) -> tuple[Prompts, Losses]:
        losses: Losses = {}
        if view.task is not None:
            own: Any = self.experts[min(view.task, len(self.experts) - 1)]
            away = (1 - cosine_similarity(view.query, own.keys)).sum(dim=(1, 2)).mean()
            losses["key"] = self.options.key_weight * away
            experts = own.prompts.transpose(0, 1)
        else:
            experts = pick(self._of_all("prompts"), self.choices(view.query)[..., None])
        return dict(zip(self.options.general_blocks, self.general, strict=True)) | self.by_block(experts), losses

    @torch.no_grad()
    def choices(self, query: Tensor) -> Tensor:
        return cosine_similarity(query, self._of_all("keys")).argmax(dim=-1)

    def _of_all(self, what: str) -> Tensor:
        """Keys [M, N, D] or prompts [M, N, L_p, D] of all experts that may be chosen."""
        count = len(self.experts) if self.options.unlearned_experts else self.task.number + 1
        return torch.cat([getattr(expert, what) for expert in self.experts[:count]], dim=1)

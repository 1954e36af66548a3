"""HiDe-Prompt (Wang et al., NeurIPS 2023): one prompt per task, and a second classifier that decides which one to use.

Three parts, each optimized separately: within-task prediction (the task's prompt and the head), task-identity inference
(a classifier of features without prompts; the class that it predicts tells the task), and task-adaptive prediction
(both classifiers are corrected with statistics of their own features). A contrastive term keeps features apart.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.research.methods.base import Head, Losses, Method, PromptOptions, TaskData, TaskInfo, View
from vqprompt.research.methods.prompts import train_only
from vqprompt.research.training.rebalancing import Rebalancing


class HideOptions(PromptOptions):
    momentum: float = Field(0.01, ge=0, lt=1, description="share of the earlier tasks' mean prompt in a new one")
    contrastive_weight: float = Field(0.01, ge=0, description="weight of the term that keeps features apart")
    temperature: float = Field(0.8, gt=0, description="temperature of the contrastive term")
    identity_mlp: bool = Field(True, description="a residual layer in front of the task-identity classifier")
    identity_lr_scale: float = Field(0.33, gt=0, description="the identity classifier's rate, relative to the head's")
    rebalancing: Rebalancing = Rebalancing()
    identity_rebalancing: Rebalancing = Rebalancing()

    @model_validator(mode="after")
    def _solvable(self) -> HideOptions:
        if self.identity_rebalancing.how == "closed-form" and self.identity_mlp:
            raise ValueError("identity_rebalancing.how=closed-form needs a linear classifier; give identity_mlp=false")
        return self


class IdentityHead(Head):
    """A classifier that first maps its features: LayerNorm(W₂ GELU(W₁ f) + f)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        for layer in (self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.norm(self.fc2(F.gelu(self.fc1(features))) + features))


class HidePrompt(Method):
    title = "HiDe-Prompt"
    Options: ClassVar[Any] = HideOptions
    uses_query = True
    only_for_learning = (*Method.only_for_learning, "identity_statistics")

    def __init__(self, vit: ViT, options: HideOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        width = vit.config.width
        self.prompts = nn.ParameterList(
            torch.empty(len(options.blocks), options.length, width).uniform_(-1, 1) for _ in range(tasks)
        )
        self.identity = IdentityHead(width) if options.identity_mlp else Head(width)
        self.identity_statistics = self.new_statistics(options.identity_rebalancing)

    def classifiers(self) -> list[nn.Linear]:
        return [self.head, self.identity]

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        self.identity.grow(task.all_classes)
        if task.number == len(self.prompts):  # more tasks than were planned
            self.prompts.append(torch.empty_like(self.prompts[0]))
        self.choosable = len(self.prompts)
        train_only(self.prompts, task.number)
        self._anchors: Tensor | None = None

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        if task.number:
            self.prompts[task.number].data.copy_(self.prompts[task.number - 1].detach())

    def parameter_groups(self) -> list[dict[str, Any]]:
        identity = {"params": list(self.identity.parameters()), "scale": self.options.identity_lr_scale}
        identity["clip"] = "identity"  # a separate stage in the publication, so its gradient is clipped separately
        return [*super().parameter_groups(), identity]

    def losses(self, view: View) -> Losses:
        """The task-identity classifier learns at the same time, from the same images; no gradient is shared."""
        return {**super().losses(view), "identity": self.task_loss(self.identity(view.query), view.labels)}

    def features(self, view: View) -> tuple[Tensor, Losses]:
        if view.task is None:
            learned = torch.stack(list(self.prompts[: self.task.number + 1]))
            prompt = learned[self.infer_task(view.query)]  # [B, M, L_p, D]
        else:
            prompt = (self.blended_prompt() if self.training else self.prompts[view.task])[None]
        features = self.vit.encode(view.tokens, self.by_block(prompt)).float()
        if not self.training:
            return features, {}
        if self._anchors is None:  # picked once per task, because picking makes the device wait
            assert self.statistics is not None
            means = self.statistics.means
            self._anchors = means[(means != 0).any(dim=-1)]  # of all centroids that hold an image
        apart = contrastive(view.part.whole_batch(features), self._anchors, self.options.temperature)
        return features, {"contrastive": self.options.contrastive_weight * apart}

    def infer_task(self, query: Tensor) -> Tensor:
        """The task of the class that each query looks like [B]."""
        ends = torch.tensor(self.task_sizes, device=query.device).cumsum(0)
        return torch.bucketize(self.identity(query).argmax(dim=1), ends, right=True)

    @torch.no_grad()
    def choices(self, query: Tensor) -> Tensor:
        return self.infer_task(query)[:, None].expand(-1, len(self.options.blocks))  # one prompt for all blocks

    def blended_prompt(self) -> Tensor:
        """The task's prompt with a little of those before it, which do not learn any more."""
        own, earlier = self.prompts[self.task.number], list(self.prompts[: self.task.number])
        if not earlier:
            return own
        return (1 - self.options.momentum) * own + self.options.momentum * torch.stack(earlier).mean(0)

    def finish_task(self, data: TaskData) -> None:
        with torch.no_grad():
            self.prompts[data.task.number].copy_(self.blended_prompt())
        super().finish_task(data)
        settings = self.options.identity_rebalancing
        assert self.identity_statistics is not None
        self.remember(self.identity_statistics, self.identity, settings, data.plain_features, data)


def contrastive(features: Tensor, anchors: Tensor, temperature: float) -> Tensor:
    """−mean log(exp(xᵢ·xᵢ/τ) / Σⱼ exp(xᵢ·xⱼ/τ)) over the batch's features [B, D] and the class means so far [n, D]:
    each keeps away from all others."""
    rows = torch.cat([anchors, features])
    return F.cross_entropy(rows @ rows.T / temperature, torch.arange(len(rows), device=rows.device))

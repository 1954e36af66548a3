"""CODA-Prompt (Smith et al. 2023): a prompt is a weighted sum of components, each with a key and an attention vector.

Every task gets an equal part of the components. They start orthogonal to all earlier ones. Earlier components stay in
the sum but do not change any more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import Prompts, ViT
from vqprompt.core.errors import UserError
from vqprompt.research.methods.base import Losses, Method, PromptOptions, StatisticsOptions, TaskInfo, View
from vqprompt.research.methods.prompts import train_only


class CodaOptions(PromptOptions, StatisticsOptions):
    pool: int = Field(100, ge=1, description="components per block (N), divided among the planned tasks")
    orthogonality_weight: float = Field(
        0.0, ge=0, description="weight of the orthogonality penalty; 0 in the released code, 0.1 in the paper"
    )


class Components(nn.Module):
    """One task's components in each of M blocks; zero until the task begins."""

    def __init__(self, blocks: int, size: int, length: int, width: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(blocks, size, width))
        self.attention = nn.Parameter(torch.zeros(blocks, size, width))
        self.prompts = nn.Parameter(torch.zeros(blocks, size, length, width))


class CodaPrompt(Method):
    title = "CODA-P"
    Options = CodaOptions
    uses_query = True

    def __init__(self, vit: ViT, options: CodaOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        if options.pool < tasks:
            raise UserError(f"pool={options.pool} components are too few for {tasks} tasks; give at least {tasks}")
        self.components = nn.ModuleList(self._components() for _ in range(tasks))

    def _components(self) -> Components:
        o = self.options
        return Components(len(o.blocks), o.pool // self.planned_tasks, o.length, self.vit.config.width)

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        if task.number >= len(self.components) and task.new_classes:  # more tasks than were planned
            self.components.append(self._components().to(self.head.weight.device))
        train_only(self.components, min(task.number, len(self.components) - 1))

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        if task.number >= self.planned_tasks and not task.new_classes:
            return  # the newest ones learn on
        for name, new in self.components[min(task.number, len(self.components) - 1)].named_parameters():
            fresh = orthogonal_rows(self._so_far(name).detach().flatten(2).cpu(), new.shape[1])
            new.data.copy_(fresh.view_as(new))

    def prompts_of(self, view: View) -> tuple[Prompts, Losses]:
        keys, attention, prompts = self._so_far("keys"), self._so_far("attention"), self._so_far("prompts")
        prompt = torch.einsum("bmn,mnld->bmld", attended_cosine(view.query, attention, keys), prompts)
        losses: Losses = {}
        if self.options.orthogonality_weight and view.labels is not None:
            penalty = sum(nonorthogonality(rows.flatten(2)) for rows in (keys, attention, prompts))
            losses["orthogonality"] = self.options.orthogonality_weight * penalty
        return self.by_block(prompt), losses

    def _so_far(self, name: str) -> Tensor:
        """Keys, attention vectors [M, N, D] or prompts [M, N, L_p, D] of this task and those before."""
        return torch.cat([getattr(part, name) for part in self.components[: self.task.number + 1]], dim=1)


def attended_cosine(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """cos(q ⊙ A_n, K_n) for queries [B, D], attention vectors and keys [M, N, D]: [B, M, N].

    Computed as matrix products, <q ⊙ A, K> = <q, A ⊙ K> and |q ⊙ A|² = <q², A²>, without a tensor [B, M, N, D].
    """
    product = torch.einsum("bd,mnd->bmn", query, attention * keys)
    squared = torch.einsum("bd,mnd->bmn", query.square(), attention.square()) * keys.square().sum(-1)
    return product / squared.clamp(min=1e-24).sqrt()


def nonorthogonality(rows: Tensor) -> Tensor:
    """mean (R Rᵀ − I)² of each block's rows [M, N, K], summed over the blocks: zero for orthonormal rows."""
    gram = rows @ rows.mT
    return (gram - torch.eye(gram.shape[-1]).to(gram)).square().mean(dim=(1, 2)).sum()


def orthogonal_rows(rows: Tensor, count: int) -> Tensor:
    """New values for the last `count` of each block's rows [M, N, K]: random of length 1, orthogonal to the other
    rows and to each other (Gram–Schmidt). If the space has no orthogonal directions left, random of length 1."""
    random = torch.randn(len(rows), count, rows.shape[2])
    if rows.shape[1] > rows.shape[2]:
        return F.normalize(random, dim=-1)
    q, r = torch.linalg.qr(torch.cat([rows[:, :-count], random], dim=1).mT)
    return (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).mT[:, -count:]

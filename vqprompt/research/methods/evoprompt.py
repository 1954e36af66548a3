"""EvoPrompt (Kurniawan et al., AAAI 2024): a small network makes the prompt from the image, and evolves with the tasks.

Each block has a two-layer network that turns the query into tokens. The network that learns a task (working memory)
starts from the one so far (reference memory). Afterwards the two are aligned, unit by unit, and merged; units that
contributed more count more. New rows of the classifier start as compositions of old ones.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import Prompts, ViT
from vqprompt.core.errors import UserError
from vqprompt.research.methods.base import Losses, Method, Options, TaskData, TaskInfo, View


class EvoOptions(Options):
    length: int = Field(5, ge=1, description="tokens that join the sequence at every block, and stay")
    hidden: int = Field(16, ge=1, description="hidden units of a block's prompt network")
    query: Literal["raw", "normed"] = Field(
        "raw", description="the class token before the backbone's final norm, as published, or after it"
    )
    merge_rate: float = Field(
        0.5, gt=0, le=0.5, description="how far the reference moves to the working memory, before contributions count"
    )
    align_outputs: bool = Field(True, description="align the networks' outputs too, as the released code does")
    compose_classifier: bool = Field(True, description="new classifier rows start as compositions of old ones")
    compose_width: int = Field(4, ge=1, description="dimensions that are composed together")
    compose_temperature: float = Field(0.05, gt=0, description="temperature of the composition")
    prompt_lr_scale: float = Field(1.0, gt=0, description="the networks' learning rate, relative to the classifier's")


class PromptMemory(nn.Module):
    """A bias-free network D → H → L_p·D for each of M blocks, and a copy from before the task as its reference."""

    reference_down: Tensor  # [M, H, D]
    reference_up: Tensor  # [M, L_p·D, H]
    hidden_credit: Tensor  # [M, H], the most a unit has contributed to any task
    output_credit: Tensor  # [M, L_p·D]

    def __init__(self, blocks: int, width: int, hidden: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.down = nn.Parameter(torch.empty(blocks, hidden, width).uniform_(-1, 1) * width**-0.5)
        self.up = nn.Parameter(torch.empty(blocks, length * width, hidden).uniform_(-1, 1) * hidden**-0.5)
        self.register_buffer("hidden_credit", torch.zeros(blocks, hidden))
        self.register_buffer("output_credit", torch.zeros(blocks, length * width))
        self.register_buffer("reference_down", self.down.detach().clone())
        self.register_buffer("reference_up", self.up.detach().clone())

    def forward(self, query: Tensor) -> Tensor:
        """Queries [B, D] to prompts [B, M, L_p, D]."""
        return self.units(query)[1].unflatten(-1, (self.length, -1))

    def units(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Activities of the hidden units [B, M, H] and the outputs [B, M, L_p·D] for queries [B, D]."""
        hidden = torch.einsum("bd,mhd->bmh", query, self.down).relu()
        return hidden, torch.einsum("bmh,moh->bmo", hidden, self.up)

    def start_task(self) -> None:
        self.reference_down, self.reference_up = self.down.detach().clone(), self.up.detach().clone()

    @torch.no_grad()
    def contributions(self, queries: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """Mean positive activity of hidden units [M, H] and outputs [M, L_p·D]."""
        hidden, outputs = torch.zeros_like(self.hidden_credit), torch.zeros_like(self.output_credit)
        for batch in queries.split(batch_size):
            for total, activity in zip((hidden, outputs), self.units(batch), strict=True):
                total += activity.relu().sum(0) / max(len(queries), 1)
        return hidden, outputs

    @torch.no_grad()
    def align(self, outputs: bool = True) -> tuple[Tensor, Tensor]:
        """Reorder hidden units, and outputs too if `outputs`, so that each is where the most similar one in the
        reference is. Returns the orders [M, H] and [M, L_p·D]."""
        hidden_order = torch.stack([match(a, b) for a, b in zip(self.down, self.reference_down, strict=True)])
        self.down.copy_(self.down.gather(1, hidden_order[..., None].expand_as(self.down)))
        self.up.copy_(self.up.gather(2, hidden_order[:, None].expand_as(self.up)))
        output_order = torch.arange(self.up.shape[1], device=self.up.device).expand(len(self.up), -1)
        if outputs:
            output_order = torch.stack([match(a, b) for a, b in zip(self.up, self.reference_up, strict=True)])
            self.up.copy_(self.up.gather(1, output_order[..., None].expand_as(self.up)))
        return hidden_order, output_order

    @torch.no_grad()
    def merge(self, hidden: Tensor, outputs: Tensor, rate: float) -> None:
        """reference + ω (working − reference), where ω = rate (1 + c − g) for each unit: c is its contribution to this
        task [M, H], [M, L_p·D], g its largest contribution before, each scaled to [0, 1] within its block."""
        down = rate * (1 + unit_range(hidden) - unit_range(self.hidden_credit))[..., None]
        up = rate * (1 + unit_range(outputs) - unit_range(self.output_credit))[..., None]
        self.down.copy_(self.reference_down + down * (self.down - self.reference_down))
        self.up.copy_(self.reference_up + up * (self.up - self.reference_up))


class EvoPrompt(Method):
    title = "EvoPrompt"
    Options = EvoOptions
    uses_query = True
    prompts_stay = True
    prototypes: Tensor  # [C, D], mean feature of each class without prompts

    def __init__(self, vit: ViT, options: EvoOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        vit.raw_queries, width = options.query == "raw", vit.config.width
        if options.compose_classifier and width % options.compose_width:
            raise UserError(f"compose_width={options.compose_width} does not divide the backbone's width {width}")
        self.memory = PromptMemory(vit.config.depth, width, options.hidden, options.length)
        self.register_buffer("prototypes", torch.zeros(0, width))

    def start_task(self, task: TaskInfo) -> None:
        super().start_task(task)
        self.memory.start_task()

    @torch.no_grad()
    def prepare_training(self, data: TaskData) -> None:
        if not self.options.compose_classifier:
            return
        queries, labels = data.queries, data.labels
        features = self.vit.norm(queries.to(self.vit.dtype)).float() if self.options.query == "raw" else queries
        classes = range(self.task.old_classes, self.task.all_classes)
        new = torch.stack([features[labels == c].mean(0) for c in classes])
        if self.task.old_classes:
            old_rows, new_rows = self.head.weight.split([self.task.old_classes, self.task.new_classes])
            o = self.options
            new_rows.copy_(compose(new, self.prototypes, old_rows, o.compose_width, o.compose_temperature))
        self.prototypes = torch.cat([self.prototypes, new])

    def prompts_of(self, view: View) -> tuple[Prompts, Losses]:
        return dict(enumerate(self.memory(view.query).unbind(1))), {}

    @torch.no_grad()
    def finish_task(self, data: TaskData) -> None:
        memory = self.memory
        right = self.head(data.features).argmax(dim=1) == data.labels
        hidden, outputs = memory.contributions(data.queries[right], data.batch_size)
        if data.task.number:
            hidden_order, output_order = memory.align(self.options.align_outputs)
            hidden, outputs = hidden.gather(1, hidden_order), outputs.gather(1, output_order)
            memory.merge(hidden, outputs, self.options.merge_rate)
        memory.hidden_credit = torch.maximum(memory.hidden_credit, hidden)
        memory.output_credit = torch.maximum(memory.output_credit, outputs)


def match(rows: Tensor, others: Tensor) -> Tensor:
    """The order of rows [n, K] in which they are most similar to the others [n, K], by the sum of cosines: optimal
    transport with equal weights."""
    from scipy.optimize import linear_sum_assignment  # here, because importing it takes half a second

    cosines = F.normalize(others, dim=1) @ F.normalize(rows, dim=1).T
    return torch.as_tensor(linear_sum_assignment(cosines.cpu().numpy(), maximize=True)[1], device=rows.device)


def unit_range(values: Tensor) -> Tensor:
    """Each row scaled to [0, 1]; a constant one becomes 0."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    return (values - low) / (high - low).clamp(min=1e-9)


def compose(new: Tensor, old: Tensor, old_rows: Tensor, width: int, temperature: float) -> Tensor:
    """Classifier rows for new prototypes [n, D]: in each group of `width` dimensions, a mixture of the old classes'
    rows [C, D], softmaxed by the cosines of the prototypes there."""
    new, old, old_rows = (t.unflatten(1, (-1, width)) for t in (new, old, old_rows))
    cosines = torch.einsum("ngd,cgd->ngc", F.normalize(new, dim=-1), F.normalize(old, dim=-1))
    return torch.einsum("ngc,cgd->ngd", torch.softmax(cosines / temperature, dim=-1), old_rows).flatten(1)

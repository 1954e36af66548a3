"""Soft selection, quantization, straight-through gradient and the two VQ losses (paper, sections 4.1 and 4.2).

Below them is what other prompting methods share: selection by cosine, and parts that learn only in one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from vqprompt.core.errors import UserError

Gradient = Literal["straight-through", "rotation"]


class Quantized(NamedTuple):
    prompt: Tensor  # [B, M, L_p, D], what the ViT gets
    choice: Tensor  # [B, M], which pool element it is
    vq: Tensor  # moves the chosen elements towards the soft prompts
    commitment: Tensor  # moves the soft prompts towards the chosen elements


class Spread(BaseModel, extra="forbid"):
    """Ways, beyond the paper, to make images use more of the pool. Without them most images share a few prompts,
    because their queries have a large part in common."""

    keys: Literal["random", "k-means"] = Field(
        "random",
        description="k-means: keys start at centers of the first task's queries; queries are compared as differences "
        "from their mean, at unit length",
    )
    balance: float = Field(0.0, ge=0, description="weight of a loss that is 0 when a batch uses all prompts equally")


class PromptPool(nn.Module):
    """N keys and N prompts for each of M blocks; all blocks are computed together.

    Keys and prompts start uniform in [0, 1), as in the released code.
    """

    center: Tensor  # [D], mean query of the first task; only with keys by k-means

    def __init__(self, blocks: int, size: int, length: int, width: int, spread: Spread | None = None) -> None:
        super().__init__()
        self.spread = spread or Spread()
        self.keys = nn.Parameter(torch.rand(blocks, size, width))
        self.prompts = nn.Parameter(torch.rand(blocks, size, length, width))
        if self.spread.keys == "k-means":
            self.register_buffer("center", torch.zeros(width))

    @torch.no_grad()
    def start_keys(self, queries: Tensor, seed: int) -> None:
        """Let keys start at cluster centers of these queries [n, D]. Where there are fewer queries than keys, the other
        keys stay random."""
        from sklearn.cluster import KMeans

        self.center.copy_(queries.mean(0))
        unit = F.normalize(queries - self.center, dim=-1).cpu().numpy()
        clusters = KMeans(min(self.keys.shape[1], len(unit)), n_init=4, random_state=seed % 2**32).fit(unit)
        centers = torch.from_numpy(clusters.cluster_centers_).to(self.keys)
        self.keys[:, : len(centers)] = F.normalize(centers, dim=-1)

    def weights(
        self, query: Tensor, temperature: float = 1.0, normalize_keys: bool = True, normalize_query: bool = False
    ) -> Tensor:
        """alpha = softmax(K q / temperature): [B, D] to [B, M, N]."""
        if self.spread.keys == "k-means":
            query, normalize_query = query - self.center, True
        keys = F.normalize(self.keys, dim=-1) if normalize_keys else self.keys
        query = F.normalize(query, dim=-1) if normalize_query else query
        return torch.softmax(torch.einsum("bd,mnd->bmn", query, keys) / temperature, dim=-1)

    def mix(self, alpha: Tensor) -> Tensor:
        """The soft prompts p' = sum_i alpha_i P_i: [B, M, N] to [B, M, L_p, D]."""
        return torch.einsum("bmn,mnld->bmld", alpha, self.prompts)

    def balance(self, alpha: Tensor) -> dict[str, Tensor]:
        """Spreads a batch over the pool: the divergence of the mean weights from equal ones, averaged over blocks."""
        mean = alpha.mean(dim=0)
        divergence = (mean * (mean * mean.shape[-1]).clamp(min=1e-9).log()).sum(dim=-1).mean()
        return {"balance": self.spread.balance * divergence}

    def nearest(self, soft: Tensor) -> Tensor:
        """Index of the pool element closest to each soft prompt [B, M]."""
        soft, pool = soft.detach(), self.prompts.detach()
        products = torch.einsum("bmld,mnld->bmnl", soft, pool).sum(-1)  # row by row, which GPUs compute side by side
        # |p' - P_j|^2 without its first term, which is the same for every j
        return (pool.square().sum((-1, -2)) - 2 * products).argmin(dim=-1)

    def quantize(self, soft: Tensor, gradient: Gradient = "straight-through", reduction: str = "mean") -> Quantized:
        """Replace soft prompts by their nearest elements; the gradient of the result passes on to the soft prompts."""
        choice = self.nearest(soft)
        hard = chosen(self.prompts, choice[..., None]).squeeze(2)
        return Quantized(
            prompt=_rotate(soft, hard.detach()) if gradient == "rotation" else soft + (hard - soft).detach(),
            choice=choice,
            vq=_distance(soft.detach(), hard, reduction),
            commitment=_distance(soft, hard.detach(), reduction),
        )


def chosen(prompts: Tensor, choice: Tensor) -> Tensor:
    """Elements [B, M, k, L_p, D] of each block's pool [M, N, L_p, D] by index [B, M, k].

    As a product with one-hot rows: the gradient of indexing adds up in an order that varies from run to run.
    """
    one_hot = F.one_hot(choice, prompts.shape[1]).to(prompts.dtype)
    return torch.einsum("bmkn,mnld->bmkld", one_hot, prompts)


def _rotate(soft: Tensor, hard: Tensor) -> Tensor:
    """The rotation trick (Fifty et al. 2024): the linear map that turns p' into p is held constant, so the gradient
    turns with it and keeps its angle to the prompt."""
    flat, target = soft.flatten(2), hard.flatten(2)
    e, q = F.normalize(flat.detach(), dim=-1), F.normalize(target, dim=-1)
    r = F.normalize(e + q, dim=-1)
    rotated = flat - 2 * r * (r * flat).sum(-1, keepdim=True) + 2 * q * (e * flat).sum(-1, keepdim=True)
    scale = target.norm(dim=-1, keepdim=True) / flat.detach().norm(dim=-1, keepdim=True)
    return (rotated * scale).view_as(soft)


def _distance(a: Tensor, b: Tensor, reduction: str) -> Tensor:
    """Squared error, summed over the blocks: mean over batch and elements, or the paper's norm, mean over batch."""
    squared = (a - b).square()
    per_block = squared.mean(dim=(0, 2, 3)) if reduction == "mean" else squared.sum(dim=(2, 3)).mean(dim=0)
    return per_block.sum()


# ---------------------------------------------------------------------------------------------- other methods


def check_blocks(blocks: Sequence[int], depth: int) -> None:
    if not blocks or min(blocks) < 0 or max(blocks) >= depth or len(set(blocks)) < len(blocks):
        raise UserError(f"blocks={list(blocks)} must be distinct blocks of 0–{depth - 1}")


def cosine_similarity(query: Tensor, keys: Tensor) -> Tensor:
    """Cosine of each query [B, D] with each block's keys [M, N, D]: [B, M, N]."""
    return torch.einsum("bd,mnd->bmn", F.normalize(query, dim=-1), F.normalize(keys, dim=-1))


def pick(prompts: Tensor, choice: Tensor) -> Tensor:
    """The chosen prompts [B, M, k] of each block's pool [M, N, L_p, D] as one prompt [B, M, k * L_p, D]: first the
    halves that join the keys, then those that join the values."""
    return chosen(prompts, choice).unflatten(3, (2, -1)).transpose(2, 3).flatten(2, 4)


def train_only(parts: Iterable[nn.Module | nn.Parameter], number: int) -> None:
    """Each part belongs to one task: let only the part of this task learn. The optimizer never gets the others, so
    neither momentum nor weight decay changes them."""
    for i, part in enumerate(parts):
        part.requires_grad_(i == number)

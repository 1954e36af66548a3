"""The one Vision Transformer: pre-norm, and able to take prompts at every block.

What is notable about this implementation:
- any block can take a prompt, in one of three placements (see `Placement`): prefix or prompt tuning; and an adapter
- the last block computes only the class token, because its other outputs are not used (exact, and 1/12 less work)
- one fused attention call with or without prompts (attention.py on Nvidia GPUs), one product for q, k and v
- parameters carry timm's names, so the common checkpoints need little translation (see layouts.py)
- what is particular to DINOv2 and DINOv3, CLIP and SigLIP costs nothing where it is absent (`ViTConfig.particular`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqprompt.core.backbones.config import Gelu, check_size
from vqprompt.core.backbones.config import ViTConfig as ViTConfig
from vqprompt.core.errors import UserError

Placement = Literal["after", "before", "tokens"]
"""Where a prompt of length L_p meets the attention:

after   first half of the rows are extra keys, second half extra values, AFTER the projections (released code)
before  the same halves, sent through W_K and W_V first (the paper's equation)
tokens  all rows become tokens of the sequence at that block, and stay (prompt tuning)
"""
TRITON = find_spec("triton") is not None  # PyTorch for Nvidia GPUs brings it, but not on Windows

Prompts = Mapping[int, Tensor]
"""Prompts by block: [B or 1, L_p, D] each."""

Adapter = tuple[Tensor, Tensor, Tensor, Tensor]
"""A bottleneck beside a block's MLP: down [r, D], its bias [r], up [D, r], its bias [D]."""


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # what is kept may be used in training
def rotations(config: ViTConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2, patches, width of a head] that turn the queries and keys of patches (RoPE, DINOv3's form):
    a quarter of the numbers belongs to each frequency of rows and columns, twice."""
    side, head = config.image_size // config.patch, config.width // config.heads
    places = 2 * (torch.arange(side, device=device, dtype=torch.float32) + 0.5) / side - 1
    frequencies = config.rope ** -torch.arange(0, 1, 4 / head, device=device)
    grid = torch.cartesian_prod(places, places)  # rows and columns
    angles = (2 * torch.pi * grid[:, :, None] * frequencies).flatten(1).tile(2)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, first: int) -> None:
        super().__init__()
        self.heads, self.first = heads, first  # first: the first patch among the tokens
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, prompt: Tensor | None, placement: Placement, class_token_only: bool, rotation: Tensor | None
    ) -> Tensor:
        width, q = x.shape[-1], None
        if class_token_only:
            q = F.linear(x[:, :1], self.qkv.weight[:width], self.qkv.bias[:width])
            kv = F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:])
        else:
            kv = self.qkv(x)
        rows = None if prompt is None else self.prefix(prompt.to(x.dtype), placement)
        if rotation is None and has_kernels(kv, rows, self.heads):
            from vqprompt.core.backbones.attention import attention  # here: without a GPU there is no Triton

            return linear(self.proj, attention(kv, q, rows, self.heads))
        q, k, v = kv.chunk(3, dim=-1) if q is None else (q, *kv.chunk(2, dim=-1))
        if rotation is not None:
            q, k = q if class_token_only else self.rotate(q, rotation), self.rotate(k, rotation)
        if rows is not None:
            prefix_k, prefix_v = rows.chunk(2, dim=1)
            k = torch.cat([prefix_k.expand(x.shape[0], -1, -1), k], dim=1)
            v = torch.cat([prefix_v.expand(x.shape[0], -1, -1), v], dim=1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return linear(self.proj, F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Turn the patches among queries or keys [B, L, D]; other tokens have no place."""
        others, patches, prompts = x.tensor_split((self.first, self.first + rotation.shape[1]), dim=1)
        heads = patches.unflatten(-1, (self.heads, -1))
        left, right = heads.chunk(2, dim=-1)
        cos, sin = rotation[:, :, None]
        turned = heads * cos + torch.cat([-right, left], dim=-1) * sin
        return torch.cat([others, turned.flatten(2), prompts], dim=1)

    def prefix(self, prompt: Tensor, placement: Placement) -> Tensor:
        """The rows that join the keys, then those that join the values."""
        if placement == "after":
            return prompt
        rows_k, rows_v = prompt.chunk(2, dim=1)
        width = prompt.shape[-1]
        weight, bias = self.qkv.weight[width:], self.qkv.bias[width:]
        rows_k, rows_v = F.linear(rows_k, weight[:width], bias[:width]), F.linear(rows_v, weight[width:], bias[width:])
        return torch.cat([rows_k, rows_v], dim=1)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, gelu: Gelu) -> None:
        super().__init__()
        self.gelu = gelu
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and what is still to be added to every token (see `product`)."""
        if not self.gelu and not torch.is_grad_enabled() and x.is_cuda and self.fc1.weight.dtype == torch.bfloat16:
            rows = torch._addmm_activation(self.fc1.bias, x.flatten(0, 1), self.fc1.weight.T, use_gelu=True)
            return product(self.fc2, rows.unflatten(0, x.shape[:2]))  # the product applied GELU to its own output
        return product(self.fc2, gelu(linear(self.fc1, x), self.gelu))


def product(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A linear layer. In bf16 on CUDA its bias is left to be added: compiled code adds it in the next kernel, and
    PyTorch looks for the kernel of a product with bias again at every call, which takes 0.2 ms."""
    if x.is_cuda and layer.weight.dtype == torch.bfloat16:
        return F.linear(x, layer.weight), layer.bias
    return F.linear(x, layer.weight, layer.bias), None


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    out, bias = product(layer, x)
    return out if bias is None else out + bias


def gelu(x: Tensor, form: Gelu = "") -> Tensor:
    """GELU. In bf16 the tanh form: within two bf16 steps of the exact one. On CUDA it is written with a sigmoid: once
    fused it runs at memory speed, where erf does not."""
    if form == "quick":
        return x * torch.sigmoid(1.702 * x)
    if x.is_cuda and x.dtype == torch.bfloat16 and not form:
        return x * torch.sigmoid(1.5957691216 * x * (1 + 0.044715 * x * x))
    return F.gelu(x, approximate="tanh" if form or x.dtype == torch.bfloat16 else "none")


def has_kernels(kv: Tensor, prompt: Tensor | None, heads: int) -> bool:
    """Whether our own kernels compute this attention: on Nvidia GPUs, in bf16, with heads of width 64."""
    rows = 0 if prompt is None else prompt.shape[1]
    usual = kv.shape[-1] in (128 * heads, 192 * heads) and rows <= 128 and rows % 2 == 0
    return usual and kv.is_cuda and kv.dtype == torch.bfloat16 and TRITON and torch.version.hip is None


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.eps)
        self.attn = Attention(config.width, config.heads, 1 + config.registers)
        self.norm2 = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = Mlp(config.width, int(config.width * config.mlp_ratio), config.gelu)

    def forward(
        self, x: Tensor, late: Tensor | None = None, prompt: Tensor | None = None, placement: Placement = "after",
        class_token_only: bool = False, adapter: Adapter | None = None, rotation: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Tokens, and what is still to be added to them: `late` of the next block, which adds it where it reads them
        for its norm."""
        x = x if late is None else x + late
        attended = self.attn(self.norm1(x), prompt, placement, class_token_only, rotation)
        x = (x[:, :1] if class_token_only else x) + attended
        mlp, bias = self.mlp(self.norm2(x))
        late = None if adapter is None else bottleneck(x, adapter)
        x = x if bias is None else x + bias
        return (x, mlp) if late is None else (x + mlp, late)


def bottleneck(x: Tensor, adapter: Adapter) -> Tensor:
    """A small two-layer network beside the MLP (AdaptFormer, Chen et al. 2022)."""
    down, down_bias, up, up_bias = (t.to(x.dtype) for t in adapter)
    return F.linear(F.linear(x, down, down_bias).relu(), up, up_bias)


def any_batch(*inputs: Tensor | None) -> None:
    """Call it before compiled code, so that one compilation serves batches of every size (but 1)."""
    for tensor in inputs:
        if tensor is not None and len(tensor) > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


class PatchEmbed(nn.Module):
    """Non-overlapping patches times one matrix, after the class token. The weight has a convolution's shape, as in
    checkpoints."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, images: Tensor, class_token: Tensor, positions: Tensor) -> Tensor:
        p, weight = self.patch, self.proj.weight.flatten(1)
        b, c, h, w = images.shape
        patches = images.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)
        if images.is_cuda:  # fast kernels want rows of 16 bytes: 588 numbers are filled up to 592
            patches, weight = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (patches, weight))
        embedded = F.linear(patches, weight, self.proj.bias) + positions[:, 1:]
        return torch.cat([(class_token + positions[:, :1]).to(embedded.dtype).expand(b, -1, -1), embedded], dim=1)


class ViT(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.compiled = config, False
        self.raw_queries = False  # a method may ask for queries from before the final norm
        self.patch_embed = PatchEmbed(config.patch, config.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        positions = torch.empty(1, config.tokens, config.width)
        if not positions.is_meta:  # drawing shapes without values would import the compiler, which takes seconds
            positions = torch.randn(1, config.tokens, config.width) * 0.02
        self.pos_embed = nn.Parameter(positions)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        if config.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.registers, config.width))
        if config.pre_norm:
            self.norm_pre = nn.LayerNorm(config.width, eps=config.eps)

    @property
    def dtype(self) -> torch.dtype:
        return self.cls_token.dtype

    def forward(self, images: Tensor, prompts: Prompts | None = None, placement: Placement = "after") -> Tensor:
        """Normalized images [B, 3, S, S] to class-token features [B, D]."""
        return self.encode(self.embed(images), prompts, placement)

    def embed(self, images: Tensor) -> Tensor:
        """Images to the tokens [B, L, D] that enter block 0: shared by the query and the prompted pass."""
        images = images.to(self.dtype)
        if self.compiled:
            any_batch(images)
        # a frozen embedding needs no gradient: then one compilation serves training and evaluation
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.cls_token.requires_grad):
            tokens = self.patch_embed(images, self.cls_token, self.pos_embed)
        return self.particular(tokens) if self.config.particular else tokens

    def particular(self, tokens: Tensor) -> Tensor:
        """Tokens of a ViT that is not plain: with registers, with a norm, or without a class token."""
        if self.config.registers:
            registers = self.reg_token.to(tokens.dtype).expand(len(tokens), -1, -1)
            tokens = torch.cat([tokens[:, :1], registers, tokens[:, 1:]], dim=1)
        tokens = self.norm_pre(tokens) if self.config.pre_norm else tokens
        return tokens[:, 1:] if self.config.pooled else tokens

    def encode(
        self, tokens: Tensor, prompts: Prompts | None = None, placement: Placement = "after",
        adapters: Sequence[Adapter] | None = None, class_tokens: Sequence[int] = (-1,), normalize: bool = True,
    ) -> Tensor:  # fmt: skip
        """Tokens to class-token features [B, D]. adapters: one per block. class_tokens: the blocks, counted from the
        end, whose class tokens are joined in this order [B, blocks · D]. normalize: with the final norm."""
        x, late, depth, after = tokens, None, len(self.blocks), dict[int, Tensor]()
        rotation = rotations(self.config, x.device, x.dtype) if self.config.rope else None
        for i, block in enumerate(self.blocks):
            prompt = prompts.get(i) if prompts else None
            if prompt is not None and placement == "tokens":  # at the end: the class token stays first
                x = x if late is None else x + late
                x, late, prompt = torch.cat([x, prompt.to(x.dtype).expand(len(x), -1, -1)], dim=1), None, None
            if self.compiled:
                any_batch(x, late, prompt)
            class_token_only = i == depth - 1 and not self.config.pooled
            adapter = adapters[i] if adapters else None
            x, late = block(x, late, prompt, placement, class_token_only, adapter, rotation)
            if i - depth in class_tokens:
                after[i - depth] = x + late if self.config.pooled else x[:, :1] + late[:, :1]
        if self.config.pooled:  # prompts among the tokens do not count
            patches = self.config.tokens - 1
            return torch.cat([self.norm(after[block][:, :patches]).mean(1) for block in class_tokens], dim=1)
        x = torch.cat([after[block] for block in class_tokens], dim=1)
        return (self.norm(x) if normalize else x).flatten(1)

    def query(self, tokens: Tensor) -> Tensor:
        """Tokens to queries [B, D]: the class token without prompts, before the final norm if `raw_queries` says so."""
        if self.raw_queries and self.config.pooled:
            raise UserError("this backbone has no class token before its final norm; set query=normed")
        return self.encode(tokens, normalize=not self.raw_queries)

    @torch.no_grad()
    def resize(self, size: int) -> ViT:
        """Change, in place, the size of the square images it takes: the learned positions are resampled."""
        config = self.config
        check_size(size, config.patch)
        if size != config.image_size:
            old, new = config.image_size // config.patch, size // config.patch
            grid = self.pos_embed[:, 1:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False, antialias=new < old)
            grid = grid.permute(0, 2, 3, 1).flatten(1, 2).to(self.dtype)
            self.pos_embed = nn.Parameter(
                torch.cat([self.pos_embed[:, :1], grid], dim=1), requires_grad=self.pos_embed.requires_grad
            )
            self.config = replace(config, image_size=size)
        return self

    def layers(self) -> list[list[nn.Parameter]]:
        """Parameters from the last layer down: final norm, blocks, embedding."""
        layers = [list(part.parameters()) for part in (self.norm, *reversed(self.blocks))]
        above = {id(p) for layer in layers for p in layer}
        return [*layers, [p for p in self.parameters() if id(p) not in above]]

    def frozen_copy(self) -> ViT:
        """A copy of the network as it is now that will not be trained: a teacher. (A deep copy is not compiled.)"""
        with torch.device("meta"):
            copy = ViT(self.config)
        values = {name: attrgetter(name)(self).detach().clone() for name in copy.state_dict()}
        copy.raw_queries = self.raw_queries
        copy.load_state_dict(values, assign=True)
        if self.compiled:
            copy.compile_blocks()
        return copy.requires_grad_(False)

    def compile_blocks(self, any_length: bool = False) -> ViT:
        """Fuse norms, GELU and residual adds. All blocks have the same code, so one compilation serves all of them.

        any_length: for prompts that stay in the sequence, which then gets longer from block to block.
        """
        # about ten variants per method: prompted or not, learning or not, last block or not; all of them are wanted
        limits = torch._dynamo.config
        limits.recompile_limit = limits.accumulated_recompile_limit = max(limits.recompile_limit, 1024)
        self.patch_embed.compile()
        for block in self.blocks:
            block.compile(dynamic=any_length)
        self.compiled = True
        return self

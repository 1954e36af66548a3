"""What a ViT is: its sizes, and the names and shapes of its weights. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, Strict

from vqprompt.core.errors import UserError

Gelu = Literal["", "tanh", "quick"]
"""The exact activation, or an approximation: by tanh (SigLIP), by a sigmoid of 1.702 x (OpenAI's CLIP)."""

# The limits are far above any in use. They are checked where a config comes from a file (layouts.py).
MAX_DEPTH = 256
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0, lt=1000)]


@dataclass(frozen=True)
class ViTConfig:
    width: Annotated[Whole, Field(ge=1, le=16_384)] = 384
    depth: Annotated[Whole, Field(ge=1, le=MAX_DEPTH)] = 12
    heads: Annotated[Whole, Field(ge=1, le=1024)] = 6
    patch: Annotated[Whole, Field(ge=1, le=1024)] = 14
    image_size: Annotated[Whole, Field(ge=1, le=16_384)] = 224
    mlp_ratio: Positive = 4.0
    eps: Positive = 1e-6
    mean: tuple[Number, Number, Number] = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    # learned tokens without a position, between the class token and the patches (DINOv2, DINOv3)
    registers: Annotated[Whole, Field(ge=0, le=1024)] = 0
    rope: Number = 0.0  # base of the rotary positions of patches (DINOv3: 100); 0: none
    pre_norm: bool = False  # a norm before the first block (CLIP)
    gelu: Gelu = ""
    pooled: bool = False  # no class token: the mean of the patches stands for it (SigLIP)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible into {self.heads} heads")
        check_size(self.image_size, self.patch)

    @property
    def particular(self) -> list[str]:
        """What distinguishes it from a plain ViT, with one class token and learned positions."""
        return [name for name in ("registers", "rope", "pre_norm", "gelu", "pooled") if getattr(self, name)]

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch) ** 2 + 1


MAX_PATCHES = 65_536  # per image: 3,584 px in patches of 14


def check_size(size: int, patch: int) -> None:
    """Refuse an image size that does not divide into patches, or into far too many to compute with."""
    if patch > 0 and (size // patch) ** 2 > MAX_PATCHES:
        raise UserError(
            f"image size {size} makes {(size // patch) ** 2:,} patches of {patch} px; "
            f"at most {MAX_PATCHES:,} are accepted, so choose {int(MAX_PATCHES**0.5) * patch} or less"
        )
    if size < patch or size % patch:
        near = max(patch, round(size / patch) * patch)
        raise UserError(
            f"image size {size} does not divide into patches of {patch} px; the nearest that does is {near}"
        )


def weight_shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, under timm's names."""
    width, hidden = config.width, int(config.width * config.mlp_ratio)
    layers: dict[str, tuple[int, ...]] = {"patch_embed.proj": (width, 3, config.patch, config.patch)}
    for i in range(config.depth):
        layers |= {
            f"blocks.{i}.norm1": (width,),
            f"blocks.{i}.attn.qkv": (3 * width, width),
            f"blocks.{i}.attn.proj": (width, width),
            f"blocks.{i}.norm2": (width,),
            f"blocks.{i}.mlp.fc1": (hidden, width),
            f"blocks.{i}.mlp.fc2": (width, hidden),
        }
    layers["norm"] = (width,)
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, width), "pos_embed": (1, config.tokens, width)}
    if config.registers:
        shapes["reg_token"] = (1, config.registers, width)
    if config.pre_norm:
        layers["norm_pre"] = (width,)
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes

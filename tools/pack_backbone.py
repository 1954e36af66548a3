"""Pack a ViT's fp16 weights into an int8 safetensors file.

    python tools/pack_backbone.py <weights.safetensors> [output.safetensors]

The input uses timm's key names. Every weight of two or more dimensions of a linear layer or of the patch embedding
becomes int8 under its own key, symmetric, with one scale per row (output channel) under `<key>.scale` (float32 [out]):

    weight = q.float() * scale.view(-1, *[1] * (q.ndim - 1))

A row's scale is the one, of a few clipping ratios of its largest magnitude, with the least squared error. Biases,
norms, class token and position embedding stay fp16. The metadata holds `format` and the model's `config` as JSON.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "width": 384,
    "depth": 12,
    "heads": 6,
    "patch": 14,
    "image_size": 224,
    "mlp_ratio": 4.0,
    "eps": 1e-6,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}
KEPT = ("cls_token", "pos_embed")
RATIOS = torch.linspace(0.7, 1.0, 31)


def quantize(weight):
    """Int8 values shaped like `weight`, and a float32 scale for each of its rows."""
    rows = weight.float().flatten(1)
    top = rows.abs().amax(1, keepdim=True).clamp(min=1e-12)
    best_error = torch.full_like(top, float("inf"))
    best_scale = top / 127
    for ratio in RATIOS:
        scale = top * ratio / 127
        error = ((rows / scale).round().clamp(-127, 127) * scale - rows).square().sum(1, keepdim=True)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    q = (rows / best_scale).round().clamp(-127, 127).to(torch.int8)
    return q.view(weight.shape), best_scale.flatten()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help="fp16 safetensors file with timm's key names")
    parser.add_argument(
        "output", type=Path, nargs="?", default=Path(__file__).parents[1] / "vqprompt/assets/vit_s14.safetensors"
    )
    args = parser.parse_args()
    packed = {}
    for key, value in load_file(args.weights).items():
        if value.ndim < 2 or key in KEPT:
            packed[key] = value.half().contiguous()
        else:
            packed[key], packed[key + ".scale"] = quantize(value)
    save_file(packed, args.output, metadata={"format": "vqprompt-int8", "config": json.dumps(CONFIG)})
    print(f"{args.output}: {len(packed)} tensors, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()

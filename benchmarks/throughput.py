"""How fast, against what the hardware allows and against the ordinary way of writing the same step.

    python benchmarks/throughput.py --device cuda --json results/throughput-h200.json
    python benchmarks/throughput.py --device cpu

Everything printed comes from one run: the ceilings (a large matrix product, a large copy), then for each model our
training and evaluation (on CUDA also without the promise of the same bits every time), then the same training step
written the ordinary way (eager fp32, attention as separate matrix products, Pillow transforms in a DataLoader), and the
ratios. FLOPs are counted exactly, from shapes.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import make_parser, seconds_of, stored_side, wait, write_json
from PIL import Image
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.runtime.device import hardware, pick_precision
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.batches import TaskBatches
from vqprompt.research.training.loop import TrainingLoop
from vqprompt.research.training.settings import Training

CLASSES = 20
MODELS = {
    "ViT-B/16 224": ViTConfig(width=768, depth=12, heads=12, patch=16, image_size=224),
    "ViT-S/14 224": ViTConfig(width=384, depth=12, heads=6, patch=14, image_size=224),
    "ViT-S/14 70": ViTConfig(width=384, depth=12, heads=6, patch=14, image_size=70),
}
PLAN = {  # model -> batch; a CPU gets what it can do in a few minutes
    "cuda": {"ViT-B/16 224": 128, "ViT-S/14 224": 128},
    "cpu": {"ViT-S/14 70": 32, "ViT-S/14 224": 8, "ViT-B/16 224": 4},
}


# ---------------------------------------------------------------------------------------------- counting and timing


def pass_flops(config: ViTConfig, prompt_length: int = 0, prompted_blocks: int = 0) -> dict[str, float]:
    """Exact FLOPs of one image: `forward`, and `backward` with respect to activations and prompts only.

    A product of m×k by k×n is 2mkn. The last block computes the class token alone (its keys and values are whole).
    The backward pass of a product with frozen weights is one product of the same size; of attention, twice its
    forward. Block 0's q, k, v projection needs none: nothing below it learns.
    """
    d, hidden, tokens = config.width, int(config.width * config.mlp_ratio), config.tokens
    forward = 2.0 * (tokens - 1) * 3 * config.patch**2 * d
    backward = 0.0
    for block in range(config.depth):
        queries = 1 if block == config.depth - 1 else tokens
        keys = tokens + (prompt_length // 2 if block < prompted_blocks else 0)
        qkv = 2.0 * d * d * (queries + 2 * tokens)
        attention = 4.0 * queries * keys * d
        rest = 2.0 * queries * (d * d + 2 * d * hidden)
        forward += qkv + attention + rest
        backward += (qkv if block else 0.0) + 2 * attention + rest
    return {"forward": forward, "backward": backward}


def seconds_per_call(call: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 3) -> float:
    for _ in range(warmup):
        call()
    return statistics.median(seconds_of(call, device) for _ in range(repeats))


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The largest rates this machine shows for a plain product and a plain copy."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 2048
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    product = min(seconds_per_call(lambda: a @ b, device, 20) for _ in range(2))
    big = torch.randn((1 << 31 if on_gpu else 1 << 28) // 4, device=device)
    target = torch.empty_like(big)
    copy = min(seconds_per_call(lambda: target.copy_(big), device, 10) for _ in range(2))
    return {"matmul_tflops": 2 * n**3 / product / 1e12, "copy_gb_per_s": 2 * big.numel() * 4 / copy / 1e9}


def peak_memory(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


# ---------------------------------------------------------------------------------------------- our way


def measure_ours(
    config: ViTConfig, batch: int, device: torch.device, precision: str, steps: int, augment: str, other_bits: bool
) -> dict[str, Any]:
    """The product's own loop and evaluation on random images that are decoded already."""
    settings = Training(epochs=1, batch_size=batch, augment=augment)
    side = stored_side(config.image_size)
    count = batch * steps
    rng = np.random.default_rng(0)
    store = Store(rng.integers(0, 256, (count, 3, side, side), dtype=np.uint8), np.full(count, 4 / 3), "")
    images = Images(store, np.arange(count), np.arange(count) % CLASSES)
    torch.manual_seed(0)
    started = time.perf_counter()
    learner = Learner(
        ViT(config), "vq-prompt", size=config.image_size, training=settings, device=str(device), precision=precision
    )
    learner.method.start_task(TaskInfo(0, 0, CLASSES))
    learner.method.to(device)
    labels = images.labels.to(device)
    queries = learner.known_queries.for_training(images, settings, seed=0)
    batches = TaskBatches(images, labels, settings, 0, device, queries)

    def train(deterministic: bool = True) -> float:
        runtime = replace(learner.runtime, deterministic=deterministic)
        groups = learner.method.parameter_groups()
        loop = TrainingLoop(learner.method.losses, groups, learner.vit, batches, runtime, queries=queries is None)
        for _ in loop:
            pass
        return loop.seconds

    train()  # compiles, where there is a compiler
    learner.queries(images)
    learner.logits(images)
    wait(device)
    first_use = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training = count / statistics.median([train() for _ in range(3)])
    training_memory = peak_memory(device)
    evaluation = count / seconds_per_call(lambda: learner.logits(images), device, 3, warmup=0)
    without = None
    if device.type == "cuda" and other_bits:
        train(deterministic=False)
        without = count / statistics.median([train(deterministic=False) for _ in range(3)])
    plain, prompted = pass_flops(config), pass_flops(config, 8, 5)
    per_image = prompted["forward"] + prompted["backward"] + (plain["forward"] if augment == "crop" else 0.0)
    return {
        "training_images_per_s": training,
        "training_other_bits_images_per_s": without,
        "training_tflops": training * per_image / 1e12,
        "training_gflop_per_image": per_image / 1e9,
        "evaluation_images_per_s": evaluation,
        "evaluation_tflops": evaluation * prompted["forward"] / 1e12,
        "evaluation_gflop_per_image": prompted["forward"] / 1e9,
        "training_peak_gib": training_memory,
        "first_use_s": first_use,
    }


# ---------------------------------------------------------------------------------------------- the ordinary way


class OrdinaryAttention(nn.Module):
    """Attention as it is usually written: two products and a softmax, prompts concatenated to keys and values."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = like.heads, like.qkv, like.proj

    def forward(self, x: Tensor, prompt: Tensor | None = None) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if prompt is not None:
            half = prompt.shape[1] // 2
            rows = prompt.reshape(b, -1, self.heads, d // self.heads).permute(0, 2, 1, 3)
            k, v = torch.cat([rows[:, :, :half], k], dim=2), torch.cat([rows[:, :, half:], v], dim=2)
        weights = ((q @ k.transpose(-2, -1)) * (d // self.heads) ** -0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class OrdinaryModel(nn.Module):
    """Query pass, soft selection, nearest element, prompted pass, over the same (frozen) weights."""

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.vit = vit.requires_grad_(False)
        self.attention = nn.ModuleList(OrdinaryAttention(block.attn) for block in vit.blocks)
        width = vit.config.width
        self.keys = nn.ParameterList(nn.Parameter(torch.rand(10, width)) for _ in range(5))
        self.prompts = nn.ParameterList(nn.Parameter(torch.rand(10, 8, width)) for _ in range(5))
        self.head = nn.Linear(width, CLASSES)

    def encode(self, images: Tensor, prompts: list[Tensor] | None = None) -> Tensor:
        x = self.vit.patch_embed.proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.vit.cls_token.expand(len(x), -1, -1), x], dim=1) + self.vit.pos_embed
        for i, block in enumerate(self.vit.blocks):
            x = x + self.attention[i](block.norm1(x), prompts[i] if prompts and i < 5 else None)
            x = x + block.mlp(block.norm2(x))
        return self.vit.norm(x)[:, 0]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            query = self.encode(images)
        prompts, extra = [], images.new_zeros(())
        for keys, pool in zip(self.keys, self.prompts, strict=True):
            alpha = (query @ F.normalize(keys, dim=1).T).softmax(dim=1)
            soft = torch.einsum("bn,nld->bld", alpha, pool)
            distance = (soft[:, None] - pool[None]).square().sum(dim=(2, 3))
            hard = pool[distance.argmin(dim=1)]
            extra = extra + 0.4 * F.mse_loss(hard, soft.detach()) + 0.1 * F.mse_loss(soft, hard.detach())
            prompts.append(soft + (hard - soft).detach())
        return F.cross_entropy(self.head(self.encode(images, prompts)), labels) + extra


class OrdinaryData(torch.utils.data.Dataset):
    """JPEG files, opened, cropped, resized, flipped and normalized one by one with Pillow."""

    def __init__(self, folder: Path, count: int, size: int) -> None:
        self.size, self.count = size, count
        self.files = [folder / f"{i}.jpg" for i in range(min(count, 64))]
        rng = np.random.default_rng(0)
        for file in self.files:
            noise = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((299, 224)).save(file, "JPEG", quality=90)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = Image.open(self.files[i % len(self.files)]).convert("RGB")
        side = round((random.uniform(0.08, 1.0) * image.width * image.height) ** 0.5)
        side = min(side, image.width, image.height)
        left, top = random.randint(0, image.width - side), random.randint(0, image.height - side)
        box = (left, top, left + side, top + side)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (values - 0.45) / 0.225, i % CLASSES


def measure_ordinary(config: ViTConfig, batch: int, device: torch.device, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = OrdinaryModel(ViT(config)).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        loader = torch.utils.data.DataLoader(
            OrdinaryData(Path(folder), batch * steps, config.image_size),
            batch,
            shuffle=True,
            drop_last=True,
            num_workers=min(8, os.cpu_count() or 1) if on_gpu else 0,
            pin_memory=on_gpu,
            persistent_workers=on_gpu,
        )
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)

        def epoch() -> None:
            for images, labels in loader:
                optimizer.zero_grad()
                model.loss(images.to(device, non_blocking=True), labels.to(device)).backward()
                optimizer.step()

        taken = seconds_per_call(epoch, device, 3 if on_gpu else 1, warmup=1)
    return {"training_images_per_s": batch * steps / taken, "training_peak_gib": peak_memory(device)}


# ---------------------------------------------------------------------------------------------- the page


def show(name: str, row: dict[str, Any]) -> None:
    ours, known, ordinary = row["ours"], row.get("ours_known_queries"), row["ordinary"]

    def line(what: str, images: float, tflops: float, gflop: float, tail: str = "") -> None:
        print(f"  {what:<22}{images:9.1f} images/s {tflops:8.3f} TFLOP/s at {gflop:6.2f} GFLOP per image{tail}")

    print(f"\n{name} px, batch {row['batch']}")
    memory = f", {ours['training_peak_gib']:.1f} GiB" if ours["training_peak_gib"] else ""
    line("training", ours["training_images_per_s"], ours["training_tflops"], ours["training_gflop_per_image"],
         f" = {row['training_fraction_of_ceiling']:.1%} of the ceiling{memory}")  # fmt: skip
    if other := ours["training_other_bits_images_per_s"]:
        ratio = ours["training_images_per_s"] / other
        print(f"  … deterministic=False {other:9.1f} images/s; the same bits every time cost {1 - ratio:.1%}")
    if known:
        line("… with known queries", known["training_images_per_s"], known["training_tflops"],
             known["training_gflop_per_image"])  # fmt: skip
    line("evaluation", ours["evaluation_images_per_s"], ours["evaluation_tflops"], ours["evaluation_gflop_per_image"],
         f" = {row['evaluation_fraction_of_ceiling']:.1%} of the ceiling")  # fmt: skip
    if ordinary:
        print(
            f"  ordinary training     {ordinary['training_images_per_s']:9.1f} images/s; ours is "
            f"{row['training_over_ordinary']:.2f} times that"
            + (f", {row['known_queries_over_ordinary']:.2f} with known queries" if known else "")
        )
    print(f"  first use, with compilation: {ours['first_use_s']:.1f} s")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help="steps per measurement (default: 64 on CUDA, 3 on a CPU)")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--batch", type=int, help="another batch size (default: 128 on CUDA, less on a CPU)")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"), help="of our way")
    parser.add_argument("--no-ordinary", action="store_true", help="leave out the ordinary way, which takes longest")
    parser.add_argument("--no-known-queries", action="store_true", help="leave out training on images as they are")
    parser.add_argument("--no-other-bits", action="store_true", help="leave out training without the same bits")
    args = parser.parse_args()
    device = torch.device(args.device)
    steps = args.steps or (64 if device.type == "cuda" else 3)
    limit = ceilings(device, pick_precision(args.precision, device))
    report: dict[str, Any] = {"hardware": hardware(device), "ceilings": limit, "models": {}}
    print(report["hardware"])
    print(f"ceilings: {limit['matmul_tflops']:.3f} TFLOP/s matrix product, {limit['copy_gb_per_s']:.0f} GB/s copy")
    for name in args.model or PLAN[device.type]:
        config, batch = MODELS[name], args.batch or PLAN[device.type].get(name, 128)
        ours = measure_ours(config, batch, device, args.precision, steps, "crop", not args.no_other_bits)
        known = (
            None if args.no_known_queries else measure_ours(config, batch, device, args.precision, steps, "none", False)
        )
        ordinary = None if args.no_ordinary else measure_ordinary(config, batch, device, max(2, steps // 2))
        report["models"][name] = row = {
            "batch": batch,
            "ours": ours,
            **({"ours_known_queries": known} if known else {}),
            "ordinary": ordinary,
            "training_fraction_of_ceiling": ours["training_tflops"] / limit["matmul_tflops"],
            "evaluation_fraction_of_ceiling": ours["evaluation_tflops"] / limit["matmul_tflops"],
        }
        if ordinary:
            row["training_over_ordinary"] = ours["training_images_per_s"] / ordinary["training_images_per_s"]
            if known:
                row["known_queries_over_ordinary"] = known["training_images_per_s"] / ordinary["training_images_per_s"]
        show(name, row)
    write_json(args.json, report)


if __name__ == "__main__":
    main()

"""Print the columns of docs/methods.md that are counted or measured, not claimed.

    python tools/methods_table.py

Prompting parameters are counted on ViT-B/16 with 10 tasks. What is kept of a class, and the passes an image makes
through the backbone, are measured while two small tasks are learned with crops, on a shallow ViT with random weights:
neither depends on depth, weights or data.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from vqprompt.backbones.vit import Block, ViT, ViTConfig
from vqprompt.data.store import Store
from vqprompt.data.stream import Dataset, Stream
from vqprompt.learner.learner import Learner
from vqprompt.methods import METHODS
from vqprompt.training.settings import Training

HEADINGS = ("method", "parameters", "kept, D = 384", "kept, D = 768", "passes")
VIT_B16 = ViTConfig(width=768, depth=12, heads=12, patch=16)
QUICK = {"length": 2, "rebalancing": {"epochs": 1, "ratio": 1}, "identity_rebalancing": {"epochs": 1, "ratio": 1}}


def parameters(name: str, tasks: int = 10) -> int:
    with torch.device("meta"):  # shapes are enough to count
        return METHODS[name](ViT(VIT_B16), METHODS[name].Options(), tasks).parameter_counts()["prompting"]


def toy_stream(tasks: int) -> Stream:
    labels, is_test = np.arange(4).repeat(3), np.tile([False, False, True], 4)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 3, 16, 16), dtype=np.uint8)
    return Stream(Dataset("toy", ["a", "b", "c", "d"], Store(pixels, np.ones(len(labels)), ""), labels, is_test), tasks)


def learn(name: str, width: int) -> tuple[Learner, str]:
    """A learner of two tasks, and an image's passes in training the second: all, in brackets those with a gradient."""
    vit = ViT(ViTConfig(width=width, depth=5, heads=width // 64, patch=14, image_size=14))
    options = {key: value for key, value in QUICK.items() if key in METHODS[name].Options.model_fields}
    training = Training(epochs=1, batch_size=4, augment="crop")
    learner = Learner(vit, name, tasks=2, training=training, device="cpu", compile="off", **options)
    count: Counter[str] = Counter()

    def watch(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if isinstance(module, Block) and learner.method.training:
            count["passes"] += len(output)
            count["with gradient"] += len(output) * output.requires_grad

    hook = register_module_forward_hook(watch)  # on all modules: a teacher has blocks of its own
    for task in toy_stream(1 if METHODS[name].joint else 2):
        count.clear()
        learner.learn(task, lambda images, what: count.update({what: images}))
    hook.remove()
    passes, gradient = (count[key] / vit.config.depth / count["learning"] for key in ("passes", "with gradient"))
    return learner, f"{passes:g} ({gradient:g})"


def kept(learner: Learner) -> str:
    if learner.method.exemplar_count():
        return f"{learner.method.options.exemplars:,} images in all"
    return f"{learner.method.bytes_per_class():,} B"


def row(name: str) -> tuple[str, ...]:
    (small, passes), (large, _) = learn(name, 384), learn(name, 768)
    return name, f"{parameters(name):,}", kept(small), kept(large), passes


if __name__ == "__main__":
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *map(row, METHODS)):
        print("| " + " | ".join(cells) + " |", flush=True)

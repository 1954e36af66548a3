"""Print the columns of docs/methods.md that are counted or measured.

    python tools/methods_table.py

Prompting parameters are counted on ViT-B/16 with 10 tasks. The bytes kept per class, and the number of passes of
an image through the backbone, are measured while two small tasks are learned with crops, on a shallow ViT with random
weights: neither depends on depth, weights or data. RanPAC keeps one number per class and random feature; it is measured
with few of them and scaled up, because solving for ten thousand takes minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_hook

from vqprompt.core.backbones.vit import Block, ViT, ViTConfig
from vqprompt.core.progress import Progress, Stage
from vqprompt.core.statistics.gaussians import ClassStatistics
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS, after_all_tasks
from vqprompt.research.methods.base import Method
from vqprompt.research.training.settings import Training

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from common import noise_stream

HEADINGS = ("method", "parameters", "kept, D = 384", "kept, D = 768", "passes")
VIT_B16 = ViTConfig(width=768, depth=12, heads=12, patch=16)
QUICK = {
    "map_steps": 20,
    "length": 2,
    "projection": 40,
    "rebalancing": {"epochs": 1, "ratio": 1, "samples": 0},
    "identity_rebalancing": {"epochs": 1, "ratio": 1},
}


def parameters(name: str, tasks: int = 10) -> int:
    return after_all_tasks(METHODS[name], VIT_B16, tasks).parameter_counts()["prompting"]


def learn(name: str, width: int) -> tuple[Learner, str]:
    """A learner of two tasks, and the passes per image in the last task that it trained in: all, and in brackets those
    with a gradient."""
    vit = ViT(ViTConfig(width=width, depth=5, heads=width // 64, patch=14, image_size=14))
    options = {key: value for key, value in QUICK.items() if key in METHODS[name].Options.model_fields}
    training = Training(epochs=1, batch_size=4, augment="crop")
    learner = Learner(vit, name, tasks=2, training=training, device="cpu", compile="off", **options)
    count: Counter[str] = Counter()
    measured = "0 (0)"  # of a method that never trains

    def watch(module: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
        if isinstance(module, Block) and learner.method.training:
            count["passes"] += len(outputs[0])
            count["with gradient"] += len(outputs[0]) * any(output.requires_grad for output in outputs)

    hook = register_module_forward_hook(watch)  # on all modules, because a teacher has blocks of its own
    tasks = [4] if METHODS[name].joint else [2, 2]  # classes per task
    for task in noise_stream(tasks, [2] * len(tasks), test=1, side=16):
        count.clear()
        learner.learn(task, lambda event: count.update(_images(event)))
        if count["images"]:
            passes, gradient = (count[key] / vit.config.depth / count["images"] for key in ("passes", "with gradient"))
            measured = f"{passes:g} ({gradient:g})"
    hook.remove()
    return learner, measured


def _images(event: Progress) -> dict[str, int]:
    """How many images training shows: the total that every event of it says, counted once."""
    last = event.stage is Stage.LEARNING and event.done == event.total
    return {"images": int(event.total)} if last else {}


def kept(learner: Learner) -> str:
    if learner.method.exemplar_count():
        return f"{learner.method.options.exemplars:,} images in total"
    few, all_features = (getattr(o, "projection", 1) for o in (learner.method.options, type(learner.method).Options()))
    return f"{bytes_per_class(learner.method) * all_features // few:,} B"


def bytes_per_class(method: Method) -> int:
    """Without the class's row in the classifier, and without a matrix that all classes share."""
    tables = (getattr(method, name, None) for name in ("prototypes", "precisions", "weight", "unaligned"))
    rows = [table for table in tables if table is not None]
    for statistics in (module for module in method.modules() if isinstance(module, ClassStatistics)):
        rows += [statistics.means, statistics.shares, *([] if statistics.kind == "shared" else [statistics.spread])]
    return sum(table[0].nbytes for table in rows if len(table))


def row(name: str) -> tuple[str, ...]:
    (small, passes), (large, _) = learn(name, 384), learn(name, 768)
    return name, f"{parameters(name):,}", kept(small), kept(large), passes


if __name__ == "__main__":
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *map(row, METHODS)):
        print("| " + " | ".join(cells) + " |", flush=True)

"""A method and a data set for vqprompt, in a package of their own."""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset
from vqprompt.core.progress import Report
from vqprompt.research.datasets import DatasetEntry
from vqprompt.research.methods.base import Losses, Method, Options, TaskInfo, View
from vqprompt.research.methods.prompts import check_blocks
from vqprompt.research.training.rebalancing import Rebalancing


class FirstTaskOptions(Options):
    length: int = Field(8, ge=2, multiple_of=2, description="length of the prompt: half for keys, half for values")
    blocks: list[int] = Field([0, 1, 2, 3, 4], description="attention blocks that get the prompt")
    rebalancing: Rebalancing = Rebalancing(how="closed-form", covariance="shared")


class FirstTaskPrompt(Method):
    title = "First-task prompt"
    year = 2023
    summary = "one prompt, learned in the first task; a closed-form classifier"
    Options = FirstTaskOptions

    def __init__(self, vit: ViT, options: FirstTaskOptions, tasks: int) -> None:
        super().__init__(vit, options, tasks)
        check_blocks(options.blocks, vit.config.depth)
        self.prompt = nn.Parameter(0.1 * torch.randn(len(options.blocks), 1, options.length, vit.config.width))

    def grow(self, task: TaskInfo) -> None:
        super().grow(task)
        self.prompt.requires_grad_(task.number == 0)  # later tasks have nothing to train

    def features(self, view: View) -> tuple[Tensor, Losses]:
        prompts = dict(zip(self.options.blocks, self.prompt, strict=True))
        return self.vit.encode(view.tokens, prompts).float(), {}


CLASSES, IMAGES = 6, 20  # the last 5 images of each class are for testing


def open_stripes(path: str | None, side: int, seed: int, progress: Report) -> Dataset:
    """Stripes in six directions, drawn now. A data set on disk would be read from `path`."""
    labels, shift = np.repeat(np.arange(CLASSES), IMAGES), np.random.default_rng(0).uniform(0, 6, CLASSES * IMAGES)
    y, x = np.mgrid[:side, :side] * 40 / side
    angle = (labels * np.pi / CLASSES)[:, None, None]
    waves = np.sin(x * np.cos(angle) + y * np.sin(angle) + shift[:, None, None])
    pixels = (127 * (1 + waves)).astype(np.uint8)[:, None]  # [n, 1, side, side]
    store = Store(pixels, aspect=np.ones(len(labels)), fingerprint=f"stripes-{side}")
    names = [f"{180 * c // CLASSES} degrees" for c in range(CLASSES)]
    return Dataset("stripes", names, store, labels, is_test=np.arange(len(labels)) % IMAGES >= 15)


STRIPES = DatasetEntry("6 directions of stripes", open_stripes, defaults={"tasks": 3, "size": 28, "augment": "none"})

"""The inputs of each training step: shuffled batches, crops and flips, all drawn from seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.images import Images
from vqprompt.core.data.views import central_boxes, random_boxes, random_colors, render, window_boxes
from vqprompt.core.runtime.device import derive_seed
from vqprompt.core.runtime.distributed import ALONE, Ranks
from vqprompt.research.training.optim import Inputs
from vqprompt.research.training.settings import Training

MIXED = 2  # groups whose images are shuffled together; the reader of parquet files keeps three in memory
BatchQueries = Callable[[int, Tensor, Tensor | None], Tensor]
"""Queries [B, D] of an epoch's batch, by its number, its images (indices), and which of them are mirrored."""
KnownQueries = Callable[[int, Sequence[Tensor]], BatchQueries]
"""Queries of training views that are not computed in every step, by the epoch and its batches (indices of images)."""


@dataclass(eq=False)
class TaskBatches:
    """The training images of one task as batches of pixels, boxes, flips, labels and, where known, queries."""

    images: Images
    labels: Tensor  # positions in the head, on the device
    settings: Training
    seed: int
    device: torch.device
    queries: KnownQueries | None = None
    ranks: Ranks = ALONE  # the processes that share each batch

    def __post_init__(self) -> None:
        self.sizes = [[len(batch) for batch in batches] for batches in self._orders()]  # of each epoch's batches

    def _orders(self) -> Iterator[list[Tensor]]:
        """The batches of one epoch after the other; only one of them is in memory."""
        s, images = self.settings, len(self.images)
        return epoch_batches(images, s.batch_for(images), s.epochs, self.seed, self.images.groups)

    def inputs(self, first: int = 0) -> Iterator[Inputs]:
        """The inputs of all steps, from the epoch `first` on."""
        for epoch, batches in islice(enumerate(self._orders()), first, None):
            queries = None if self.queries is None else self.queries(epoch, batches)
            views = epoch_views(self.images, batches, self.settings, self.seed, epoch, self.device, self.ranks.rows)
            for number, (index, inputs) in enumerate(views):
                index = index.to(self.device, non_blocking=True)
                inputs["labels"] = self.labels[index]
                if queries is not None:
                    inputs["query"] = queries(number, index, inputs.get("flips"))
                yield inputs


def epoch_batches(
    count: int, batch_size: int, epochs: int, seed: int, groups: np.ndarray | None = None
) -> Iterator[list[Tensor]]:
    """Shuffled index batches of each epoch, all of one size (compiled and recorded code needs that).

    Images that do not fill a batch are left out of the epoch and come first in the next one, so every image is seen.
    With fewer than four batches per epoch, many images would be left out; then the next epoch shows the rest in
    addition to all images. A single epoch, or a task smaller than a batch, leaves out nothing.

    groups: the group of each image, if the images of a group are best read together. Then the groups are shuffled, and
    the images of `MIXED` groups at a time.
    """
    rest = torch.empty(0, dtype=torch.long)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
        order = torch.randperm(count, generator=generator)
        if groups is not None:
            own = torch.from_numpy(groups).long()
            turn = torch.randperm(int(own.max()) + 1, generator=generator) // MIXED
            order = order[turn[own[order]].argsort(stable=True)]
        if count < batch_size:
            yield [order]
            continue
        if count >= 4 * batch_size:
            order = order[~torch.isin(order, rest)]
        batches = list(torch.split(torch.cat([rest, order]), batch_size))
        rest = batches.pop() if len(batches[-1]) < batch_size and epochs > 1 else rest[:0]
        yield batches


def epoch_views(
    images: Images, batches: Sequence[Tensor], settings: Training, seed: int, epoch: int, device: torch.device,
    rows: Callable[[int, int], slice] = ALONE.turn,
) -> Iterator[tuple[Tensor, Inputs]]:  # fmt: skip
    """For each step of an epoch: which images, and their pixels, boxes and flips on the device.

    rows: which rows of a batch to give, by its number and size. A batch without such rows is left out.
    """
    aspect, parts = images.aspect, [rows(number, len(batch)) for number, batch in enumerate(batches)]

    def drawn() -> Iterator[Inputs]:
        generator = torch.Generator().manual_seed(derive_seed(seed, "augment", epoch))
        for batch, own in zip(batches, parts, strict=True):  # drawn for all rows, so that all processes draw the same
            boxes, flips = draw_augmentation(aspect[batch], settings, generator)
            inputs = {"boxes": boxes} if flips is None else {"boxes": boxes, "flips": flips}
            if settings.augment == "crop-color":
                inputs["colors"] = random_colors(len(batch), generator)
            if len(batch[own]):
                yield {name: values[own].to(device, non_blocking=True) for name, values in inputs.items()}

    read = [batch[own] for batch, own in zip(batches, parts, strict=True) if len(batch[own])]
    for (index, pixels), inputs in zip(images.batches(read, device), drawn(), strict=True):
        yield index, {"pixels": pixels, **inputs}


def draw_augmentation(aspect: Tensor, settings: Training, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Boxes to crop, and which images to flip."""
    flips = torch.rand(len(aspect), generator=generator) < 0.5 if settings.augment != "none" else None
    if settings.augment in ("crop", "crop-color"):
        return random_boxes(aspect, generator, (settings.crop_area, 1.0)), flips
    if settings.augment == "window":
        return window_boxes(len(aspect), generator), flips
    return central_boxes(aspect, settings.test_crop), flips


def draw(inputs: Inputs, vit: ViT) -> Tensor:
    """The images of a training view, normalized."""
    flips, colors = inputs.get("flips"), inputs.get("colors")
    return render(inputs["pixels"], inputs["boxes"], flips, vit.config, vit.dtype, vit.compiled, colors)

"""What each training step looks at: shuffled batches, crops and flips, all drawn from seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vqprompt.backbones.vit import ViT
from vqprompt.data.images import Images
from vqprompt.data.views import central_boxes, random_boxes, render
from vqprompt.runtime import derive_seed
from vqprompt.training.optim import Inputs
from vqprompt.training.settings import Training


def epoch_batches(count: int, batch_size: int, epochs: int, seed: int) -> list[list[Tensor]]:
    """Shuffled index batches of every epoch, all of one size (what compiled and recorded code wants).

    What does not fill a batch is left out of the epoch and comes first in the next one, so no image goes unseen. With
    fewer than four batches an epoch that would leave out much: there the next epoch takes the rest in addition. A
    single epoch, or a task smaller than a batch, leaves out nothing.
    """
    schedule, rest = [], torch.empty(0, dtype=torch.long)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
        order = torch.randperm(count, generator=generator)
        if count < batch_size:
            schedule.append([order])
            continue
        if count >= 4 * batch_size:
            order = order[~torch.isin(order, rest)]
        batches = list(torch.cat([rest, order]).split(batch_size))
        rest = batches.pop() if len(batches[-1]) < batch_size and epochs > 1 else rest[:0]
        schedule.append(batches)
    return schedule


def clean_images(vit: ViT, pixels: Tensor, aspect: Tensor, test_crop: float) -> Callable[[], Tensor]:
    """Images without augmentation, rendered when asked for."""
    boxes = central_boxes(aspect, test_crop).to(pixels.device)
    return lambda: render(pixels, boxes, None, vit.config, vit.dtype, vit.compiled)


def draw_augmentation(aspect: Tensor, settings: Training, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Boxes to crop, and which images to flip."""
    flips = torch.rand(len(aspect), generator=generator) < 0.5 if settings.augment != "none" else None
    if settings.augment == "crop":
        return random_boxes(aspect, generator), flips
    return central_boxes(aspect, settings.test_crop), flips


def epoch_views(
    images: Images, batches: Sequence[Tensor], settings: Training, seed: int, epoch: int, device: torch.device
) -> Iterator[tuple[Tensor, Inputs]]:
    """What each step of an epoch looks at: which images, and their pixels, boxes and flips on the device."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "augment", epoch))
    aspect = images.aspect
    for index, pixels in images.batches(batches, device):
        boxes, flips = draw_augmentation(aspect[index], settings, generator)
        inputs = {"pixels": pixels, "boxes": boxes.to(device, non_blocking=True)}
        if flips is not None:
            inputs["flips"] = flips.to(device, non_blocking=True)
        yield index, inputs


def draw(inputs: Inputs, vit: ViT) -> Tensor:
    """The images of a view, normalized."""
    return render(inputs["pixels"], inputs["boxes"], inputs.get("flips"), vit.config, vit.dtype, vit.compiled)

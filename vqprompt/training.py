"""The one training loop (paper, section 4.4): AdamW, per-iteration cosine, everything drawn from seeds.

All randomness of an epoch comes from (seed, task, epoch), and kernels add up in the same order every time, so an epoch
can be repeated, and a run that was killed continues to the same result as one that was not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from vqprompt.images import Images
from vqprompt.methods.base import View
from vqprompt.optim import Inputs, Losses, OptimizerName, Recorded, cosine, make_optimizer, set_rates
from vqprompt.views import central_boxes, random_boxes, render
from vqprompt.vit import ViT

Augment = Literal["crop", "flip", "none"]


class Training(BaseModel, extra="forbid"):
    """How a task is learned, whatever the method."""

    epochs: int = Field(20, ge=1)
    batch_size: int = Field(128, ge=1)
    lr: float = Field(0.0025, gt=0, description="the classifier's peak rate")
    min_lr: float = Field(1e-6, ge=0, description="where the cosine ends")
    weight_decay: float = Field(0.0, ge=0)
    optimizer: OptimizerName = "adamw"
    augment: Augment = Field("crop", description="random resized crop and flip, flip alone, or none")
    test_crop: float = Field(0.875, ge=0, le=1, description="side of the central test crop; 0: whole image, squashed")


def derive_seed(*parts: int | str) -> int:
    """Independent seeds for independent purposes."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


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


@contextmanager
def same_bits(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Inside, CUDA uses only kernels that give the same bits every time, and refuses what has none. (CPUs have no other
    kind.) What matters in practice is attention and its gradient: cuDNN's are else added up in any order."""
    if device.type != "cuda" or not wanted:
        yield
        return
    more: Any = torch.utils.deterministic
    mode, filling = torch.get_deterministic_debug_mode(), more.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    more.fill_uninitialized_memory = False  # a help for debugging, and slow
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        more.fill_uninitialized_memory = filling


def fit(
    losses_of: Callable[[View], Losses],
    groups: Sequence[dict[str, Any]],
    vit: ViT,
    images: Images,
    labels: Tensor,
    settings: Training,
    seed: int,
    device: torch.device,
    *,
    task: int = 0,
    queries: Sequence[Tensor] | None = None,
    epoch_queries: Callable[[int, Sequence[Tensor]], Sequence[Tensor]] | None = None,
    autocast: bool = False,
    on_batch: Callable[[int], None] = lambda count: None,
    on_epoch: Callable[[int, Losses, torch.optim.Optimizer], None] = lambda epoch, losses, optimizer: None,
    resume: tuple[int, dict[str, Any]] | None = None,
) -> tuple[int, float]:
    """Minimize the sum of `losses_of(view)` over the images; returns images seen and seconds taken.

    labels: positions in the head, on `device`. queries: known queries of the images as they are and, where there are
    flips, mirrored. epoch_queries: gives those of an epoch's augmented views, a tensor a batch. on_epoch: gets each
    term's values [steps of the epoch], on `device`. resume: the epoch to go on with and the optimizer's state after the
    one before.
    """
    schedule = epoch_batches(len(images), settings.batch_size, settings.epochs, seed)
    steps = sum(len(batches) for batches in schedule)
    optimizer = make_optimizer(groups, settings.optimizer, settings.lr, settings.weight_decay)
    first_epoch = 0
    if resume is not None:
        first_epoch, saved = resume
        here = [
            {key: group[key] for key in ("fused", "capturable") if key in group} for group in optimizer.param_groups
        ]
        groups_here = [{**group, **own} for group, own in zip(saved["param_groups"], here, strict=True)]
        optimizer.load_state_dict({**saved, "param_groups": groups_here})  # another machine may have written it

    def take_step(inputs: Inputs) -> Losses:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            losses = losses_of(View(vit, lambda: draw(inputs, vit), inputs.get("query"), inputs["labels"], task))
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        return {name: value.detach() for name, value in losses.items()}

    recorded = Recorded(take_step, device)
    step = sum(len(batches) for batches in schedule[:first_epoch])
    seen, started = 0, time.perf_counter()
    for epoch, batches in enumerate(schedule[first_epoch:], start=first_epoch):
        known = epoch_queries(epoch, batches) if epoch_queries is not None else None
        losses, taken = Losses(), list[Tensor]()
        for n, (index, inputs) in enumerate(epoch_views(images, batches, settings, seed, epoch, device)):
            set_rates(optimizer, cosine(settings.lr, settings.min_lr, step, max(steps - 1, 1)))
            where = index.to(device, non_blocking=True)
            inputs["labels"] = labels[where]
            if known is not None:
                inputs["query"] = known[n]
            elif queries is not None:
                inputs["query"] = queries[0][where]
                if "flips" in inputs:
                    inputs["query"] = torch.where(inputs["flips"][:, None], queries[1][where], inputs["query"])
            losses = recorded(inputs)
            taken.append(torch.stack(list(losses.values())))  # a copy (a replay writes over its losses), read by nobody
            step += 1
            seen += len(index)
            on_batch(len(index))
        on_epoch(epoch, dict(zip(losses, torch.stack(taken, dim=1), strict=True)), optimizer)
    optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seen, time.perf_counter() - started

"""The one training loop (paper, section 4.4): AdamW, per-iteration cosine, everything drawn from seeds.

All randomness of an epoch comes from (seed, task, epoch), and kernels add up in the same order every time, so an epoch
can be repeated, and a run that was killed continues to the same result as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vqprompt.backbones.vit import ViT
from vqprompt.data.images import Images
from vqprompt.training.batches import draw, epoch_batches, epoch_views
from vqprompt.training.optim import Inputs, Losses, cosine, make_optimizer, set_rates
from vqprompt.training.recorded import Recorded
from vqprompt.training.settings import Training
from vqprompt.training.view import View


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

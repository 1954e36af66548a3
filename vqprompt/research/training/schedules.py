"""Learning rates over a task: our own schedule, and those of published code.

A schedule gives the rate of a parameter group from its `scale`, because some published ones use the same rate for all
groups in some steps, whatever their scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vqprompt.research.training.settings import Training

Rate = Callable[[float], float]
"""The rate of a parameter group, by its scale."""


def cosine_decay(peak: float, low: float, step: int, steps: int) -> float:
    """From `peak` at step 0 down to `low` at step `steps`."""
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * step / steps))


def rate_at(settings: Training, epoch: int, step: int, steps: int) -> Rate:
    """The rate of one step. epoch, step: which one, from 0. steps: how many the task has.

    cosine        ours: per step, from lr to min_lr
    constant      EvoPrompt
    steps         SLCA, HiDe-Prompt: lr, times gamma after each milestone
    epoch-cosine  HiDe-Prompt on ImageNet-R: per epoch, one epoch late, as its scheduler is called after an epoch
    released      VQ-Prompt: the first step at the full rate, then `hold` steps at min_lr, then cosine per step
    coda          CODA-Prompt, and VQ-Prompt on CUB-200: a quarter of a cosine, per epoch
    """
    s = settings
    if s.schedule == "released":
        return lambda scale: _released(s, step, steps, s.lr * scale)
    if s.schedule == "epoch-cosine":
        return lambda scale: cosine_decay(s.lr * scale, s.min_lr, max(epoch - 1, 0), s.epochs)
    if s.schedule == "constant":
        rate = s.lr
    elif s.schedule == "steps":
        rate = s.lr * s.gamma ** sum(epoch >= share * s.epochs - 1e-9 for share in s.milestones)
    elif s.schedule == "coda":
        rate = s.lr * math.cos(99 * math.pi * epoch / (200 * max(s.epochs - 1, 1)))
    else:
        rate = cosine_decay(s.lr, s.min_lr, step, max(steps - 1, 1))
    return lambda scale: rate * scale


def _released(settings: Training, step: int, steps: int, peak: float) -> float:
    """The published code sets the first rate before its scheduler, so the schedule begins one step late. It counts
    `nominal_steps` per epoch: a task with fewer does not reach the end, a task with more stays at min_lr."""
    planned, late = settings.nominal_steps * settings.epochs or steps, step - 1
    if step == 0:
        return peak
    if late < settings.hold or late >= planned:
        return settings.min_lr
    return cosine_decay(peak, settings.min_lr, late - settings.hold, planned - settings.hold)

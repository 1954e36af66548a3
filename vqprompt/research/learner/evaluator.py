"""Shows un-augmented images to a method: features, scores, queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from vqprompt.core.data.images import Images
from vqprompt.core.data.views import central_boxes, render
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.runtime.device import Runtime
from vqprompt.core.runtime.distributed import ShardedRows
from vqprompt.research.learner.queries import QueryCache
from vqprompt.research.learner.rows import JoinedRows
from vqprompt.research.methods.base import Method, View
from vqprompt.research.training.batches import draw, epoch_views
from vqprompt.research.training.settings import Training

BATCH = {"cuda": 512}  # images at a time
BATCH_OTHERWISE = 64
Views = Iterator[View]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for the test images of several tasks, one after the other.

    truth, guesses: [n], positions of classes among all that were learned. probability: [n], of the guess. within: [n],
    guesses among the classes of an image's task. sizes: the number of images per task.
    """

    truth: Tensor
    guesses: Tensor
    probability: Tensor
    within: Tensor
    sizes: list[int]

    @property
    def right(self) -> Tensor:
        return self.guesses == self.truth

    def accuracies(self, within: bool = False) -> list[float]:
        """Percent right on each task. within: if the task of each image were known."""
        right = self.within == self.truth if within else self.right
        return [100 * int(part.sum()) / len(part) for part in torch.split(right, self.sizes)]


class Evaluator:
    """Computes on clean views of images, in order, in batches of one size.

    test_crop: see `Training`.
    """

    def __init__(self, method: Method, runtime: Runtime, test_crop: float) -> None:
        self.method, self.runtime, self.test_crop = method, runtime, test_crop
        self.known: QueryCache | None = None  # without one, queries are computed where they are needed
        self.progress: Report = ignore

    @contextmanager
    def reporting(self, progress: Report) -> Iterator[None]:
        """Send the progress of the work inside this block to `progress`."""
        self.progress = progress
        try:
            yield
        finally:
            self.progress = ignore

    def features(self, images: Images, task: int | None = None) -> ShardedRows:
        """Features [n, D]. task: the number of their task, if they are its training images."""
        known = self.known_rows(images, again=False)
        return self._compute(images, partial(self._views, images, known, task), self._features_of, Stage.STATISTICS)

    def augmented_features(self, images: Images, settings: Training, seed: int, task: int | None = None) -> ShardedRows:
        """Features [n, D] of one augmented view of each image, drawn from the seed."""
        vit, runtime, batches = self.method.vit, self.runtime, self._batches(images)

        def views() -> Iterator[View]:
            for _, inputs in epoch_views(images, batches, settings, seed, 0, runtime.device, runtime.ranks.turn):
                yield View(vit, partial(draw, inputs, vit), task=task)

        return self._compute(images, views, self._features_of, Stage.STATISTICS)

    def logits(self, images: Images) -> Tensor:
        """Scores [n, classes]."""
        views = partial(self._views, images, self.known_rows(images))
        return self._compute(images, views, lambda view: self.method.logits(view).float(), Stage.TESTING).whole()

    def guesses(
        self, images: Images, known: JoinedRows | None, candidates: Tensor, task_of: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best class of each image [n], its probability [n], and the best of its task [n]. Only the scores of one
        batch are in memory. candidates: whether a task has a class [tasks, classes]. task_of: the task of each [n]."""
        device = self.runtime.device  # moved there once: to copy something per batch would wait for the batch before
        candidates = candidates.to(device)
        tasks = iter(self._own(task_of.to(device).split(list(map(len, self._batches(images))))))

        def best(view: View) -> Tensor:
            logits = self.method.logits(view)
            probability = logits.float().softmax(1).max(1).values
            others = ~candidates[next(tasks)]
            within = logits.masked_fill(others, -torch.inf).argmax(1)
            return torch.stack([logits.argmax(1).double(), probability.double(), within.double()], dim=1)

        answers = self._compute(images, partial(self._views, images, known), best, Stage.TESTING).whole()
        return answers[:, 0].long(), answers[:, 1].float(), answers[:, 2].long()

    def queries(self, images: Images) -> ShardedRows:
        """Features without prompts [n, D]: from the cache, or computed now."""
        known, batches = self.known_rows(images, again=False) if self.method.uses_query else None, self._batches(images)
        if known is None:
            return self._compute(images, partial(self._views, images), lambda view: view.query)
        own, sizes = self._own(batches), list(map(len, batches))
        return ShardedRows(self.runtime.ranks, sizes, lambda: (cast(Tensor, known[batch]) for batch in own))

    def compute_known(self, images: Images, mirrored: bool = False) -> ShardedRows:
        """What the cache keeps, computed now: `frozen_features`, or queries of the images as they are or mirrored. No
        progress is reported."""
        views = partial(self._views, images)
        if self.method.uses_frozen:
            return self._compute(images, views, self.method.frozen_features)
        return self._compute(images, views, lambda view: (view.mirrored() if mirrored else view).query)

    def known_rows(self, *sets: Images, again: bool = True) -> JoinedRows | None:
        """Rows of the cache that the method uses, for the images of these sets, one after the other. None if there are
        none. There are none of a backbone that learns: every step changes them."""
        used = self.method.uses_query or self.method.uses_frozen
        if self.known is None or not used or self.method.tunes_backbone:
            return None
        parts = [self.known.of(images, again=again) for images in sets]
        return None if all(part is None for part in parts) else JoinedRows(parts, list(map(len, sets)))

    def _features_of(self, view: View) -> Tensor:
        return self.method.features(view)[0].float()

    def _views(self, images: Images, known: JoinedRows | None = None, task: int | None = None) -> Views:
        """Clean views of the batches that this process computes. known: what `known_rows` gives."""
        aspect, device, vit = images.aspect, self.runtime.device, self.method.vit
        for index, pixels in images.batches(self._own(self._batches(images)), device):
            boxes = central_boxes(aspect[index], self.test_crop).to(device, non_blocking=True)
            drawn = partial(render, pixels, boxes, None, vit.config, vit.dtype, vit.compiled)
            rows = None if known is None else known[index]
            query, frozen = (None, rows) if self.method.uses_frozen else (rows, None)
            yield View(vit, drawn, query, task=task, known_frozen=frozen)

    def _compute(
        self, images: Images, views: Callable[[], Views], work: Callable[[View], Tensor], stage: Stage | None = None
    ) -> ShardedRows:
        """What `work` makes of views, batch by batch. stage: of the progress that is reported, if any."""
        ranks, batches, count = self.runtime.ranks, self._batches(images), len(images)
        progress = self.progress

        def computed() -> Iterator[Tensor]:
            done = 0
            for view, batch in zip(views(), self._own(batches), strict=True):
                with self._evaluating():
                    values = work(view)
                done = min(done + len(batch) * ranks.count, count)
                if stage is not None:
                    progress(Progress(stage, done, count))
                yield values

        return ShardedRows(ranks, list(map(len, batches)), computed)

    def _own(self, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """The batches that this process computes."""
        return batches[self.runtime.ranks.rank :: self.runtime.ranks.count]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """For the work on one batch. Never `yield` inside this block: the caller would run with these settings. A
        method that is not in training mode is left as it is, so that several threads can use it."""
        method, training = self.method, self.method.training
        if training:
            method.eval()
        try:
            with torch.no_grad(), self.runtime.repeatable(), self.runtime.autocast(method.vit):
                yield
        finally:
            if training:
                method.train()

    def _batches(self, images: Images) -> tuple[Tensor, ...]:
        """Indices of all images, in order."""
        order, size = torch.arange(len(images)), BATCH.get(self.runtime.device.type, BATCH_OTHERWISE)
        if self.runtime.device.type == "cuda":  # of almost equal size: a small last batch would be slow
            return torch.tensor_split(order, max(math.ceil(len(order) / size), 1))
        return torch.split(order, size)

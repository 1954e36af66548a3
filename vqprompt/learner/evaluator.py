"""Shows un-augmented images to a method: features, scores, queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vqprompt.data.images import Images
from vqprompt.methods.base import Method, View
from vqprompt.progress import Progress, Report, Stage, ignore
from vqprompt.runtime import Runtime
from vqprompt.training.batches import clean_images, draw, epoch_views
from vqprompt.training.optim import Inputs
from vqprompt.training.settings import Training

if TYPE_CHECKING:
    from vqprompt.learner.queries import QueryCache

BATCH = {"cuda": 256}  # images at a time
BATCH_ELSEWHERE = 64


class Evaluator:
    """Computes on clean views of images, in order, in batches of one size.

    test_crop: see `Training`. known: a cache of queries; without one, queries are computed where they are needed.
    """

    def __init__(self, method: Method, runtime: Runtime, test_crop: float, known: QueryCache | None = None) -> None:
        self.method, self.runtime, self.test_crop, self.known = method, runtime, test_crop, known
        self.progress: Report = ignore

    @contextmanager
    def reporting(self, progress: Report) -> Iterator[None]:
        """Send the progress of the work inside this block to `progress`. It stops at the end of the block, also after
        an error."""
        self.progress = progress
        try:
            yield
        finally:
            self.progress = ignore

    def features(self, images: Images, task: int | None = None) -> Tensor:
        """Features [n, D]. task: the number of their task, if they are its training images."""
        return self._with_queries(images, lambda view: self.method.features(view)[0].float(), Stage.STATISTICS, task)

    @torch.no_grad()
    def augmented_features(self, images: Images, settings: Training, seed: int, task: int | None = None) -> Tensor:
        """Features [n, D] of one augmented view of each image, drawn from the seed."""
        device, vit, ranks, results = self.runtime.device, self.method.vit, self.runtime.ranks, list[Tensor]()
        batches = self._batches(len(images))

        def features(inputs: Inputs) -> Tensor:
            return self.method.features(View(vit, lambda: draw(inputs, vit), task=task))[0].float()

        with evaluation_mode(self.method), self.runtime.repeatable(), self.runtime.autocast(vit):
            for _, inputs in epoch_views(images, batches, settings, seed, 0, device, ranks.turn):
                results.append(features(inputs))
                done = min(sum(map(len, results)) * ranks.count, len(images))
                self.progress(Progress(Stage.STATISTICS, done, len(images)))
        return ranks.in_order(results, list(map(len, batches)))[: len(images)]

    def logits(self, images: Images) -> Tensor:
        """Scores [n, classes]."""
        return self._with_queries(images, lambda view: self.method.logits(view).float(), Stage.TESTING)

    def guesses(self, images: Images, queries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best class of each image [n] and its probability [n]; scores are never held for more than one batch."""

        def best(view: View) -> Tensor:
            logits = self.method.logits(view)
            sure = logits.float().softmax(1).max(1).values
            return torch.stack([logits.argmax(1).double(), sure.double()], dim=1)

        found = self._with_queries(images, best, Stage.TESTING, queries=queries)
        return found[:, 0].long(), found[:, 1].float()

    def queries(self, images: Images) -> Tensor:
        """Features without prompts [n, D]."""
        return self.compute_queries(images) if self.known is None else self.known.of(images)

    def compute_queries(self, images: Images, mirrored: bool = False) -> Tensor:
        """Queries, computed now, of the images as they are or mirrored."""
        return self._compute(images, _mirrored_query_of if mirrored else _query_of, Stage.TESTING, ignore)

    def _with_queries(
        self,
        images: Images,
        compute: Callable[[View], Tensor],
        stage: Stage,
        task: int | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Compute, with the queries that the cache knows or that are given."""
        if queries is None and self.known is not None and self.method.uses_query:
            queries = self.known.of(images)
        return self._compute(images, compute, stage, self.progress, task, queries)

    @torch.no_grad()
    def _compute(
        self,
        images: Images,
        compute: Callable[[View], Tensor],
        stage: Stage,
        progress: Report,
        task: int | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        device, vit, ranks = self.runtime.device, self.method.vit, self.runtime.ranks
        results, aspect, done = [], images.aspect, 0
        batches = self._batches(len(images))
        own = [batch for number, batch in enumerate(batches) if len(batch[ranks.turn(number, len(batch))])]
        with evaluation_mode(self.method), self.runtime.repeatable(), self.runtime.autocast(vit):
            for index, pixels in images.batches(own, device):
                query = None if queries is None else queries[index.to(device)]
                clean = clean_images(vit, pixels, aspect[index], self.test_crop)
                results.append(compute(View(vit, clean, query, task=task)))
                done = min(done + len(index) * ranks.count, len(images))
                progress(Progress(stage, done, len(images)))
        return ranks.in_order(results, list(map(len, batches)))[: len(images)]

    def _batches(self, count: int) -> tuple[Tensor, ...]:
        """Indices of all images, in order; on CUDA, the last image may come several times."""
        device = self.runtime.device
        size, order = BATCH.get(device.type, BATCH_ELSEWHERE), torch.arange(count)
        if device.type == "cuda":  # compiled code needs few shapes: fill the last batch up with the last image
            size = min(size, 1 << (len(order) - 1).bit_length())
            order = torch.cat([order, order[-1:].expand(-len(order) % size)])
        return order.split(size)


@contextmanager
def evaluation_mode(method: Method) -> Iterator[None]:
    """Evaluate inside the block. A method that is being trained returns to training mode afterwards. One that is not
    is left as it is, so that several threads can use it."""
    if not method.training:
        yield
        return
    method.eval()
    try:
        yield
    finally:
        method.train()


def _query_of(view: View) -> Tensor:
    return view.query


def _mirrored_query_of(view: View) -> Tensor:
    return view.vit.query(view.vit.embed(view.images.flip(-1))).float()

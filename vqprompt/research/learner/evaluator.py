"""Shows un-augmented images to a method: features, scores, queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from vqprompt.core.data.images import Images
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.runtime.device import Runtime
from vqprompt.core.runtime.distributed import ShardedRows
from vqprompt.research.learner.queries import QueryCache
from vqprompt.research.learner.rows import JoinedRows, Rows
from vqprompt.research.methods.base import Method, View
from vqprompt.research.training.batches import clean_images, draw, epoch_views
from vqprompt.research.training.settings import Training

BATCH = {"cuda": 512}  # images at a time
BATCH_OTHERWISE = 64


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for the test images of several tasks, one after the other.

    truth, guesses: [n], positions of classes among all that were learned. probability: [n], of the guess. sizes: the
    number of images per task.
    """

    truth: Tensor
    guesses: Tensor
    probability: Tensor
    sizes: list[int]

    @property
    def right(self) -> Tensor:
        return self.guesses == self.truth

    def accuracies(self) -> list[float]:
        """Percent right on each task."""
        return [100 * int(part.sum()) / len(part) for part in torch.split(self.right, self.sizes)]

    def worst(self, most: int) -> Tensor:
        """Positions of wrong predictions, the most confident first."""
        wrong = torch.nonzero(~self.right).flatten()
        return wrong[self.probability[wrong].argsort(descending=True, stable=True)][:most]


class Evaluator:
    """Computes on clean views of images, in order, in batches of one size.

    test_crop: see `Training`. known: a cache of queries; without one, queries are computed where they are needed.
    """

    def __init__(self, method: Method, runtime: Runtime, test_crop: float, known: QueryCache | None = None) -> None:
        self.method, self.runtime, self.test_crop, self.known = method, runtime, test_crop, known
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
        queries = self._known(images, again=False) if self.method.uses_query else None
        return self._compute(
            images, lambda view: self.method.features(view)[0].float(), Stage.STATISTICS, task, queries
        )

    def augmented_features(self, images: Images, settings: Training, seed: int, task: int | None = None) -> ShardedRows:
        """Features [n, D] of one augmented view of each image, drawn from the seed."""
        vit, ranks, batches = self.method.vit, self.runtime.ranks, self._batches(len(images))

        def computed() -> Iterator[Tensor]:
            for _, inputs in epoch_views(images, batches, settings, seed, 0, self.runtime.device, ranks.turn):
                view = View(vit, partial(draw, inputs, vit), task=task)
                with self._evaluating():
                    features = self.method.features(view)[0].float()
                yield features

        return self._in_turns(batches, computed, Stage.STATISTICS, self.progress)

    def logits(self, images: Images) -> Tensor:
        """Scores [n, classes]."""
        queries = self._known(images) if self.method.uses_query else None
        return self._compute(
            images, lambda view: self.method.logits(view).float(), Stage.TESTING, None, queries
        ).whole()

    def guesses(self, images: Images, queries: Rows | JoinedRows | None = None) -> tuple[Tensor, Tensor]:
        """The best class of each image [n] and its probability [n]; only the scores of one batch are in memory."""

        def best(view: View) -> Tensor:
            logits = self.method.logits(view)
            probability = logits.float().softmax(1).max(1).values
            return torch.stack([logits.argmax(1).double(), probability.double()], dim=1)

        answers = self._compute(images, best, Stage.TESTING, None, queries).whole()
        return answers[:, 0].long(), answers[:, 1].float()

    def queries(self, images: Images) -> ShardedRows:
        """Features without prompts [n, D]: from the cache, or computed now."""
        known, batches = self._known(images, again=False), self._batches(len(images))
        if known is None:
            return self.compute_queries(images)
        own = self._own(batches)
        return self._in_turns(batches, lambda: (known[batch] for batch in own), Stage.TESTING, ignore)

    def compute_queries(self, images: Images, mirrored: bool = False) -> ShardedRows:
        """Queries, computed now, of the images as they are or mirrored."""
        work = _mirrored_query_of if mirrored else attrgetter("query")
        return self._compute(images, work, Stage.TESTING, progress=ignore)

    def _known(self, images: Images, again: bool = True) -> Rows | None:
        """Queries from the cache. A backbone that learns gives other ones after every step, so none are kept."""
        if self.known is None or self.method.tunes_backbone:
            return None
        return self.known.of(images, again=again)

    def _compute(
        self,
        images: Images,
        compute: Callable[[View], Tensor],
        stage: Stage,
        task: int | None = None,
        queries: Rows | JoinedRows | None = None,
        progress: Report | None = None,
    ) -> ShardedRows:
        device, vit, batches = self.runtime.device, self.method.vit, self._batches(len(images))
        own = self._own(batches)

        def computed() -> Iterator[Tensor]:
            aspect = images.aspect
            for index, pixels in images.batches(own, device):
                query = None if queries is None else queries[index]
                view = View(vit, clean_images(vit, pixels, aspect[index], self.test_crop), query, task=task)
                with self._evaluating():
                    values = compute(view)
                yield values

        return self._in_turns(batches, computed, stage, progress or self.progress)

    def _own(self, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """The batches that this process computes."""
        return batches[self.runtime.ranks.rank :: self.runtime.ranks.count]

    def _in_turns(
        self, batches: Sequence[Tensor], compute: Callable[[], Iterator[Tensor]], stage: Stage, progress: Report
    ) -> ShardedRows:
        ranks, sizes = self.runtime.ranks, list(map(len, batches))
        count = sum(sizes)

        def reported() -> Iterator[Tensor]:
            done = 0
            for values, size in zip(compute(), sizes[ranks.rank :: ranks.count], strict=True):
                done = min(done + size * ranks.count, count)
                progress(Progress(stage, done, count))
                yield values

        return ShardedRows(ranks, sizes, reported)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """For the work on one batch. Never `yield` inside this block: the caller would run with these settings."""
        vit = self.method.vit
        with torch.no_grad(), evaluation_mode(self.method), self.runtime.repeatable(), self.runtime.autocast(vit):
            yield

    def _batches(self, count: int) -> tuple[Tensor, ...]:
        """Indices of all images, in order."""
        order, size = torch.arange(count), BATCH.get(self.runtime.device.type, BATCH_OTHERWISE)
        if self.runtime.device.type == "cuda":  # of almost equal size: a small last batch would be slow
            return torch.tensor_split(order, max(math.ceil(count / size), 1))
        return torch.split(order, size)


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


def _mirrored_query_of(view: View) -> Tensor:
    return view.vit.query(view.vit.embed(view.images.flip(-1))).float()

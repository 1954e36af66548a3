"""Predictions that arrive together are answered together.

One thread takes the requests that wait, up to a batch, and asks the model once. Requests that arrive in the meantime
are the next batch. A single request does not wait for others. On CPUs, all cores compute a single image, and one core
each image of a batch. These two round differently, so a probability may differ in the fifth decimal place.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.product.model.network import on_gpu
from vqprompt.product.model.predicting import Answer
from vqprompt.product.serve.errors import Busy, Conflict, Refused
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.models import Snapshot
from vqprompt.product.serve.settings import Limits

Given = bytes | np.ndarray
PER_CORE = 8  # images of a batch; more would make the first one wait for the last
ON_GPU = 64


@dataclass(eq=False)
class _Asked:
    snapshot: Snapshot
    image: Given
    top: int
    answer: asyncio.Future[Answer]


class Batcher:
    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.most = ON_GPU if on_gpu("auto") else PER_CORE * (os.cpu_count() or 1)
        self.waiting: deque[_Asked] = deque()
        metrics.waiting.set_function(lambda: len(self.waiting))
        self._thread = ThreadPoolExecutor(1, "predictions")  # always the same: each one starts threads of its own
        self._working: asyncio.Task[None] | None = None

    async def ask(self, snapshot: Snapshot, images: list[Given], top: int, strictness: float = 0.0) -> list[Answer]:
        """One answer per image, all from the same snapshot. An image that cannot be read raises its error."""
        snapshot.check_taught()
        if self.waiting and len(self.waiting) + len(images) > self.limits.waiting:
            raise Busy(
                f"{len(self.waiting)} predictions are already waiting; try again soon", headers={"Retry-After": "1"}
            )
        loop = asyncio.get_running_loop()
        asked = [_Asked(snapshot, image, top, loop.create_future()) for image in images]
        self.waiting.extend(asked)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        try:
            with self.metrics.seconds.time():
                async with asyncio.timeout(self.limits.predict_seconds):
                    answers = [await a.answer for a in asked]
        except TimeoutError:
            raise Refused(f"no answer after {self.limits.predict_seconds:g} s; try again later", 504) from None
        finally:
            for a in asked:
                a.answer.cancel()
        for answer in answers:
            known = "unknown" if answer.familiarity < strictness else "known"
            self.metrics.predictions.labels(snapshot.name, known).inc()
        return answers

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Answer all that wait, batch by batch."""
        while self.waiting:
            batch = self._take()
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, batch)
            for asked, answer in zip(batch, answers, strict=True):
                if asked.answer.done():
                    continue
                if isinstance(answer, Exception):
                    asked.answer.set_exception(answer)
                else:
                    asked.answer.set_result(answer)

    def _take(self) -> list[_Asked]:
        """The oldest requests of one snapshot."""
        first = self.waiting[0].snapshot
        batch: list[_Asked] = []
        while self.waiting and self.waiting[0].snapshot is first and len(batch) < self.most:
            asked = self.waiting.popleft()
            if not asked.answer.cancelled():  # its client has hung up, or has waited too long
                batch.append(asked)
        return batch

    def _answer(self, batch: list[_Asked]) -> Sequence[Answer | Exception]:
        if not batch:
            return []
        self.metrics.batch_images.observe(len(batch))
        try:
            return batch[0].snapshot.model.try_answers([a.image for a in batch], top=max(a.top for a in batch))
        except (UserError, MemoryError) as error:
            return [error] * len(batch)
        except Exception as error:
            traceback.print_exc()
            return [Conflict(f"the model cannot answer ({error!r})")] * len(batch)

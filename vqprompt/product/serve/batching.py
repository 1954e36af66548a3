"""Predictions that arrive together are answered together.

One thread takes the requests that wait, up to a batch, and asks the model once. Requests that arrive in the meantime
are the next batch. A single request does not wait for others. On CPUs, all cores compute a single image, and one core
each image of a batch. These two round differently, so a probability may differ in the fifth decimal place.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from vqprompt.core.errors import ImageError, UserError
from vqprompt.product.model.answers import Answer
from vqprompt.product.model.network import on_gpu
from vqprompt.product.serve.errors import Busy, Conflict, NotAnImage, TooLarge, TooSlow
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.models import Snapshot

Given = bytes | np.ndarray
PER_CORE = 8  # images of a batch; more would make the first one wait for the last
ON_GPU = 64


@dataclass(eq=False)
class _Asked:
    snapshot: Snapshot
    image: Given
    top: int
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Answer]


class Batcher:
    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.most = ON_GPU if on_gpu("auto") else PER_CORE * (os.cpu_count() or 1)
        self._waiting: deque[_Asked] = deque()
        self._wake = threading.Condition()
        self._closing = False
        threading.Thread(target=self._work, name="predictions", daemon=True).start()

    def waiting(self) -> int:
        return len(self._waiting)

    async def ask(self, snapshot: Snapshot, images: list[Given], top: int) -> list[Answer]:
        """One answer per image, all from the same snapshot. An image that cannot be read raises its error."""
        if not snapshot.model.classes:
            raise Conflict("the model has learned nothing yet; teach it first")
        loop = asyncio.get_running_loop()
        asked = [_Asked(snapshot, image, top, loop, loop.create_future()) for image in images]
        with self._wake:
            if len(self._waiting) + len(asked) > max(self.limits.waiting, len(asked)):
                raise Busy(f"{len(self._waiting)} predictions are already waiting; try again soon", retry_after=1)
            self._waiting.extend(asked)
            self._wake.notify()
        try:
            async with asyncio.timeout(self.limits.predict_seconds):
                return [await a.answer for a in asked]
        except TimeoutError:
            raise TooSlow(f"no answer after {self.limits.predict_seconds:g} s; try again later") from None
        finally:
            for a in asked:
                a.answer.cancel()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                batch = self._take()
            try:
                self._answer(batch)
            except Exception:  # such as a loop that was closed meanwhile; the next batch must be answered
                traceback.print_exc()

    def _take(self) -> list[_Asked]:
        """The oldest requests of one snapshot."""
        first = self._waiting[0].snapshot
        batch: list[_Asked] = []
        while self._waiting and self._waiting[0].snapshot is first and len(batch) < self.most:
            asked = self._waiting.popleft()
            if not asked.answer.cancelled():  # its client has hung up, or has waited too long
                batch.append(asked)
        return batch

    def _answer(self, batch: list[_Asked]) -> None:
        if not batch:
            return
        top = max(a.top for a in batch)
        self.metrics.batch_images.observe(len(batch))
        try:
            answers: list[Any] = list(batch[0].snapshot.model.try_answers([a.image for a in batch], top=top))
        except Exception as error:
            traceback.print_exc()
            answers = [error] * len(batch)
        for number, (asked, answer) in enumerate(zip(batch, answers, strict=True), start=1):
            if isinstance(answer, ImageError):
                answer = NotAnImage(str(answer).removeprefix(f"image {number}: "))
            elif isinstance(answer, MemoryError):
                answer = TooLarge("there is not enough memory for this image; make it smaller")
            asked.loop.call_soon_threadsafe(_settle, asked, answer)


def _settle(asked: _Asked, answer: Answer | Exception) -> None:
    if asked.answer.done():
        return
    if isinstance(answer, Exception):
        own = answer if isinstance(answer, UserError) else Conflict(f"the model cannot answer ({answer!r})")
        asked.answer.set_exception(own)
    else:
        asked.answer.set_result(answer)

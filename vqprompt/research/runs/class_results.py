"""Results per class: how many test images were right, and the wrong predictions with the highest probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from vqprompt.core.data.images import Images
from vqprompt.core.data.stream import Task
from vqprompt.research.learner.evaluator import Predictions
from vqprompt.research.report.render import THUMBNAIL, thumbnail
from vqprompt.research.results.result import ClassResult, ClassResults, Mistake

WORST = 24


def class_results(tasks: Sequence[Task], names: Sequence[str], p: Predictions) -> ClassResults:
    """tasks: all that were learned, and tested with these predictions. names: of all classes learned."""
    first = {name: task.stage for task in reversed(tasks) for name in task.classes}
    n = len(names)
    counts = np.bincount(n * p.truth.numpy() + p.guesses.numpy(), minlength=n * n).reshape(n, n)  # truth × guess
    right, totals = counts.diagonal().tolist(), counts.sum(axis=1).tolist()
    np.fill_diagonal(counts, 0)
    rivals, times = counts.argmax(axis=1).tolist(), counts.max(axis=1).tolist()
    classes = [
        ClassResult(
            name=name, task=first.get(name, 0), right=right[c], total=totals[c],
            taken_for=names[rivals[c]] if times[c] else None, times=times[c],
        )
        for c, name in enumerate(names)
    ]  # fmt: skip
    images, wrong = Images.concatenate([task.test for task in tasks]), torch.nonzero(~p.right).flatten()
    surest = wrong[p.probability[wrong].argsort(descending=True, stable=True)]
    worst = [
        Mistake(
            label=names[int(p.truth[row])], answer=names[int(p.guesses[row])], probability=float(p.probability[row]),
            picture=_picture(images, row),
        )
        for row in surest[:WORST].tolist()
    ]  # fmt: skip
    return ClassResults(after=len(tasks), classes=classes, worst=worst)


def _picture(images: Images, row: int) -> str | None:
    """A small picture in the image's true shape; stored images are squashed squares."""
    pixels = images.read(torch.tensor([row]), torch.device("cpu"))[0]
    stored = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    aspect, side = float(images.aspect[row]), min(stored.width, THUMBNAIL)
    return thumbnail(lambda: stored.resize((round(side * min(aspect, 1)) or 1, round(side / max(aspect, 1)) or 1)))

"""Results per class: how many test images were right, and the wrong predictions with the highest probability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from PIL import Image

from vqprompt.core.data.images import Images
from vqprompt.core.data.stream import Task
from vqprompt.research.learner.evaluator import Predictions
from vqprompt.research.report.render import thumbnail
from vqprompt.research.results.result import ClassResult, ClassResults, Mistake

WORST = 24


def class_results(tasks: Sequence[Task], names: Sequence[str], predictions: Predictions) -> ClassResults:
    """tasks: all that were learned, and tested with these predictions. names: of all classes learned."""
    first = {name: task.stage for task in reversed(tasks) for name in task.classes}
    truth, is_right = predictions.truth, predictions.right
    totals, right = (torch.bincount(t, minlength=len(names)) for t in (truth, truth[is_right]))
    mistaken = Counter(zip(truth[~is_right].tolist(), predictions.guesses[~is_right].tolist(), strict=True))
    classes = []
    for c, name in enumerate(names):
        others = {guess: times for (truth, guess), times in mistaken.items() if truth == c}
        rival = max(others, key=lambda guess: (others[guess], -guess), default=None)
        classes.append(
            ClassResult(
                name=name, task=first.get(name, 0), right=int(right[c]), total=int(totals[c]),
                taken_for=None if rival is None else names[rival], times=0 if rival is None else others[rival],
            )
        )  # fmt: skip
    images = Images.concatenate([task.test for task in tasks])
    worst = [
        Mistake(
            label=names[int(truth[row])], answer=names[int(predictions.guesses[row])],
            probability=float(predictions.probability[row]), picture=_picture(images, row),
        )
        for row in predictions.worst(WORST).tolist()
    ]  # fmt: skip
    return ClassResults(after=len(tasks), classes=classes, worst=worst)


def _picture(images: Images, row: int) -> str | None:
    """A small picture in the image's true shape; stored images are squashed squares."""
    pixels = images.read(torch.tensor([row]), torch.device("cpu"))[0]
    stored = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    aspect, side = float(images.aspect[row]), stored.width
    shape = (side, max(1, round(side / aspect))) if aspect >= 1 else (max(1, round(side * aspect)), side)
    return thumbnail(lambda: stored.resize(shape))

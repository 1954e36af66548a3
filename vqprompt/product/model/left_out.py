"""Which class each of a model's images is taken for, when it is left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vqprompt.core.statistics.discriminant import Array, Basis, LeaveOneOut, join_modes
from vqprompt.product.model.closed_form import Trials, groups_of
from vqprompt.product.model.knowledge import Knowledge


@dataclass(frozen=True, eq=False)
class LeftOutAnswers:
    """classes: the names. images: uint64 [n], the names of the images by content (see `pictures.content_id`). labels,
    answers: [n], the class of each image and the class it is taken for, as positions in `classes`."""

    classes: tuple[str, ...]
    images: Array
    labels: Array
    answers: Array

    def confusion(self) -> dict[tuple[int, int], int]:
        """How often a class is taken for another, or for itself; pairs that never occur are absent."""
        pairs, counts = np.unique(np.stack([self.labels, self.answers]), axis=1, return_counts=True)
        return {(int(a), int(b)): int(n) for (a, b), n in zip(pairs.T, counts, strict=True)}

    def images_of(self, label: str, answer: str) -> list[int]:
        """The images of a class that are taken for another one."""
        place = {name: number for number, name in enumerate(self.classes)}
        chosen = (self.labels == place.get(label, -1)) & (self.answers == place.get(answer, -1))
        return [int(name) for name in self.images[chosen]]


def left_out_answers(known: Knowledge) -> LeftOutAnswers:
    """The answers that the accuracy of a model is computed from, image by image. The features it keeps are enough."""
    classes, empty = tuple(known.classes), np.zeros(0, np.int64)
    no_answers = LeftOutAnswers(classes, empty.astype(np.uint64), empty, empty)
    if known.solution is None or len(known.classes) < 2:
        return no_answers
    records = list(known.classes.values())
    groups = groups_of(records, known.solution.gram)
    trials = Trials.of(records, range(len(records)))
    if not len(trials):
        return no_answers
    left_out = LeaveOneOut(groups, Basis.of(groups), trials.features, trials.groups).at(known.solution.shrinkage)
    answers = join_modes(left_out.scores, groups.owners).argmax(1)
    return LeftOutAnswers(classes, trials.ids, trials.classes, answers)

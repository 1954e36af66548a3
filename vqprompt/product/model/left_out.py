"""Which class each of a model's images is taken for, when it is left out; and how changes of the model change that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vqprompt.core.statistics.discriminant import Array, Basis, join_modes
from vqprompt.core.statistics.leave_one_out import LeaveOneOut
from vqprompt.core.words import counted
from vqprompt.product.model.closed_form import Trials, counterexample_means, groups_of
from vqprompt.product.model.knowledge import Knowledge
from vqprompt.product.model.pictures import UNKNOWN

EXAMPLES = 20  # changed answers that are told one by one


@dataclass(frozen=True, eq=False)
class LeftOutAnswers:
    """classes: the names. images: uint64 [n], the names of the images by content (see `pictures.content_id`). labels,
    answers: [n], the class of each image and the class it is taken for, as positions in `classes`. unknown: bool [n],
    whether counterexamples are nearer than this class."""

    classes: tuple[str, ...]
    images: Array
    labels: Array
    answers: Array
    unknown: Array

    def by_image(self) -> dict[int, tuple[str, str]]:
        """The class of each image, and the answer."""
        rows = zip(self.images.tolist(), self.labels, self.answers, self.unknown, strict=True)
        return {image: (self.classes[c], UNKNOWN if none else self.classes[a]) for image, c, a, none in rows}

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
    classes, solution, records = tuple(known.classes), known.solution, list(known.classes.values())
    trials = Trials.of(records, range(len(records))) if len(records) > 1 else None
    if solution is None or not trials:
        nothing = np.zeros(0, np.int64)
        return LeftOutAnswers(classes, nothing.astype(np.uint64), nothing, nothing, nothing)
    groups = groups_of(records, solution.gram)
    shrinkage, basis = solution.shrinkage, Basis.of(groups)
    left_out = LeaveOneOut(groups, basis, trials.features, trials.groups)
    seen = left_out.at(shrinkage)
    scores, unknown = join_modes(seen.scores, groups.owners), np.zeros(len(trials), bool)
    if known.against is not None:  # under the covariance without the image, as the scores of the classes
        none = counterexample_means(known.against, basis, shrinkage, seen.means)
        counter, center = left_out.around(shrinkage, none, none.means, none.reliance(none.counts))
        unknown = center + counter.max(1) > scores.max(1)
    return LeftOutAnswers(classes, trials.ids, trials.classes, scores.argmax(1), unknown)


@dataclass(frozen=True)
class ChangedAnswer:
    """image: by its content. label: its class after the change."""

    image: int
    label: str
    before: str
    now: str


@dataclass(frozen=True)
class Changes:
    """What a change of a model does to answers about images that it has learned, each left out. per_class: how many
    were tested."""

    per_class: Mapping[str, int]
    answers: tuple[ChangedAnswer, ...]

    @property
    def tested(self) -> int:
        return sum(self.per_class.values())

    def lost(self) -> Counter[tuple[str, str]]:
        """How many right answers became another one, by class and answer."""
        return Counter((answer.label, answer.now) for answer in self.answers if answer.before == answer.label)

    @classmethod
    def between(cls, before: Knowledge, now: Knowledge, renamed: Mapping[str, str] | None = None) -> Changes:
        """renamed: old names to new ones, where an answer is no other one because of it."""
        old, new, names = left_out_answers(before).by_image(), left_out_answers(now).by_image(), renamed or {}
        both = [
            ChangedAnswer(image, new[image][0], names.get(old[image][1], old[image][1]), new[image][1])
            for image in old.keys() & new.keys()
        ]
        changed = [answer for answer in both if answer.before != answer.now]
        changed.sort(key=lambda answer: (answer.label, answer.image))
        return cls(Counter(answer.label for answer in both), tuple(changed))

    def to_json(self) -> dict[str, Any]:
        told = [{**vars(answer), "image": f"{answer.image:016x}"} for answer in self.answers[:EXAMPLES]]
        return {
            "tested": self.tested,
            "changed": len(self.answers),
            "better": sum(answer.now == answer.label for answer in self.answers),
            "worse": self.lost().total(),
            "examples": told,
        }

    def __str__(self) -> str:
        """`3 of 40 images that are left out change their answer: 2 better, 1 worse`"""
        told = self.to_json()
        if not self.tested:
            return "too few images to say which answers change"
        what = f"{told['changed']} of {counted(self.tested, 'left-out image')} change their answer"
        return f"{what}: {told['better']} for the better, {told['worse']} for the worse" if self.answers else what

"""A stream of tasks with disjoint classes, and which images may be read when (paper, section 3).

Only the task being learned can be read: opening the next task closes the one before, and every later read of its
training images raises `PastImagesError`. Test images of the tasks seen so far can be read for evaluation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.errors import ImageError, PastImagesError, UserError
from vqprompt.core.words import shorten


@dataclass(frozen=True)
class Dataset:
    """All images of a data set. A stream divides it into tasks."""

    name: str
    classes: list[str]
    store: Store
    labels: np.ndarray  # [N], positions in `classes`
    is_test: np.ndarray  # [N], bool
    notes: tuple[str, ...] = ()  # what a user should know about how it was read
    groups: tuple[tuple[str, ...], ...] | None = None  # class names per task, for sets of several domains

    def __post_init__(self) -> None:
        check_names(self.name, self.classes)
        check_classes(self.name, self.classes, self.labels, self.is_test)


def check_names(name: str, classes: Sequence[str]) -> None:
    """Every class needs its own name."""
    if not len(classes):
        raise ImageError(f"{name}: no classes; it needs at least one")
    if wrong := [c for c in classes if not isinstance(c, str)]:
        raise ImageError(f"{name}: the class name {wrong[0]!r} is a {type(wrong[0]).__name__}; class names are texts")
    if any(not c.strip() for c in classes):
        raise ImageError(f"{name}: a class has an empty name; give every class a name")
    if odd := [c for c in classes if c != c.encode("utf-8", "replace").decode()]:
        raise ImageError(f"{name}: the class name {odd[0]!r} is not UTF-8; rename its folder")
    if twice := [c for c, count in Counter(classes).items() if count > 1]:
        raise ImageError(
            f"{name}: the class name {shorten(twice)} is there more than once; give every class its own name"
        )


def check_classes(name: str, classes: list[str], labels: np.ndarray, is_test: np.ndarray) -> None:
    """Every class needs images to learn from and images to test with."""
    for split, wanted in (("training", ~is_test), ("test", is_test)):
        counts = np.bincount(labels[wanted], minlength=len(classes))
        empty = [classes[i] for i in np.flatnonzero(counts == 0)]
        if empty:
            raise ImageError(f"{name}: no {split} images for the class {shorten(empty)}; every class needs some")


class Task:
    """One task of a stream: class names, and images labelled by position among these names."""

    def __init__(self, number: int, classes: list[str], train: Images, test: Images) -> None:
        self.number, self.classes, self.train, self.test = number, classes, train, test


class Stream:
    """Tasks in order: `for task in stream: learner.learn(task)`.

    tasks: how many (of sizes as equal as possible), or the number of classes per task, or the class names per task.
    seed: 0 keeps the natural class order, others shuffle it. It also decides the validation split.
    validation: fraction of the training images per class that replaces the test images, to tune settings on.
    train_per_class, test_per_class: use only this many images per class. train_choice: which training images these
    are, the "first" ones, or some drawn by "seed". The first files of a folder are often alike: one day, one place.
    """

    def __init__(
        self,
        dataset: Dataset,
        tasks: int | Sequence[int] | Sequence[Sequence[str]] = 10,
        seed: int = 0,
        validation: float = 0.0,
        train_per_class: int | None = None,
        test_per_class: int | None = None,
        train_choice: Literal["first", "seed"] = "first",
    ) -> None:
        self.dataset, self.seed, self.train_choice = dataset, seed, train_choice
        self._position = {name: i for i, name in enumerate(dataset.classes)}
        self._open: int | None = None
        train_rows, test_rows = self._rows(validation, train_per_class, test_per_class)
        self.tasks = [
            self._task(number, classes, train_rows, test_rows)
            for number, classes in enumerate(_divide(dataset, tasks, seed))
        ]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return self.start_at(0)

    def start_at(self, number: int) -> Iterator[Task]:
        """Open the tasks one by one, starting at `number`. Opening a task closes the one before."""
        for task in self.tasks[number:]:
            self._open = task.number
            yield task
        self._open = None

    def seen(self, number: int) -> list[Task]:
        """The tasks up to and including `number`, to test on after it was learned."""
        return self.tasks[: number + 1]

    def _task(self, number: int, names: list[str], train_rows: list[np.ndarray], test_rows: list[np.ndarray]) -> Task:
        def guard() -> None:
            if self._open != number:
                now = "no task" if self._open is None else f"task {self._open + 1}"
                raise PastImagesError(
                    f"training images of task {number + 1} were asked for while {now} is being learned; "
                    "a rehearsal-free learner sees each task's images once"
                )

        ids = [self._position[name] for name in names]

        def images(rows: list[np.ndarray], guard=None) -> Images:  # type: ignore[no-untyped-def]
            labels = np.concatenate([np.full(len(rows[c]), i) for i, c in enumerate(ids)])
            places = np.concatenate([rows[c] for c in ids])
            if self.dataset.store.groups is not None:  # as they lie in their files, not class by class
                order = np.argsort(places, kind="stable")
                places, labels = places[order], labels[order]
            return Images(self.dataset.store, places, labels, guard)

        return Task(number, names, images(train_rows, guard), images(test_rows))

    def _rows(
        self, validation: float, train_per_class: int | None, test_per_class: int | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per class, the rows of its training images and of its test images."""
        if not 0 <= validation < 1:
            raise UserError(f"validation={validation} must be a fraction from 0 up to, but not including, 1")
        train, test = [], []
        by_class = rows_by_class(self.dataset.labels, len(self.dataset.classes))
        for name, rows in zip(self.dataset.classes, by_class, strict=True):
            own, other = rows[~self.dataset.is_test[rows]], rows[self.dataset.is_test[rows]]
            if validation:
                own, other = split_rows(own, validation, f"{self.seed}:{name}")
                if not len(other):
                    raise ImageError(f"class {name!r} has {len(own)} training image(s), too few to hold some out")
            train.append(self._chosen(own, name, train_per_class))
            test.append(other[:test_per_class])
        return train, test

    def _chosen(self, rows: np.ndarray, name: str, count: int | None) -> np.ndarray:
        """As many of a class's training images as are wanted; in order, whatever was drawn."""
        if self.train_choice == "first" or count is None or count >= len(rows):
            return rows[:count]
        return rows[sorted(random.Random(f"{self.seed}:train:{name}").sample(range(len(rows)), count))]


def rows_by_class(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    """The rows of each class, in order, found in one pass."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def split_rows(rows: np.ndarray, held_out: float, seed: str) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into those to keep and a seeded fraction to hold out: at least one, if there are two or more.

    Both parts keep their order.
    """
    count = min(max(1, round(len(rows) * held_out)), len(rows) - 1) if len(rows) > 1 else 0
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[random.Random(seed).sample(range(len(rows)), count)] = True
    return rows[~chosen], rows[chosen]


def _divide(dataset: Dataset, tasks: int | Sequence[int] | Sequence[Sequence[str]], seed: int) -> list[list[str]]:
    """The class names of each task, in order."""
    order = list(range(len(dataset.classes)))
    if seed:
        random.Random(seed).shuffle(order)
    names = [dataset.classes[c] for c in order]
    if isinstance(tasks, bool) or not isinstance(tasks, int | Sequence) or isinstance(tasks, str):
        raise UserError(f"tasks={tasks!r}: give a number of tasks, the number of classes of each, or their names")
    if isinstance(tasks, int):
        if dataset.groups and len(dataset.groups) == tasks:
            groups = [list(g) for g in dataset.groups]
            return random.Random(seed).sample(groups, tasks) if seed else groups
        if not 1 <= tasks <= len(names):
            raise UserError(f"cannot make {tasks} tasks of {len(names)} classes; ask for 1 to {len(names)}")
        base, extra = divmod(len(names), tasks)
        tasks = [base + (t < extra) for t in range(tasks)]
    if all(isinstance(t, int) for t in tasks):
        sizes = [int(t) for t in tasks]  # type: ignore[arg-type]
        if min(sizes, default=0) < 1 or sum(sizes) > len(names):
            raise UserError(f"task sizes {sizes} do not fit {len(names)} classes; each must be at least 1")
        return [names[start : start + size] for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False)]
    groups = [list(t) for t in tasks]  # type: ignore[arg-type]
    seen: dict[str, int] = {}
    for number, group in enumerate(groups, start=1):
        for name in group:
            if name not in dataset.classes:
                raise UserError(f"task {number} wants the class {name!r}, which {dataset.name} does not have")
            if name in seen:
                raise UserError(
                    f"the class {name!r} is in task {seen[name]} and in task {number}; tasks must be disjoint"
                )
            seen[name] = number
        if not group:
            raise UserError(f"task {number} has no classes")
    return groups

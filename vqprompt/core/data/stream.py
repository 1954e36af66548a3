"""A stream of tasks, and which images may be read when (paper, section 3).

Classes are disjoint, or come back in other tasks (stream_kind.py). Only the task being learned can be read: opening the
next task closes the one before, and every later read of its training images raises `PastImagesError`. Test images of
the tasks seen so far can be read for evaluation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream_kind import FILE, StreamKind
from vqprompt.core.errors import ImageError, PastImagesError, UserError, shown
from vqprompt.core.files import read_json
from vqprompt.core.words import shorten

Rows = dict[str, np.ndarray]
"""Rows of a store, by class."""


@dataclass(frozen=True)
class Dataset:
    """All images of a data set. A stream divides it into tasks."""

    name: str
    classes: list[str]
    store: Store
    labels: np.ndarray  # [N], positions in `classes`
    is_test: np.ndarray  # [N], bool
    notes: tuple[str, ...] = ()  # what a user should know about how it was read
    groups: tuple[tuple[str, ...], ...] | None = None  # class names per task, for sets of several kinds of images
    domains: np.ndarray | None = (
        None  # [N], the name of each image's domain, for sets that have the same classes in each
    )
    where: Callable[[int], str] | None = None  # what a file that lists images calls the one in a row

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
    """One task of a stream: class names, and images labelled by position among these names.

    Of an online stream, it is one piece of a stage, and `ends` says whether that is the stage's last. Otherwise a stage
    is one task.
    """

    def __init__(
        self, number: int, classes: list[str], train: Images, test: Images, stage: int | None = None, ends: bool = True
    ) -> None:
        self.number, self.classes, self.train, self.test = number, classes, train, test
        self.stage, self.ends = number if stage is None else stage, ends

    @property
    def tested(self) -> list[str]:
        """The classes that its test images are of."""
        return [self.classes[label] for label in self.test.labels.unique().tolist()]


class Stream:
    """Tasks in order: `for task in stream: learner.learn(task)`.

    tasks: how many (of sizes as equal as possible), or the number of classes per task, or the class names per task.
    seed: 0 keeps the natural class order, others shuffle it. It also decides the validation split.
    validation: fraction of the training images per class that replaces the test images, to tune settings on.
    train_per_class, test_per_class: use only this many images per class (and domain). train_choice: which training
    images these are, the "first" ones, or some drawn by "seed". The first files of a folder are often alike: one day,
    one place.
    kind: see stream_kind.py. Domains, few shots and files decide on the tasks themselves.
    joint: all of it as one task, for an upper bound.
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
        kind: str = "disjoint",
        joint: bool = False,
    ) -> None:
        if not 0 <= validation < 1:
            raise UserError(f"validation={validation} must be a fraction from 0 up to, but not including, 1")
        self.dataset, self.seed, self.train_choice, self.kind = dataset, seed, train_choice, StreamKind.parse(kind)
        self._limits = validation, train_per_class, test_per_class
        self._by_class = rows_by_class(dataset.labels, len(dataset.classes))
        self._open: int | None = None
        self.tasks: list[Task] = []
        plan, known = self._plan(tasks), set[str]()
        if joint:
            plan = [(_joined(train for train, _ in plan), _joined(test for _, test in plan))]
        for stage, (train, test) in enumerate(plan):
            pieces = [train] if joint or not self.kind.piece else self._pieces(train, stage)
            for n, piece in enumerate(pieces, start=1):
                known |= piece.keys()
                tested = {name: rows for name, rows in test.items() if name in known}
                self.tasks.append(self._task(len(self.tasks), piece, tested, stage, n == len(pieces)))

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

    @property
    def stages(self) -> list[Task]:
        """The tasks; of an online stream, the last piece of each stage."""
        return [task for task in self.tasks if task.ends]

    def seen(self, number: int) -> list[Task]:
        """What to test on after the task `number` was learned: it, and the stages before."""
        return [*(task for task in self.stages if task.stage < self.tasks[number].stage), self.tasks[number]]

    @property
    def returning(self) -> str | None:
        """A class that is learned in more than one task, if there is one."""
        counts = Counter(task.classes[label] for task in self.tasks for label in task.train.labels.unique().tolist())
        return next((name for name, count in counts.items() if count > 1), None)

    def _task(self, number: int, train: Rows, test: Rows, stage: int, ends: bool) -> Task:
        def guard() -> None:
            if self._open != number:
                now = "no task" if self._open is None else f"task {self._open + 1}"
                raise PastImagesError(
                    f"training images of task {number + 1} were asked for while {now} is being learned; "
                    "a rehearsal-free learner sees each task's images once"
                )

        names = list(dict.fromkeys([*train, *test]))

        def images(rows: Rows, guard: Callable[[], None] | None = None) -> Images:
            own = [(rows[name], label) for label, name in enumerate(names) if name in rows]
            labels = np.concatenate([np.zeros(0, int), *(np.full(len(places), label) for places, label in own)])
            places = np.concatenate([np.zeros(0, int), *(places for places, _ in own)])
            if self.dataset.store.groups is not None:  # as they lie in their files, not class by class
                order = np.argsort(places, kind="stable")
                places, labels = places[order], labels[order]
            return Images(self.dataset.store, places, labels, guard)

        return Task(number, names, images(train, guard), images(test), stage, ends)

    # ------------------------------------------------------------------ which images are in which task

    def _plan(self, tasks: int | Sequence[int] | Sequence[Sequence[str]]) -> list[tuple[Rows, Rows]]:
        """The training rows and the test rows of each task."""
        name, numbers, dataset = self.kind.name, self.kind.numbers, self.dataset
        if name == "domains":
            if dataset.domains is None:
                raise UserError(
                    f"--stream domains: {dataset.name} has none; give a folder of DOMAIN/CLASS/image, or quickdraw50"
                )
            domains = list(dict.fromkeys(dataset.domains.tolist()))
            return [self._rows(domain) for domain in _shuffled(domains, self.seed)]
        train, test = self._rows()
        if name == FILE:
            return self._listed(train, test)
        if name == "few-shot":
            base, ways, _ = numbers
            tasks = [base, *[ways] * ((len(dataset.classes) - base) // ways)]
            if len(tasks) < 2:
                many = len(dataset.classes)
                raise UserError(
                    f"--stream few-shot: {base} + {ways} classes are more than the {many} of {dataset.name}"
                )
        groups = _divide(dataset, tasks, self.seed)
        plan = [({name: train[name] for name in group}, {name: test[name] for name in group}) for group in groups]
        if name == "few-shot":
            for shots, _ in plan[1:]:
                shots |= {name: self._chosen(rows, name, numbers[2]) for name, rows in shots.items()}
        elif numbers and numbers[-1]:
            self._scatter([task for task, _ in plan])
        return plan

    def _scatter(self, plan: list[Rows]) -> None:
        """Move images of classes from their own task to others: to any (blurry), or to later ones (repeated)."""
        kind, (*stay, share), names = self.kind.name, self.kind.numbers, [name for task in plan for name in task]
        staying = set[str]()
        if stay:
            staying = {*random.Random(f"{self.seed}:{kind}").sample(names, round(len(names) * stay[0] / 100))}
        guests: list[dict[str, list[int]]] = [{} for _ in plan]
        for home, task in enumerate(plan):
            others = [t for t in range(len(plan)) if (t != home if kind == "blurry" else t > home)]
            for name in [name for name in task if name not in staying and others]:
                task[name], moved = split_rows(task[name], share / 100, f"{self.seed}:{kind}:{name}")
                drawn = random.Random(f"{self.seed}:{kind}:{name}:to")
                for row in moved.tolist():
                    guests[drawn.choice(others)].setdefault(name, []).append(row)
        for task, moved_here in zip(plan, guests, strict=True):
            task |= {name: np.array(rows) for name, rows in moved_here.items()}

    def _listed(self, train: Rows, test: Rows) -> list[tuple[Rows, Rows]]:
        """The tasks of a file. A task that lists no test images is tested with all of its classes."""
        dataset, file, listed = self.dataset, self.kind.file, read_json(self.kind.file)
        if dataset.where is None:
            raise UserError(f"--stream {file}: the images of {dataset.name} have no paths that a file could list")
        if not (isinstance(listed, list) and listed and all(isinstance(task, list) and task for task in listed)):
            raise UserError(f'--stream {file}: expected a list of tasks, as in [["crow/1.jpg"], ["owl/2.jpg"]]')
        row_of = {dataset.where(row): row for row in range(len(dataset.labels))}
        plan = []
        for number, images in enumerate(listed, start=1):
            if wrong := [image for image in images if not isinstance(image, str) or image not in row_of]:
                raise UserError(
                    f"--stream {file}, task {number}: {shown(wrong[0])} is not in {dataset.name}; "
                    f"its images have names such as {next(iter(row_of))!r}"
                )
            chosen = np.array(sorted({row_of[image] for image in images}))
            own, tests = (
                {name: kept for name, rows in part.items() if len(kept := np.intersect1d(rows, chosen))}
                for part in (train, test)
            )
            if not own:
                raise UserError(f"--stream {file}, task {number}: lists no training image")
            plan.append((own, tests or {name: test[name] for name in own}))
        return plan

    def _pieces(self, task: Rows, number: int) -> list[Rows]:
        """Parts of a task's images of about the same size, drawn at random."""
        rows = np.concatenate(list(task.values())).tolist()
        random.Random(f"{self.seed}:online:{number}").shuffle(rows)
        parts = np.array_split(np.array(rows), max(1, round(len(rows) / self.kind.piece)))
        kept = ({name: np.intersect1d(own, part) for name, own in task.items()} for part in parts)
        return [{name: rows for name, rows in piece.items() if len(rows)} for piece in kept]

    def _rows(self, domain: str | None = None) -> tuple[Rows, Rows]:
        """The rows of the training images of each class, and those of its test images; of one domain, or all."""
        train, test, (validation, train_per_class, test_per_class) = Rows(), Rows(), self._limits
        for name, rows in zip(self.dataset.classes, self._by_class, strict=True):
            place = name
            if domain is not None and self.dataset.domains is not None:
                place, rows = f"{domain}/{name}", rows[self.dataset.domains[rows] == domain]
                if not len(rows):
                    continue
            own, other = rows[~self.dataset.is_test[rows]], rows[self.dataset.is_test[rows]]
            if validation:
                own, other = split_rows(own, validation, f"{self.seed}:{place}")
                if not len(other):
                    raise ImageError(f"class {place!r} has {len(own)} training image(s), too few to hold some out")
            if not len(own) or not len(other):
                raise ImageError(f"{place}: {len(own)} training and {len(other)} test images; it needs some of both")
            train[name] = self._chosen(own, place, train_per_class)
            test[name] = other[:test_per_class]
        return train, test

    def _chosen(self, rows: np.ndarray, name: str, count: int | None) -> np.ndarray:
        """As many of a class's training images as are wanted; in order, whatever was drawn."""
        if self.train_choice == "first" or count is None or count >= len(rows):
            return rows[:count]
        return rows[sorted(random.Random(f"{self.seed}:train:{name}").sample(range(len(rows)), count))]


def _joined(parts: Iterable[Rows]) -> Rows:
    """All rows of each class, once."""
    joined: dict[str, dict[int, None]] = {}
    for part in parts:
        for name, rows in part.items():
            joined.setdefault(name, {}).update(dict.fromkeys(rows.tolist()))
    return {name: np.array(list(rows)) for name, rows in joined.items()}


def _shuffled(names: Sequence[str], seed: int) -> list[str]:
    """In the order of a seed; 0 keeps the natural one."""
    order = list(names)
    if seed:
        random.Random(seed).shuffle(order)
    return order


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
    names = _shuffled(dataset.classes, seed)
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

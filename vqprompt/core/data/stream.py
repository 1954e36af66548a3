"""A stream of tasks, and which images may be read when (paper, section 3).

Only the task being learned can be read: opening the next task closes the one before, and every later read of its
training images raises `PastImagesError`. Test images of the tasks seen so far can be read for evaluation.

A stream has a kind, written as one short text (docs/research.md):

disjoint          every class in one task
domains           one task per domain: the same classes again, in another style
blurry:D,B        D % of the classes stay in one task; of the others, B % of the images come in other tasks (Si-Blurry)
repeated:R        R % of the images of each class come in later tasks
few-shot:N,W,S    a first task of N classes, then tasks of W classes with S images each
FILE.json         a list of tasks, each a list of images: [["crow/1.jpg", "owl/7.jpg"], ["crow/2.jpg"]]
KIND+online:N     any of these, shown once in pieces of N images, each followed by a test; `online:N`: disjoint ones
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.errors import ImageError, PastImagesError, UserError, shown
from vqprompt.core.files import read_json, read_regular
from vqprompt.core.words import shorten

Division = int | Sequence[int] | Sequence[Sequence[str]]  # how many tasks, or the number of classes of each, or names
PERCENT, COUNT = r"(?:100|[1-9]?\d)", r"[1-9]\d{0,8}"
FORMS = re.compile(
    rf"(disjoint|domains|(?:blurry:{PERCENT},|repeated:){PERCENT}|few-shot:{COUNT},{COUNT},{COUNT}|.+\.json)?"
    rf"(?:(?:^|\+)online:({COUNT}))?",
    re.ASCII,
)


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
    domains: np.ndarray | None = None  # [N], the domain of each image, for sets with the same classes in each
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
        raise ImageError(f"{name}: the class name {shorten(twice)} is there more than once; give each its own name")


def check_classes(name: str, classes: list[str], labels: np.ndarray, is_test: np.ndarray) -> None:
    """Every class needs images to learn from and images to test with."""
    for split, wanted in (("training", ~is_test), ("test", is_test)):
        counts = np.bincount(labels[wanted], minlength=len(classes))
        empty = [classes[i] for i in np.flatnonzero(counts == 0)]
        if empty:
            raise ImageError(f"{name}: no {split} images for the class {shorten(empty)}; every class needs some")


@dataclass(eq=False)
class Task:
    """One task of a stream: class names, and images labelled by position among these names. Of an online stream, it is
    one piece of a stage; `ends` says whether the last. Otherwise every task is a stage."""

    number: int
    classes: list[str]
    train: Images
    test: Images
    stage: int = 0
    ends: bool = True


@dataclass(frozen=True)
class StreamKind:
    """name: disjoint, domains, blurry, repeated, few-shot or file. piece: images between two tests of an online stream;
    0: it is not online."""

    name: str
    numbers: tuple[int, ...]
    file: str
    piece: int

    @classmethod
    def parse(cls, text: str) -> StreamKind:
        """Raises UserError for what is no kind of stream."""
        if not text or not (match := FORMS.fullmatch(text)):
            raise UserError(
                f"--stream {shown(text)}: no such kind; there are disjoint, domains, blurry:50,10 and repeated:30 (in "
                "percent), few-shot:30,5,5 (classes, then ways and shots), FILE.json and, alone or after +, online:100"
            )
        kind = "file" if (match[1] or "").endswith(".json") else match[1] or "disjoint"
        name, _, numbers = kind.partition(":")
        return cls(name, tuple(map(int, re.findall(r"\d+", numbers))), match[1] or "", int(match[2] or 0))

    @property
    def divides(self) -> bool:
        """Whether there are as many tasks as one asks for. Domains, few shots and files decide on it themselves."""
        return self.name in ("disjoint", "blurry", "repeated")

    @property
    def returns(self) -> bool:
        """Whether classes come back in later tasks, or may (a file)."""
        return self.name in ("domains", "blurry", "repeated", "file") or self.piece > 0


class Stream:
    """Tasks in order: `for task in stream: learner.learn(task)`.

    tasks: how many (of sizes as equal as possible), or the number of classes per task, or the class names per task.
    seed: 0 keeps the natural class order, others shuffle it. It also decides the validation split.
    validation: fraction of the training images per class that replaces the test images, to tune settings on.
    train_per_class, test_per_class: use only this many images per class (and domain). train_choice: which training
    images these are, the "first" ones, or some drawn by "seed". The first files of a folder are often alike: one day,
    one place.
    kind: see above. Domains, few shots and files decide on the tasks themselves.
    joint: all of it as one task, for an upper bound.
    first_tasks: the stream ends after this many tasks. They are those of the whole stream.
    """

    def __init__(
        self, dataset: Dataset, tasks: Division = 10, seed: int = 0, validation: float = 0.0,
        train_per_class: int | None = None, test_per_class: int | None = None,
        train_choice: Literal["first", "seed"] = "first", kind: str = "disjoint", joint: bool = False,
        first_tasks: int | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= validation < 1:
            raise UserError(f"validation={validation} must be a fraction from 0 up to, but not including, 1")
        self.dataset, self.seed, self.train_choice, self.kind = dataset, seed, train_choice, StreamKind.parse(kind)
        self._open: int | None = None
        if self.kind.name == "few-shot":
            base, ways, _ = self.kind.numbers
            tasks = [base, *[ways] * max(1, (len(dataset.classes) - base) // ways)]
        together = self.kind.name in ("domains", "file")  # then classes are not what tasks differ in
        groups = [_shuffled(dataset.classes, seed)] if together else _divide(dataset, tasks, seed)
        train, test = self._assign(groups, validation, train_per_class, test_per_class)
        if self.kind.name == "file":
            train, test = self._listed(train, test)
        stages = train.max() + 1
        first = stages if first_tasks is None else first_tasks
        if not 1 <= first <= stages:
            raise UserError(f"first_tasks={first}: the stream has {stages} tasks; give 1 to {stages}")
        if joint:
            train, test = (np.where(task < first, np.minimum(task, 0), -1) for task in (train, test))
        self._names = [name for group in groups for name in group]  # in the order in which tasks have them
        place = {name: n for n, name in enumerate(self._names)}
        self._labels = np.array([place.get(name, -1) for name in dataset.classes])[dataset.labels]  # [N], among these
        self.tasks: list[Task] = []
        seen = np.zeros(len(self._names), bool)  # classes
        for stage in range(train.max() + 1):
            rows, tested = np.flatnonzero(train == stage), np.flatnonzero(test == stage)
            pieces = [rows]
            if self.kind.piece and not joint:  # of about the same size, drawn at random
                order = random.Random(f"{seed}:online:{stage}").sample(rows.tolist(), len(rows))
                pieces = np.array_split(np.array(order), max(1, round(len(rows) / self.kind.piece)))
            for n, piece in enumerate(pieces, start=1):
                seen[self._labels[piece]] = True
                now = tested[seen[self._labels[tested]]]
                self.tasks.append(self._task(len(self.tasks), piece, now, stage, n == len(pieces)))
        self.planned = len(self.tasks)  # in the whole stream
        self.tasks = [task for task in self.tasks if task.stage < first]

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

    def _task(self, number: int, train: np.ndarray, test: np.ndarray, stage: int, ends: bool) -> Task:
        """train, test: rows."""

        def guard() -> None:
            if self._open != number:
                now = "no task" if self._open is None else f"task {self._open + 1}"
                raise PastImagesError(
                    f"training images of task {number + 1} were asked for while {now} is being learned; "
                    "a rehearsal-free learner sees each task's images once"
                )

        store, labels = self.dataset.store, self._labels
        present = np.union1d(labels[train], labels[test])

        def images(rows: np.ndarray, guard: Callable[[], None] | None = None) -> Images:
            rows = np.sort(rows)
            if store.groups is None:  # class by class, not as they lie in their files
                rows = rows[labels[rows].argsort(kind="stable")]
            return Images(store, rows, np.searchsorted(present, labels[rows]), guard)

        names = [self._names[label] for label in present]
        return Task(number, names, images(train, guard), images(test), stage, ends)

    # ------------------------------------------------------------------ which images are in which task

    def _assign(
        self, groups: list[list[str]], validation: float, train_per_class: int | None, test_per_class: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The task in which each image is learned [N], and the one with which it is tested [N]; -1: in none. groups:
        the classes of each task."""
        is_test, numbers = self.dataset.is_test, self.kind.numbers
        train, test = np.full((2, len(is_test)), -1)
        for name, home, rows in self._cells(groups):
            own, other = rows[~is_test[rows]], rows[is_test[rows]]
            if validation:
                own, other = split_rows(own, validation, f"{self.seed}:{name}")
            if not len(own) or not len(other):
                few = ", too few to hold some out" if validation else f" and {len(other)} test images; give both"
                raise ImageError(f"class {name!r} has {len(own)} training image(s){few}")
            own = self._chosen(own, name, numbers[2] if self.kind.name == "few-shot" and home else train_per_class)
            train[own], test[other[:test_per_class]] = home, home
        if self.kind.name in ("blurry", "repeated"):
            self._move_some(train, groups)
        return train, test

    def _cells(self, groups: list[list[str]]) -> Iterator[tuple[str, int, np.ndarray]]:
        """Images that are split together, those of a class or of a class in one domain: name, task and rows."""
        dataset = self.dataset
        by_class = dict(zip(dataset.classes, rows_by_class(dataset.labels, len(dataset.classes)), strict=True))
        if self.kind.name != "domains":
            for task, group in enumerate(groups):
                yield from ((name, task, by_class[name]) for name in group)
            return
        if dataset.domains is None:
            advice = "give a folder of DOMAIN/CLASS/…, or quickdraw50"
            raise UserError(f"--stream domains: {dataset.name} has none; {advice}")
        domains = _shuffled(list(dict.fromkeys(dataset.domains.tolist())), self.seed)
        for name in (name for group in groups for name in group):
            for task, domain in enumerate(domains):
                if len(rows := by_class[name][dataset.domains[by_class[name]] == domain]):
                    yield f"{domain}/{name}", task, rows

    def _move_some(self, train: np.ndarray, groups: list[list[str]]) -> None:
        """Some training images of each class come in other tasks (blurry), or in later ones (repeated)."""
        kind, share, names = self.kind.name, self.kind.numbers[-1] / 100, [name for group in groups for name in group]
        staying = set[str]()
        if kind == "blurry":
            count = round(len(names) * self.kind.numbers[0] / 100)
            staying.update(random.Random(f"{self.seed}:blurry").sample(names, count))
        for name, home, rows in self._cells(groups):
            others = [t for t in range(len(groups)) if (t != home if kind == "blurry" else t > home)]
            if share and others and name not in staying:
                moved = split_rows(rows[train[rows] >= 0], share, f"{self.seed}:{kind}:{name}")[1]
                train[moved] = random.Random(f"{self.seed}:{kind}:to:{name}").choices(others, k=len(moved))

    def _listed(self, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `_assign`, by a file. If it lists no test images, a class is tested with the first task that has it.
        train, test: of the images that may be used."""
        dataset, where, file, listed = self.dataset, self.dataset.where, self.kind.file, read_tasks(self.kind.file)
        if not where:
            raise UserError(f"--stream {file}: images of {dataset.name} have no names; give a data set of image files")
        row_of, task_of = {where(row): row for row in range(len(train))}, np.full(len(train), -1)
        for number, images in enumerate(listed):
            for image in images:
                row = row_of.get(image) if isinstance(image, str) else None
                if row is None or task_of[row] >= 0:
                    unknown = f"is not in {dataset.name}, as {next(iter(row_of))!r} is"
                    wrong = unknown if row is None else "is listed twice"
                    raise UserError(f"--stream {file}, task {number + 1}: {shown(image)} {wrong}")
                task_of[row] = number
        train, tested = (np.where(may == 0, task_of, -1) for may in (train, test))
        first = np.full(len(dataset.classes), len(listed))  # the first task of each class
        np.minimum.at(first, dataset.labels[train >= 0], train[train >= 0])
        first = first[dataset.labels]
        if tested.max() < 0:
            tested = np.where((test == 0) & (first < len(listed)), first, -1)
        for number in range(len(listed)):
            for what, tasks in (("training", train), ("test", tested[tested >= first])):  # of classes learned by then
                if number not in tasks:
                    raise UserError(f"--stream {file}, task {number + 1}: no {what} images; list some that can be used")
        return train, tested

    def _chosen(self, rows: np.ndarray, name: str, count: int | None) -> np.ndarray:
        """As many of a class's training images as are wanted; in order, whatever was drawn."""
        if self.train_choice == "first" or count is None or count >= len(rows):
            return rows[:count]
        return rows[sorted(random.Random(f"{self.seed}:train:{name}").sample(range(len(rows)), count))]


def read_tasks(file: str) -> list[list[Any]]:
    """The tasks that a file lists."""
    like = 'a list of tasks, as in [["crow/1.jpg"], ["owl/2.jpg"]]'
    listed = read_json(Path(file), f"--stream needs {like}")
    if not (isinstance(listed, list) and listed and all(isinstance(task, list) for task in listed)):
        raise UserError(f"--stream {file}: expected {like}")
    return listed


def tasks_digest(file: Path) -> str:
    """16 hex digits of the content of such a file. Raises OSError."""
    return hashlib.sha256(read_regular(file)).hexdigest()[:16]


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
    """Split rows into those to keep and a seeded fraction to hold out: at least one, if there are two or more. Both
    keep their order."""
    count = min(max(1, round(len(rows) * held_out)), len(rows) - 1) if len(rows) > 1 else 0
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[random.Random(seed).sample(range(len(rows)), count)] = True
    return rows[~chosen], rows[chosen]


def _divide(dataset: Dataset, tasks: Division, seed: int) -> list[list[str]]:
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
    first: dict[str, int] = {}
    for number, group in enumerate(groups, start=1):
        for name in group:
            if name not in dataset.classes:
                raise UserError(f"task {number} wants the class {name!r}, which {dataset.name} does not have")
            if (before := first.setdefault(name, number)) != number or group.count(name) > 1:
                raise UserError(f"the class {name!r} is in task {before} and in task {number}; tasks must be disjoint")
        if not group:
            raise UserError(f"task {number} has no classes")
    return groups

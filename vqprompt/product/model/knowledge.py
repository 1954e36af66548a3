"""What a model knows: values that never change, and functions that make new ones from them.

A change of a model makes a new `Knowledge`. So threads that predict work with one that stays as it is, earlier versions
cost nothing but what differs, and a change that fails leaves everything as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Any

import numpy as np

from vqprompt.core.data.decode import stored_side
from vqprompt.core.statistics.world import World
from vqprompt.core.words import counted, shorten
from vqprompt.product.model.calibration import Measurements, Solution, solve
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.model.records import ClassRecord, gram_of

LARGEST_SIZE = 4096  # of images, in px
HISTORY_KEPT = 10_000  # changes; older ones are no longer listed


@dataclass(frozen=True)
class Backbone:
    """The network that a model's features come from. name: as in `vqprompt backbones`, or the path of its file. width:
    of a feature. precision: of the features, "fp32" or "int8"."""

    name: str
    fingerprint: str
    size: int
    crop: float
    width: int
    precision: str = "fp32"

    @property
    def side(self) -> int:
        """Side in px of the squares that images are squashed to before they are cropped."""
        return stored_side(self.size)


@dataclass(frozen=True)
class Event:
    """A change of a model. what: "learned", "relabeled", "unlearned", "merged", "renamed", "forgot" or "returned".
    classes: the number of images of each class that were learned, taken away or merged; "unknown" for counterexamples.
    name: the class that was renamed or forgotten; empty if it was forgotten for good. new_name: the class that became
    of it, or that images were moved to. version: the one that was returned to."""

    date: str
    what: str
    effort: str = "instant"
    classes: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    new_name: str = ""
    version: int | None = None

    @classmethod
    def now(cls, what: str, **more: Any) -> Event:
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), what, **more)

    @property
    def images(self) -> int:
        return sum(self.classes.values())

    @property
    def detail(self) -> str:
        if self.what == "returned":
            return f"to version {self.version}"
        if self.what == "renamed":
            return f"{self.name} → {self.new_name}"
        if self.classes:
            names = shorten(list(self.classes), 3)
            what = names if self.what == "merged" else f"{counted(self.images, 'image')} of {names}"
            return f"{what} → {self.new_name}" if self.new_name else what
        return self.name or "a class, for good"

    def __str__(self) -> str:
        return f"{self.what} {self.detail} ({self.date[:10]})"

    def to_json(self) -> dict[str, Any]:
        if self.what != "learned":
            return {"date": self.date, "what": self.what, "detail": self.detail}
        learned = {"classes": dict(self.classes), "images": self.images}
        return {"date": self.date, "what": self.what, "effort": self.effort, **learned}

    @property
    def former_names(self) -> set[str]:
        """Of the class that was renamed, or of those that were merged."""
        return {self.name} if self.what == "renamed" else set(self.classes) if self.what == "merged" else set()

    def about(self, old: Collection[str], new: str) -> Event:
        """The same event after classes were renamed or merged. Only what was learned is told with today's names."""
        if self.what != "learned":
            return self
        classes = Counter[str]()
        for name, count in self.classes.items():
            classes[new if name in old else name] += count
        return replace(self, classes=dict(classes))


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What a model knows at one moment.

    version: counts the changes; 0 is the empty model. parent: the version that this one was made from. classes: sorted
    by name. history: oldest first. trained: what changes the network, if anything was trained; features are those of
    the changed network. moved: classes whose memory was moved when the network was trained on others. measured: whether
    accuracy is wanted. solution: None without classes, and for other versions than the model as it is, which are solved
    again when they are returned to. against: counterexamples: images that are none of the classes. world: what ordinary
    things look like under the plain backbone.
    """

    version: int = 0
    classes: Mapping[str, ClassRecord] = field(default_factory=dict)
    history: tuple[Event, ...] = ()
    trained: Trained | None = None
    moved: frozenset[str] = frozenset()
    measured: bool = True
    solution: Solution | None = None
    parent: int | None = None
    world: World | None = None
    against: ClassRecord | None = None

    @property
    def records(self) -> dict[str, ClassRecord]:
        """Of all images it has learned: the classes, and the counterexamples as "unknown"."""
        return {**self.classes, **({} if self.against is None else {UNKNOWN: self.against})}

    @property
    def measurements(self) -> Measurements | None:
        return None if self.solution is None else self.solution.measurements

    @property
    def accuracy(self) -> float | None:
        """Share of right answers for images that it has not learned (left out one at a time); every class counts the
        same."""
        return None if self.measurements is None else self.measurements.accuracy

    @property
    def counts(self) -> dict[str, int]:
        """Images of each class."""
        return {name: record.count for name, record in self.classes.items()}

    def to_json(self) -> dict[str, Any]:
        """For people and programs."""
        measured, solution = self.measurements, self.solution
        return {
            "version": self.version,
            "classes": [
                {
                    "name": name,
                    "images": record.count,
                    "kinds": int(record.modes.max(initial=0)) + 1,
                    "accuracy": None if measured is None else measured.share(name),
                    "taught": [e.date for e in self.history if e.what == "learned" and name in e.classes],
                }
                for name, record in self.classes.items()
            ],
            "images": sum(self.counts.values()),
            "counterexamples": 0 if self.against is None else self.against.count,
            "accuracy": self.accuracy,
            "accuracy_interval": None if measured is None else list(measured.interval),
            "calibration_error": None if measured is None else list(measured.calibration_error),
            "shrinkage": None if solution is None else solution.shrinkage,
            "temperature": None if solution is None else solution.calibration.temperature,
            "effort": "instant" if self.trained is None else self.trained.effort,
            "moved": sorted(self.moved),
            "history": [event.to_json() for event in self.history],
        }

    def changed(self, event: Event, **changes: Any) -> Knowledge:
        """After an event. changes: of other fields; if `records` change, the solution is computed again."""
        history = (*self.history, event)[-HISTORY_KEPT:]
        if "records" not in changes:
            return replace(self, history=history, **changes)
        classes = dict(sorted(changes.pop("records").items()))
        against = classes.pop(UNKNOWN, None)
        moved = frozenset(changes.pop("moved", self.moved)) & classes.keys()
        changed = replace(self, history=history, classes=classes, against=against, moved=moved, **changes)
        return changed.solved(self)

    def solved(self, former: Knowledge) -> Knowledge:
        """With its solution. former: one whose solution is known, so that only the differences have to be added up."""
        if not self.classes:
            return replace(self, solution=None)
        world = self.world if self.trained is None else None
        solution = solve(self.classes, _gram(self.classes, former), self.against, world)
        return replace(self, solution=solution if self.measured else replace(solution, measurements=None))

    def renamed(self, old: str, new: str) -> Knowledge:
        """With a class under another name, as if it had been taught with that name."""
        return self._as_one((old,), new, Event.now("renamed", name=old, new_name=new))

    def merged(self, names: Collection[str], new: str) -> Knowledge:
        """With several classes as one."""
        counts = {name: self.classes[name].count for name in names}
        return self._as_one(names, new, Event.now("merged", classes=counts, new_name=new))

    def _as_one(self, names: Collection[str], new: str, event: Event) -> Knowledge:
        record = reduce(ClassRecord.merged, [self.classes[name] for name in names])
        records = {name: other for name, other in self.records.items() if name not in names}
        history = tuple(earlier.about(names, new) for earlier in self.history)
        moved = self.moved | ({new} if self.moved & set(names) else set())
        return replace(self, history=history).changed(event, records={**records, new: record}, moved=moved)

    def aliases(self, name: str) -> frozenset[str]:
        """All names that a class has had."""
        names = {name}
        for event in reversed(self.history):
            if event.what in ("renamed", "merged") and event.new_name in names:
                names |= event.former_names
        return frozenset(names)

    def without_trace(self, names: frozenset[str]) -> Knowledge:
        """With a history that does not mention a class of these names, nor of those that it had before."""
        history: list[Event] = []
        for event in reversed(self.history):
            left = {name: count for name, count in event.classes.items() if name not in names}
            if event.new_name in names:
                names |= event.former_names
            elif event.name not in names and (left or not event.classes):
                history.insert(0, replace(event, classes=left))
        return replace(self, history=tuple(history))


def _gram(classes: Mapping[str, ClassRecord], former: Knowledge) -> np.ndarray:
    """Sums of whole numbers, so adding and subtracting is exact."""
    new, old = set(classes.values()), set[ClassRecord]()
    if former.solution is None:
        gram = np.zeros(2 * next(iter(new)).total.shape)
    else:
        gram, old = former.solution.gram.copy(), set(former.classes.values())
    for record in old - new:
        gram -= gram_of(record)
    for record in new - old:
        gram += gram_of(record)
    return gram

"""What a model knows, now and in its other versions: values that never change, and what makes new ones from them.

A change of a model makes a new `Knowledge`. So threads that predict work with one that stays as it is, earlier versions
cost nothing but what differs, and a change that fails leaves everything as it was. `Stored` is the one place that knows
all versions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Any

import numpy as np

from vqprompt.core.data.decode import stored_side
from vqprompt.core.errors import UserError
from vqprompt.core.statistics.world import World, find_world
from vqprompt.core.words import counted, shorten
from vqprompt.product.model.calibration import Measurements, Solution, solve
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.model.records import ClassRecord, gram_of, ids_of

LARGEST_SIZE = 4096  # of images, in px
HISTORY_KEPT = 10_000  # changes; older ones are no longer listed
VERSIONS_KEPT = 10  # besides the model as it is


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

    def taught(self, name: str) -> bool:
        return name in self.classes if self.what == "learned" else (self.what, self.new_name) == ("relabeled", name)

    @property
    def former_names(self) -> set[str]:
        """Of the class that was renamed, or of those that were merged."""
        return {self.name} if self.what == "renamed" else set(self.classes) if self.what == "merged" else set()

    def about(self, old: Collection[str], new: str) -> Event:
        """The same event after classes were renamed or merged. What they were taught is told with today's names."""
        if self.what != "learned":
            return replace(self, new_name=new) if self.what == "relabeled" and self.new_name in old else self
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
    def accuracy_interval(self) -> tuple[float, float] | None:
        """Where the accuracy is, 19 times in 20."""
        return None if self.measurements is None else self.measurements.interval

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
                    "taught": [e.date for e in self.history if e.taught(name)],
                }
                for name, record in self.classes.items()
            ],
            "images": sum(self.counts.values()),
            "counterexamples": 0 if self.against is None else self.against.count,
            "accuracy": self.accuracy,
            "accuracy_interval": self.accuracy_interval,
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

    def as_one(self, names: Collection[str], new: str, event: Event) -> Knowledge:
        """With one class of these, under a new name, as if it had been taught with that name."""
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


# ---------------------------------------------------------------------------------------------- versions


@dataclass(frozen=True)
class Version:
    """A version of a model. date: when it was made. description: the change that made it."""

    number: int
    date: str
    description: str

    @classmethod
    def of(cls, known: Knowledge) -> Version:
        if not known.history:
            return cls(known.version, "", "the empty model")
        return cls(known.version, known.history[-1].date, str(known.history[-1]))


@dataclass(frozen=True, eq=False)
class Stored:
    """All that a file holds. others: versions that are kept besides the model as it is, without their solutions: those
    that it was made from, and those that were undone. latest: the largest number that a version ever had."""

    backbone: Backbone
    knowledge: Knowledge = Knowledge()
    others: tuple[Knowledge, ...] = ()
    latest: int = 0

    @classmethod
    def empty(cls, backbone: Backbone) -> Stored:
        """A new model, with the world under its backbone if there is one."""
        return cls(backbone, Knowledge(world=find_world(backbone.fingerprint, backbone.size)))

    @property
    def versions(self) -> tuple[Version, ...]:
        """All that are kept, with the model as it is, by number."""
        return tuple(Version.of(known) for known in sorted((*self.others, self.knowledge), key=lambda k: k.version))

    @property
    def ancestors(self) -> list[Knowledge]:
        """The versions that the model was made from, newest first: what can be undone to."""
        kept, line, number = {known.version: known for known in self.others}, [], self.knowledge.parent
        while number is not None and number in kept:
            line.append(kept.pop(number))
            number = line[-1].parent
        return line

    def by_importance(self) -> list[Knowledge]:
        """The other versions: first those that can be undone to, newest first."""
        ancestors = self.ancestors
        return [*ancestors, *sorted(set(self.others) - set(ancestors), key=lambda known: -known.version)]

    def _at(self, known: Knowledge, **changes: Any) -> Stored:
        """With another version as the model. The one before is kept."""
        before = replace(self.knowledge, solution=None)
        others = (*(other for other in self.others if other.version != known.version), before)
        now = replace(self, knowledge=known, others=others, **changes)
        return replace(now, others=tuple(now.by_importance()[:VERSIONS_KEPT]))

    def with_version(self, known: Knowledge) -> Stored:
        """After a change."""
        latest = self.latest + 1
        return self._at(replace(known, version=latest, parent=self.knowledge.version), latest=latest)

    def undone(self, steps: int) -> Stored:
        ancestors = self.ancestors
        if not ancestors:
            raise UserError("there is nothing to undo: no earlier version of this model is kept")
        if not 1 <= steps <= len(ancestors):
            raise UserError(f"{steps} steps cannot be undone; give 1 to {len(ancestors)}, the versions that are kept")
        return self._at(ancestors[steps - 1].solved(self.knowledge))

    def returned(self, number: int) -> Stored:
        kept = {known.version: known for known in self.others}
        if number not in kept:
            numbers = ", ".join(map(str, sorted(kept))) or "none"
            raise UserError(f"there is no other version {number} of this model; those that are kept: {numbers}")
        other = kept[number].changed(Event.now("returned", version=number))
        return self.with_version(other.solved(self.knowledge))

    def without(self, name: str) -> Stored:
        """After a class was forgotten."""
        left = {other: record for other, record in self.knowledge.records.items() if other != name}
        return self.with_version(self.knowledge.changed(Event.now("forgot", name=name), records=left))

    def has_traces(self, name: str) -> bool:
        """Of a class that the model no longer knows, under any name."""
        known = self.knowledge
        current = ids_of(known.records.values())
        former = [k.records[name] for k in self.others if name in k.records]
        events = [event for k in (*self.others, known) for event in k.history]
        forgotten = any(event.what == "forgot" and event.name == name for event in events)
        return forgotten or any(not np.isin(record.ids, current).any() for record in former)

    def _identity(self, name: str) -> tuple[frozenset[str], np.ndarray]:
        """All names of a class in any version, and the ids of all its images. Those that other classes have now are
        not its names."""
        versions, names, more = (*self.others, self.knowledge), frozenset[str](), frozenset({name})
        while not more <= names:
            names = names.union(*(known.aliases(n) for known in versions for n in more))
            own = ids_of(known.records[n] for known in versions for n in names & known.records.keys())
            same = {n for k in self.others for n, record in k.classes.items() if np.isin(record.ids, own).any()}
            more = frozenset(same - self.knowledge.classes.keys())
        return names, own

    def erased(self, name: str) -> Stored:
        """After a class was forgotten for good: without a trace of it, under none of the names that it ever had."""
        names, own = self._identity(name)
        now = self.without(name)
        history = (*now.knowledge.without_trace(frozenset({name})).history, Event.now("forgot"))
        return replace(now, knowledge=replace(now.knowledge, history=history))._cleaned(names, own)

    def erased_images(self, known: Knowledge, ids: np.ndarray) -> Stored:
        """After images were unlearned for good. known: without them. A class that loses its last image leaves no trace
        either."""
        names = frozenset[str]()
        for name in sorted(self.knowledge.classes.keys() - known.classes.keys()):
            names |= self._identity(name)[0]
            left = known.without_trace(frozenset({name}))
            known = replace(left, history=(*left.history, Event.now("unlearned")))
        return self.with_version(known)._cleaned(names, ids)

    def _cleaned(self, names: frozenset[str], ids: np.ndarray) -> Stored:
        """Without other versions that have a class of these names, or one of these images."""
        kept = {
            known.version: known.without_trace(names)
            for known in self.others
            if not any(n in names or np.isin(record.ids, ids).any() for n, record in known.records.items())
        }
        line = [known.version for known in self.ancestors if known.version in kept]
        for number, parent in itertools.zip_longest(line, line[1:]):  # from each version to the next that is left
            kept[number] = replace(kept[number], parent=parent)
        known = replace(self.knowledge, parent=line[0] if line else None)
        return replace(self, knowledge=known, others=tuple(kept.values()))

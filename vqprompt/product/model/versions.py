"""A model with its earlier versions: the one place that knows them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.product.model.knowledge import Backbone, Event, Knowledge

VERSIONS_KEPT = 10  # earlier ones
EMPTY = Knowledge()


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
    """All that a file holds. past: earlier versions, newest last, without their solutions. latest: the largest number
    that a version of this model ever had."""

    backbone: Backbone
    knowledge: Knowledge = EMPTY
    past: tuple[Knowledge, ...] = ()
    latest: int = 0

    @property
    def versions(self) -> tuple[Version, ...]:
        """Oldest first; the last one is the model as it is."""
        return tuple(map(Version.of, (*self.past, self.knowledge)))

    def with_version(self, known: Knowledge) -> Stored:
        """After a change."""
        past = (*self.past, replace(self.knowledge, solution=None))[-VERSIONS_KEPT:]
        latest = self.latest + 1
        return replace(self, knowledge=replace(known, version=latest), past=past, latest=latest)

    def undone(self, steps: int) -> Stored:
        if not self.past:
            raise UserError("there is nothing to undo: no earlier version of this model is kept")
        if not 1 <= steps <= len(self.past):
            raise UserError(f"{steps} steps cannot be undone; give 1 to {len(self.past)}, the versions that are kept")
        return replace(self, knowledge=self.past[-steps].solved(self.knowledge), past=self.past[:-steps])

    def returned(self, number: int) -> Stored:
        kept = {known.version: known for known in self.past}
        if number not in kept:
            numbers = ", ".join(map(str, kept)) or "none"
            raise UserError(f"there is no earlier version {number} of this model; those that are kept: {numbers}")
        earlier = kept[number].changed(Event.now("returned", version=number))
        return self.with_version(earlier.solved(self.knowledge))

    def without(self, name: str) -> Stored:
        """After a class was forgotten."""
        left = {other: record for other, record in self.knowledge.classes.items() if other != name}
        return self.with_version(self.knowledge.changed(Event.now("forgot", name=name), classes=left))

    def has_traces(self, name: str) -> bool:
        """Of a class that the model no longer knows, under any name."""
        known = self.knowledge
        current = np.concatenate([np.zeros(0, np.uint64), *(record.ids for record in known.classes.values())])
        former = [k.classes[name] for k in self.past if name in k.classes]
        forgotten = any(event.what == "forgot" and event.name == name for event in known.history)
        return forgotten or any(not np.isin(record.ids, current).any() for record in former)

    def erased(self, name: str) -> Stored:
        """After a class was forgotten for good: without a trace of it, under none of the names that it ever had."""
        versions = (*self.past, self.knowledge)
        names = frozenset[str]().union(*(known.aliases(name) for known in versions))
        records = [known.classes[n] for known in versions for n in names & known.classes.keys()]
        own = np.concatenate([np.zeros(0, np.uint64), *(record.ids for record in records)])
        now = self.without(name)
        past = [
            known.without_trace(names)
            for known in now.past
            if not any(n in names or np.isin(record.ids, own).any() for n, record in known.classes.items())
        ]
        history = now.knowledge.without_trace(frozenset({name})).history
        event = Event.now("forgot")
        return replace(now, knowledge=replace(now.knowledge, history=(*history, event)), past=tuple(past))

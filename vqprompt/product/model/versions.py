"""A model with its other versions: the one place that knows them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.core.statistics.world import find_world
from vqprompt.product.model.knowledge import Backbone, Event, Knowledge

VERSIONS_KEPT = 10  # besides the model as it is
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
    """All that a file holds. others: versions that are kept besides the model as it is, without their solutions: those
    that it was made from, and those that were undone. latest: the largest number that a version ever had."""

    backbone: Backbone
    knowledge: Knowledge = EMPTY
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
        kept, found, number = {known.version: known for known in self.others}, [], self.knowledge.parent
        while number is not None and number in kept:
            found.append(kept.pop(number))
            number = found[-1].parent
        return found

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
        left = {other: record for other, record in self.knowledge.classes.items() if other != name}
        return self.with_version(self.knowledge.changed(Event.now("forgot", name=name), classes=left))

    def has_traces(self, name: str) -> bool:
        """Of a class that the model no longer knows, under any name."""
        known = self.knowledge
        current = np.concatenate([np.zeros(0, np.uint64), *(record.ids for record in known.classes.values())])
        former = [k.classes[name] for k in self.others if name in k.classes]
        events = [event for k in (*self.others, known) for event in k.history]
        forgotten = any(event.what == "forgot" and event.name == name for event in events)
        return forgotten or any(not np.isin(record.ids, current).any() for record in former)

    def _identity(self, name: str) -> tuple[frozenset[str], np.ndarray]:
        """All names of a class in any version, and the ids of all its images. Those that other classes have now are
        not its names."""
        versions, names, more = (*self.others, self.knowledge), frozenset[str](), frozenset({name})
        while not more <= names:
            names = names.union(*(known.aliases(n) for known in versions for n in more))
            records = [known.classes[n] for known in versions for n in names & known.classes.keys()]
            own = np.concatenate([np.zeros(0, np.uint64), *(record.ids for record in records)])
            same = {n for k in self.others for n, record in k.classes.items() if np.isin(record.ids, own).any()}
            more = frozenset(same - self.knowledge.classes.keys())
        return names, own

    def erased(self, name: str) -> Stored:
        """After a class was forgotten for good: without a trace of it, under none of the names that it ever had."""
        names, own = self._identity(name)
        now = self.without(name)
        kept = {
            known.version: known.without_trace(names)
            for known in now.others
            if not any(n in names or np.isin(record.ids, own).any() for n, record in known.classes.items())
        }
        history = (*now.knowledge.without_trace(frozenset({name})).history, Event.now("forgot"))
        line = [known.version for known in now.ancestors if known.version in kept]
        for number, parent in itertools.zip_longest(line, line[1:]):  # from each version to the next that is left
            kept[number] = replace(kept[number], parent=parent)
        return replace(
            now,
            knowledge=replace(now.knowledge, history=history, parent=line[0] if line else None),
            others=tuple(kept.values()),
        )

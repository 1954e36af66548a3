"""A model with its other versions: the one place that knows them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.core.statistics.world import find_world
from vqprompt.product.model.knowledge import Backbone, Event, Knowledge
from vqprompt.product.model.records import ids_of

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

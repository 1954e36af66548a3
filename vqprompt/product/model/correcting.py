"""Corrections of a model: another name or another class for what it has learned, or no trace of it.

At effort instant, a corrected model is the same, to the bit, as one that was taught correctly from the start: what is
remembered are sums of whole numbers, from which the part of an image can be taken away again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.words import look_misspelled, nearest_name, shorten
from vqprompt.product.model.extractor import unless_error
from vqprompt.product.model.knowledge import Event, Knowledge
from vqprompt.product.model.left_out import Changes
from vqprompt.product.model.pictures import UNKNOWN, Picture, check_spelling, clean_name, content_id, find_pictures
from vqprompt.product.model.predicting import Predicting
from vqprompt.product.model.records import KEPT, ClassRecord, added, ids_of, to_fixed_point
from vqprompt.product.model.teaching import LostAnswers, lost_answers

MOST_PAIRS = 100_000  # of names that are compared: about a second
TRAINED = (
    "what the model remembered is corrected, but the network was trained before and stays as it is. To leave no trace, "
    "make a new model"
)


@dataclass(frozen=True)
class Correction:
    """What a correction did, or would do. classes: how many images of which classes were moved, taken away or merged.
    new_name: the class they belong to now. changes: of the answers about images that are left out. accuracy_interval,
    warnings: as in `Taught`."""

    classes: Mapping[str, int]
    new_name: str
    changes: Changes
    accuracy_before: float | None
    accuracy: float | None
    notes: tuple[str, ...] = ()
    accuracy_interval: tuple[float, float] | None = None
    warnings: tuple[LostAnswers, ...] = ()

    @property
    def images(self) -> int:
        return sum(self.classes.values())

    def to_json(self) -> dict[str, Any]:
        told = {"classes": dict(self.classes), "changes": self.changes.to_json(), "notes": [*self.notes]}
        return {**vars(self), **told, "warnings": [warning.to_json() for warning in self.warnings]}


class Correcting(Predicting):
    """The part of `Model` that corrects what was learned. Every correction can be undone."""

    def rename(self, old: str, new: str) -> None:
        """Give a class another name. Naming it like a class that exists is refused."""
        with self._changing:
            known = self.knowledge
            check_known(old, known.classes)
            new = clean_name(new)
            if new == old:
                return
            check_spelling([name for name in known.classes if name != old], [new])
            if new in known.classes:
                raise UserError(f"there is already a class {new!r}; to make one class of both, merge them")
            renamed = known.as_one([old], new, Event.now("renamed", name=old, new_name=new))
            self._stored = self._opened().with_version(renamed)

    def forget(self, name: str, *, for_good: bool = False) -> None:
        """Remove a class: the model becomes what it would be if it had never learned it. name: "unknown" for all
        counterexamples.

        for_good: also remove it from the history, and all other versions that know it, so that nothing can bring it
        back. A running server notices that the file has changed, and deletes what it has (`State.refresh`). A class
        that was forgotten before can be forgotten for good later.
        """
        with self._changing:
            stored = self._opened()
            if not (for_good and stored.has_traces(name)):
                check_known(name, self.knowledge.records)
            self._stored = stored.erased(name) if for_good else stored.without(name)

    def merge(self, names: Sequence[str], into: str, *, preview: bool = False) -> Correction:
        """Make one class of several, as if their images had been taught as one. preview: only tell what would change.

        into: its name, that of one of them or a new one.
        """
        with self._changing:
            known, names = self.knowledge, list(dict.fromkeys(names))
            for name in names:
                check_known(name, known.classes)
            into = clean_name(into)
            if len(names) < 2:
                raise UserError(f"merging needs two classes or more, not only {shorten(names)}")
            others = [name for name in known.classes if name not in names]
            check_spelling(others, [into])
            if into in others:
                raise UserError(f"there is already a class {into!r}; name it among those to merge, or choose another")
            event = Event.now("merged", classes={name: known.counts[name] for name in names}, new_name=into)
            return self._correct(known.as_one(names, into, event), preview, renamed=dict.fromkeys(names, into))

    def relabel(self, images: Any, name: str, *, preview: bool = False) -> Correction:
        """Move images that were learned to another class, known or new; "unknown": to the counterexamples.

        images: image files, folders or their content, as they were taught; or the ids of their content. They are found
        by their content, so names of files do not matter. preview: only tell what would change.
        """
        with self._changing:
            known, name = self.knowledge, name if name == UNKNOWN else clean_name(name)
            check_spelling(known.classes, [name])
            records, parts, _ = self._taken_out(images, stays=name)
            notes = misspellings([name], known.classes) if name not in (*known.classes, UNKNOWN) else []
            if not parts:
                note, accuracy = f"nothing to do: the model has learned all of these as {name!r}", known.accuracy
                return Correction({}, name, Changes({}, ()), accuracy, accuracy, (note,))
            for part in parts.values():
                records = added(records, {name: part})
            event = Event.now("relabeled", classes={n: part.count for n, part in parts.items()}, new_name=name)
            estimated = known.moved | ({name} if known.moved & parts.keys() else set())
            return self._correct(known.changed(event, records=records, moved=estimated), preview, notes)

    def unlearn(self, images: Any, *, for_good: bool = False, preview: bool = False) -> Correction:
        """Take images away that were learned: the model becomes what it would be without them.

        images: as in `relabel`. for_good: also remove all other versions that know one of them, so that nothing can
        bring them back. preview: only tell what would change.
        """
        with self._changing:
            known = self.knowledge
            records, parts, ids = self._taken_out(images)
            event = Event.now("unlearned", classes={name: part.count for name, part in parts.items()})
            return self._correct(known.changed(event, records=records), preview, erased=ids if for_good else None)

    def _correct(
        self, now: Knowledge, preview: bool, notes: Sequence[str] = (), renamed: Mapping[str, str] | None = None,
        erased: np.ndarray | None = None,
    ) -> Correction:  # fmt: skip
        """Take over what a correction made. erased: ids of images that no version may know any more."""
        before, event = self.knowledge, now.history[-1]
        gone = [name for name in before.classes if name not in now.classes and name not in (renamed or ())]
        notes = [*notes, *(f"no image of {name!r} is left, so it is no longer a class" for name in gone)]
        if before.trained is not None:
            notes.append(TRAINED)
        if not preview:
            stored = self._opened()
            self._stored = stored.with_version(now) if erased is None else stored.erased_images(now, erased)
        changes = Changes.between(before, now, renamed)
        return Correction(
            event.classes, event.new_name, changes, before.accuracy, now.accuracy, tuple(notes),
            now.accuracy_interval, lost_answers(before, now, changes),
        )  # fmt: skip

    def _taken_out(
        self, images: Any, stays: str = ""
    ) -> tuple[dict[str, ClassRecord], dict[str, ClassRecord], np.ndarray]:
        """The records without some images, the records of these images by their class, and all their ids. stays: a
        class that keeps its images."""
        known = self.knowledge
        pictures = _by_content(images)
        ids = np.array(sorted(pictures), np.uint64)
        for image in ids[~np.isin(ids, ids_of(known.records.values()))][:1].tolist():
            picture = pictures[image]
            raise UserError(
                f"{f'image {image:016x}' if picture is None else picture.where}: the model has not learned this image. "
                "It is recognized by its content, so a copy that was scaled or saved again is another image; give the "
                "file that was taught, or teach this one with learn --as CLASS"
            )
        records, parts = known.records, dict[str, ClassRecord]()
        for name, record in known.records.items():
            own = ids[np.isin(ids, record.ids)]
            if len(own) and name != stays:
                parts[name] = self._part(name, record, own, pictures)
                left = record.without(parts[name])
                records = {n: r for n, r in {**records, name: left}.items() if r is not None}
        return records, parts, ids

    def _part(
        self, name: str, record: ClassRecord, ids: np.ndarray, pictures: Mapping[int, Picture | None]
    ) -> ClassRecord:
        """The record of some images of a class. Features that are not remembered are computed again."""
        rows = np.flatnonzero(np.isin(record.ids[: len(record.kept)], ids))
        remembered, features, unseen = record.ids[rows], record.kept[rows], record.unseen[rows]
        if len(record.kept) - len(remembered) < min(record.count - len(ids), KEPT):
            raise UserError(
                f"{name!r} has {record.count} images, and the features of {KEPT} of them are remembered, also of this "
                "one. Without it those of another one would be needed, and they are not known; forget the class, and "
                "learn it again without this image"
            )
        others = ids[~np.isin(ids, remembered)]
        given = [picture for image in others.tolist() if (picture := pictures[image]) is not None]
        if len(given) < len(others):
            raise UserError(
                f"{name!r} has {record.count} images, and of this one the features are not remembered; give its file"
            )
        for feature in self.extractor_of(self.knowledge).of(given) if given else ():
            features = np.concatenate([features, to_fixed_point(unless_error(feature))[None]])
        unseen = np.concatenate([unseen, np.full(len(others), self.knowledge.trained is None)])
        return ClassRecord.of(np.concatenate([remembered, others]), features, unseen)


def _by_content(images: Any) -> dict[int, Picture | None]:
    """Images by the ids of their content; None where only the id is given."""
    listed = images if isinstance(images, list | tuple) else [images]
    if not len(listed):
        raise UserError("no image is given; give image files, or the ids of images")
    if all(isinstance(image, int | np.integer) for image in listed):
        return {int(image): None for image in listed}
    pictures = dict[int, Picture | None]()
    for picture in find_pictures(images, "picture")[0]:
        try:
            pictures[content_id(picture.open())] = picture
        except OSError as error:
            raise ImageError(f"{picture.where}: cannot be read ({error.strerror})") from None
    return pictures


def check_known(name: str, classes: Collection[str]) -> None:
    """Refuse a name that is not among these classes."""
    if name not in classes:
        near = nearest_name(name, classes)
        hint = f"did you mean {near!r}?" if near else f"it knows {shorten(sorted(classes)) or 'no class yet'}"
        raise UserError(f"the model knows no class {name[:100]!r}; {hint}")


def misspellings(new: Collection[str], known: Collection[str]) -> list[str]:
    """Notes about new classes whose names look like another spelling of a class that exists, or of each other."""
    names = sorted(new)
    if len(names) * (len(known) + len(names)) > MOST_PAIRS:
        return []
    pairs = [(name, other) for i, name in enumerate(names) for other in (*known, *names[:i])]
    return [
        f"is {name!r} another spelling of {other!r}? If so: vqprompt merge MODEL {other!r} {name!r} --as {other!r}"
        for name, other in pairs
        if look_misspelled(name, other)
    ][:3]

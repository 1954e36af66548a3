"""A folder that is watched: images that arrive in it are answered, sub-folders that a person makes are taught.

What is notable about this implementation:
- The folder and the model are all that it remembers, so a watch may be killed at any moment. After a restart, images
  that are still in the folder are answered again, and the model itself knows which images it has learned.
- It looks at the folder again and again. Events of the operating system would be less work, but network drives send
  none, and nobody receives them while the watch is not running.
- A file is read after two looks in a row saw the same size and time. A file that cannot be read is named once, and
  tried again when it changes. So a copy that takes long, or stops halfway, does no harm.
"""

from __future__ import annotations

import itertools
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vqprompt.core.data.archives import hidden
from vqprompt.core.data.decode import IMAGE_SUFFIXES
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.files import lock_file
from vqprompt.core.words import counted
from vqprompt.product.model.model import Model
from vqprompt.product.model.opening import ModelDefaults, changing, stamp_of
from vqprompt.product.model.pictures import check_spelling, clean_name
from vqprompt.product.model.predicting import Answer
from vqprompt.product.model.teaching import Taught

SORTED = "sorted"  # this sub-folder is the watch's own: it is not taught
AT_ONCE = 32  # images that are answered, and sorted, together

Stamp = tuple[int, ...]


@dataclass(eq=False)
class Watch:
    """folder: new images appear in it, and sub-folders named by class. model: its file, which may be new. sort: move
    answered images to sorted/CLASS. answered: called with an image and
    what it is. taught: called after a teaching. warn: called with each problem once; the watch goes on."""

    folder: Path
    model: Path
    answered: Callable[[Path, Answer], None]
    taught: Callable[[Taught], None]
    warn: Callable[[str], None]
    sort: bool = False
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    _seen: dict[Path, Stamp] = field(init=False, default_factory=dict)  # at the last look
    _done: dict[Path, Stamp] = field(init=False, default_factory=dict)
    _moved: set[Stamp] = field(init=False, default_factory=set)  # images that left the folder of their class
    _loaded: tuple[Stamp | None, Model] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._warn_once = cache(self.warn)  # it is not even called again with the same message
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; make it, or give the folder where images arrive")
        if self.model.exists():
            self._open()

    def run(self, seconds: float, looks: int | None = None) -> None:
        """Look every `seconds`, until the process is ended, or `looks` times."""
        busy = f"{self.folder}: another watch sorts this folder; stop it, or leave out --sort"
        with ExitStack() as held:
            if self.sort:
                held.enter_context(lock_file(self.folder / ".vqprompt-watch.lock", busy))
            for number in itertools.count(1):
                try:
                    self.look()
                except (UserError, OSError) as error:  # such as a model that is being taught: the next look may succeed
                    self._warn_once(f"{error}; trying again")
                if number == looks:
                    return
                time.sleep(seconds)

    def look(self) -> None:
        """Teach and answer what has arrived, and has not changed since the last look."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: is not there now")
        before, self._seen = self._seen, self._stamps()
        for path in self._done.keys() - self._seen.keys():
            stamp = self._done.pop(path)
            if self._class_of(path):
                self._moved.add(stamp)
        growing = {path for path, stamp in self._seen.items() if before.get(path) != stamp}
        todo = [path for path, stamp in self._seen.items() if path not in growing and self._done.get(path) != stamp]
        # a class waits until all of it has arrived, so that it is taught in one step
        waits = {self._class_of(path) for path in growing}
        if classes := {path: name for path in todo if (name := self._class_of(path)) and name not in waits}:
            self._teach(classes)
        self._answer([path for path in todo if not self._class_of(path)])

    def _stamps(self) -> dict[Path, Stamp]:
        """All images that people put here."""
        stamps = {}
        for path in sorted(self.folder.rglob("*")):
            place = path.relative_to(self.folder)
            wanted = path.suffix.lower() in IMAGE_SUFFIXES and place.parts[0] != SORTED and not hidden(place.as_posix())
            if wanted and (found := stamp_of(path)) and stat.S_ISREG(found[0]):  # no stamp: it was moved just now
                stamps[path] = found
        return stamps

    def _class_of(self, path: Path) -> str:
        """The sub-folder that an image is in; "" for one that has just arrived."""
        parts = path.relative_to(self.folder).parts
        return parts[0] if len(parts) > 1 else ""

    def _teach(self, classes: dict[Path, str]) -> None:
        with changing(self.model, self.defaults.open) as model:
            for name in set(classes.values()):
                try:
                    check_spelling(model.classes, [clean_name(name)])
                except UserError as error:
                    self._warn_once(str(error))
                    self._done |= {path: self._seen[path] for path in classes if classes[path] == name}
                    classes = {path: other for path, other in classes.items() if other != name}
            lessons = self._learn(model, list(classes.items()))
        if self.model.exists():
            self._loaded = stamp_of(self.model), model
        self._done |= {path: self._seen[path] for path in classes}
        for taught in lessons:
            for message in taught.broken:
                self._warn_once(message)
            if taught.images:
                self.taught(taught)

    def _learn(self, model: Model, pictures: Sequence[tuple[Path, str]]) -> list[Taught]:
        """Learn all pictures but those that are refused, which are found by halving."""
        if not pictures:
            return []
        paths, labels = [path for path, _ in pictures], [label for _, label in pictures]
        try:
            return [model.learn(paths, labels, skip_broken=True)]
        except ImageError as error:
            if len(pictures) == 1:
                message = str(error)
                if self._seen[paths[0]] in self._moved:  # a person corrects what was taught
                    model.relabel(paths, labels[0])
                    message = f"{paths[0]}: was moved, so it is {labels[0]} now"
                self._warn_once(message)
                return []
            middle = len(pictures) // 2
            return [*self._learn(model, pictures[:middle]), *self._learn(model, pictures[middle:])]

    def _answer(self, images: list[Path]) -> None:
        if images and not self.model.exists():
            count = counted(len(images), "image")
            self._warn_once(f"{self.model} knows nothing yet, so {count} must wait; make a sub-folder of each class")
            return
        for start in range(0, len(images), AT_ONCE):
            part = images[start : start + AT_ONCE]
            for path, answer in zip(part, self._open().try_answers(part), strict=True):
                self._done[path] = self._seen[path]
                if isinstance(answer, Exception):
                    if path.exists():  # else it was moved while it was read
                        self._warn_once(f"{answer}; it is tried again when it changes")
                    continue
                target = self._target(path, answer.name) if self.sort else path
                self.answered(target, answer)  # before it is moved: a kill in between repeats a line, and loses none
                if target != path:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with suppress(FileNotFoundError):
                        path.rename(target)

    def _target(self, path: Path, name: str) -> Path:
        """A free place among the sorted images; nothing is ever replaced."""
        folder = self.folder / SORTED / name.replace("/", "_").replace("\\", "_").lstrip(".")
        others = (f"{path.stem}-{number}{path.suffix}" for number in itertools.count(2))
        return next(folder / name for name in itertools.chain([path.name], others) if not (folder / name).exists())

    def _open(self) -> Model:
        """The model as its file is now; other programs may teach it as well."""
        stamp = stamp_of(self.model)
        if self._loaded is None or self._loaded[0] != stamp:
            self._loaded = stamp, self.defaults.open(self.model)
        return self._loaded[1]

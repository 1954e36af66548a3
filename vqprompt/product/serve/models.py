"""The models of a server. Each answers from an immutable snapshot; a change replaces the whole snapshot."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.product.model.left_out import LeftOutAnswers, left_out_answers
from vqprompt.product.model.model import Model
from vqprompt.product.model.opening import ModelDefaults, stamp_of
from vqprompt.product.model.records import ids_of
from vqprompt.product.serve.errors import Conflict, NotThere


@dataclass(eq=False)
class Snapshot:
    """A model at one moment. It never changes; any number of threads may ask it."""

    name: str
    version: int
    model: Model
    _older: Snapshot | None = field(init=False, default=None)

    @property
    def versions(self) -> list[int]:
        """The numbers of all versions in the file."""
        return [version.number for version in self.model.versions]

    def at(self, version: str) -> Snapshot:
        """Another version, by its number. The one that was asked for last stays in memory."""
        numbers = {str(number): number for number in self.versions}
        if version not in numbers:
            raise NotThere(f"there is no version {version[:20]!r} of {self.name}; there are {', '.join(numbers)}")
        older = self if numbers[version] == self.version else self._older
        if older is None or older.version != numbers[version]:
            model = copy(self.model)
            model.return_to(numbers[version])
            self._older = older = Snapshot(self.name, numbers[version], model)
        return older

    def check_taught(self) -> None:
        if not self.model.classes:
            raise Conflict("the model has learned nothing yet; teach it first")

    @cached_property
    def left_out(self) -> LeftOutAnswers:
        return left_out_answers(self.model.knowledge)

    @cached_property
    def shown(self) -> dict[str, Any]:
        return self.model.show()

    @cached_property
    def names(self) -> frozenset[str]:
        """Every class that the model or its history names."""
        events = ({*event.classes, event.name, event.new_name} for event in self.model.history)
        return frozenset(self.model.classes).union(*events) - {""}

    @cached_property
    def images(self) -> np.ndarray:
        """The images it has learned, by their content: uint64 [n]."""
        return ids_of(self.model.knowledge.records.values())


@dataclass(eq=False)
class ServedModel:
    """One model's file, and the snapshot that answers for it. drawings: whether it knows drawings (the example).
    problem: why the file cannot be used as it is now; an older snapshot keeps answering, if there is one. export: the
    ONNX file that was made of it, and what it is called."""

    name: str
    path: Path
    defaults: ModelDefaults
    drawings: bool = False
    problem: str | None = field(init=False, default=None)
    export: tuple[Path, str] | None = field(init=False, default=None)
    current: Snapshot | None = field(init=False, default=None)
    _stamp: tuple[int, ...] | None = field(init=False, default=())  # () before the first look at the file
    loading: threading.Lock = field(init=False, default_factory=threading.Lock)

    @property
    def snapshot(self) -> Snapshot:
        if self.current is None:
            raise Conflict(f"the model {self.name} cannot be used: {self.problem}")
        return self.current

    def load_new(self) -> Snapshot | None:
        """The file's snapshot, if the file is not the one that was loaded last. A file that cannot be used is a problem
        of this model alone, until it changes."""
        if (stamp := stamp_of(self.path)) == self._stamp:
            return None
        self._stamp, self.problem = stamp, None
        try:
            model = self.defaults.open(self.path)
            return Snapshot(self.name, model.knowledge.version, model)
        except Exception as error:  # whatever is in the file, only this model suffers
            self.problem = without_folder(error, self.path)
            return None

    def drop_export(self) -> None:
        if self.export is not None:
            self.export[0].unlink(missing_ok=True)
            self.export = None


def without_folder(error: Exception, path: Path) -> str:
    """A message about a model's file as clients may read it: they know its name, and need not know its folder."""
    text = str(error) if isinstance(error, UserError) else f"{path}: {type(error).__name__}: {error}"
    return text.replace(str(path), path.name)


def warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


class ModelFolder:
    """All models of a server, by name. folder: where to look for new ones; None if there is one model alone."""

    def __init__(self, models: list[ServedModel], defaults: ModelDefaults, folder: Path | None = None) -> None:
        self._models = {model.name: model for model in models}
        self.defaults, self.folder = defaults, folder

    def __iter__(self) -> Iterator[ServedModel]:
        """Those that can answer."""
        return iter([model for model in self._models.values() if model.current])

    def get(self, name: str | None) -> ServedModel:
        """name: None for the only model there is."""
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise UserError(f"there are several models; name one of {', '.join(self._models)}")
        if name not in self._models:
            raise NotThere(f"there is no model {name[:100]!r}; the models are {', '.join(self._models) or 'none'}")
        return self._models[name]

    def look_again(self, refresh: Callable[[ServedModel], Any]) -> None:
        """Notice what other programs did: models taught with `vqprompt learn`, files added or deleted. refresh: called
        with each model. A bad file is told once."""
        models = dict(self._models)  # requests iterate over the other one
        if self.folder is not None:
            for path in sorted(self.folder.glob("*.vqp")):
                if not path.name.startswith(".") and path.stem.isprintable():
                    models.setdefault(path.stem, ServedModel(path.stem, path, self.defaults))
        for served in list(models.values()):
            is_empty = served.current and not served.current.model.classes  # it has no file until it is taught
            if self.folder is not None and not served.path.exists() and not is_empty:
                del models[served.name]
                continue
            before = served.problem
            refresh(served)
            is_told = self.folder is None and not served.current  # by the command, which then ends
            if served.problem not in (None, before) and not is_told:
                warn(f"{served.path.parent}: {served.problem}")
        self._models = models

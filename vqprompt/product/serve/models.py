"""The models of a server. Each answers from an immutable snapshot; a change replaces the whole snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.product.model.left_out import LeftOutAnswers, left_out_answers
from vqprompt.product.model.model import Model
from vqprompt.product.serve.errors import Conflict, NotThere

OLDER_IN_MEMORY = 2  # older versions that stay loaded, for requests that name a version


@dataclass(frozen=True)
class ModelDefaults:
    """How to make a model that does not exist yet."""

    backbone: str = "vit-s14"
    size: int | None = None
    device: str = "auto"


@dataclass(eq=False)
class Snapshot:
    """A model at one moment. It never changes; any number of threads may ask it."""

    name: str
    version: int
    model: Model

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
        learned = [record.ids for record in self.model.knowledge.records.values()]
        return np.concatenate(learned) if learned else np.zeros(0, np.uint64)


@dataclass(eq=False)
class ServedModel:
    """One model's file, and the snapshot that answers for it. drawings: whether it knows drawings (the example).
    problem: why the file cannot be used as it is now; an older snapshot keeps answering, if there is one."""

    name: str
    path: Path
    defaults: ModelDefaults
    drawings: bool = False
    problem: str | None = field(init=False, default=None)
    _snapshot: Snapshot | None = field(init=False, default=None)
    _older: dict[int, Snapshot] = field(init=False, default_factory=dict)
    _stamp: tuple[int, ...] | None = field(init=False, default=())  # () before the first look at the file
    _loading: threading.Lock = field(init=False, default_factory=threading.Lock)

    @property
    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            raise Conflict(f"the model {self.name} cannot be used: {self.problem}")
        return self._snapshot

    @property
    def usable(self) -> bool:
        return self._snapshot is not None

    def refresh(self, replacing: Callable[[Snapshot], None] = lambda now: None) -> None:
        """Load the file if it is not the one that was loaded last, and replace the snapshot in one step. replacing:
        called with the new one just before. A file that cannot be used is a problem of this model alone, until it
        changes."""
        with self._loading:
            stamp = _stamp(self.path)
            if stamp == self._stamp:
                return
            self._stamp, self.problem = stamp, None
            try:
                model = self._load()
                snapshot = Snapshot(self.name, model.knowledge.version, model)
            except Exception as error:  # whatever is in the file, only this model suffers
                self.problem = without_folder(error, self.path)
                return
            try:
                replacing(snapshot)
            finally:
                self._older.clear()
                self._snapshot = snapshot

    def at(self, version: str) -> Snapshot:
        """The snapshot of a version, by its number."""
        numbers = {str(number): number for number in self.versions}
        if version not in numbers:
            raise NotThere(f"there is no version {version[:20]!r} of {self.name}; there are {', '.join(numbers)}")
        if (number := numbers[version]) == self.snapshot.version:
            return self.snapshot
        with self._loading:
            if number not in self._older:
                model = self._load()
                model.return_to(number)
                while len(self._older) >= OLDER_IN_MEMORY:
                    self._older.pop(next(iter(self._older)))
                self._older[number] = Snapshot(self.name, number, model)
            return self._older[number]

    @property
    def versions(self) -> list[int]:
        """The numbers of all versions in the file."""
        return [version.number for version in self.snapshot.model.versions]

    def warm_up(self) -> None:
        """Load the backbone, so that the first answer comes as fast as any other."""
        self.snapshot.model.embed(np.zeros((32, 32, 3), np.uint8))

    def _load(self) -> Model:
        if self._stamp is None:
            return Model(self.defaults.backbone, size=self.defaults.size, device=self.defaults.device)
        # None: the weights are where the model's file says
        weights = self.defaults.backbone if self.defaults.backbone != ModelDefaults.backbone else None
        return Model.load(self.path, device=self.defaults.device, backbone=weights)


def without_folder(error: Exception, path: Path) -> str:
    """A message about a model's file as clients may read it: they know its name, and need not know its folder."""
    text = str(error) if isinstance(error, UserError) else f"{path}: {type(error).__name__}: {error}"
    return text.replace(str(path), path.name)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns


class ModelFolder:
    """All models of a server, by name. folder: where to look for new ones. warn: told once about each bad file."""

    def __init__(
        self, models: list[ServedModel], defaults: ModelDefaults, folder: Path | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self._models = {model.name: model for model in models}
        self.defaults, self.folder, self._warn = defaults, folder, warn

    def __iter__(self) -> Iterator[ServedModel]:
        """Those that can answer."""
        return iter([model for model in self._models.values() if model.usable])

    def get(self, name: str | None) -> ServedModel:
        """name: None for the only model there is."""
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise UserError(f"there are several models; name one of {', '.join(self._models)}")
        if name not in self._models:
            raise NotThere(f"there is no model {name[:100]!r}; the models are {', '.join(self._models) or 'none'}")
        return self._models[name]

    def look_again(self, refresh: Callable[[ServedModel], Any] = ServedModel.refresh) -> None:
        """Notice what other programs did: models taught with `vqprompt learn`, files added or deleted. refresh: called
        with each model."""
        models = dict(self._models)  # requests iterate over the other one
        if self.folder is not None:
            for path in _model_files(self.folder):
                models.setdefault(path.stem, ServedModel(path.stem, path, self.defaults))
        for served in list(models.values()):
            is_empty = served.usable and not served.snapshot.model.classes  # it has no file until it is taught
            if self.folder is not None and not served.path.exists() and not is_empty:
                del models[served.name]
                continue
            before = served.problem
            refresh(served)
            if served.problem is not None and served.problem != before:
                self._warn(f"{served.path.parent}: {served.problem}")
        self._models = models


def _model_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.vqp") if not p.name.startswith(".") and p.stem.isprintable())

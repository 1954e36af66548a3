"""The models of a server. Each answers from an immutable snapshot; a change replaces the whole snapshot."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import UserError
from vqprompt.product.model.file import ModelError
from vqprompt.product.model.left_out import LeftOutAnswers, left_out_answers
from vqprompt.product.model.model import Model
from vqprompt.product.serve.versions import Versions

OLDER_IN_MEMORY = 2  # older versions that stay loaded, for requests that name a version


@dataclass(frozen=True)
class New:
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
    _used: dict[tuple[int, int], float] = field(init=False, default_factory=lambda: defaultdict(float))
    _asked: int = field(init=False, default=0)
    _counting: threading.Lock = field(init=False, default_factory=threading.Lock)

    @cached_property
    def left_out(self) -> LeftOutAnswers:
        return left_out_answers(self.model)

    def prompts_used(self, image: Any) -> list[dict[str, Any]] | None:
        """The prompts that an image uses, block by block, which are also counted; None for models without prompts."""
        (found,) = self.model.prompts_used([image])
        with self._counting:
            for use in found:
                self._used[use["block"], use["prompt"]] += use["attention"]
            self._asked += bool(found)
        return [dict(use) for use in found] or None

    def prompt_use(self) -> dict[str, Any] | None:
        """How much the prompts were used, on average, by the images that were asked with `prompts`."""
        with self._counting:
            used = [{"block": b, "prompt": p, "attention": w / self._asked} for (b, p), w in sorted(self._used.items())]
            return {"images": self._asked, "prompts": used} if used else None

    @cached_property
    def shown(self) -> dict[str, Any]:
        return self.model.show()


@dataclass(eq=False)
class Served:
    """One model's file, and the snapshot that answers for it. drawings: whether it knows drawings (the example)."""

    name: str
    path: Path
    new: New
    most_versions: int = 10
    drawings: bool = False
    snapshot: Snapshot = field(init=False)
    _older: dict[int, Snapshot] = field(init=False, default_factory=dict)
    _seen: tuple[int, ...] | None = field(init=False, default=None)
    _loading: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.versions.mend()
        self.refresh()

    @property
    def versions(self) -> Versions:
        return Versions(self.path, self.most_versions)

    def refresh(self) -> None:
        """Load the file if it is not the one that was loaded last, and swap the snapshot in one step."""
        with self._loading:
            seen = _stamp(self.path)
            if seen is not None and seen == self._seen:
                return
            if seen is None:
                if self._seen is not None:  # the first teaching was undone: empty again, with the same backbone
                    self._start_anew_like(self.snapshot.model)
                elif hasattr(self, "snapshot"):
                    return
                model = Model(self.new.backbone, size=self.new.size, device=self.new.device)
            else:
                model = Model.load(self.path, device=self.new.device, backbone=self._weights())
            self.snapshot = Snapshot(self.name, self.versions.current, model)
            self._seen = seen
            self._older.clear()

    def at(self, version: int | None) -> Snapshot:
        """The snapshot of a version; of the current one by default."""
        now = self.snapshot
        if version is None or version == now.version:
            return now
        with self._loading:
            if version not in self._older:
                path = self.versions.file(version)
                model = Model.load(path, device=self.new.device, backbone=self._weights())
                while len(self._older) >= OLDER_IN_MEMORY:
                    self._older.pop(next(iter(self._older)))
                self._older[version] = Snapshot(self.name, version, model)
            return self._older[version]

    def warm_up(self) -> None:
        """Load the backbone, so that the first answer comes as fast as any other."""
        self.snapshot.model.embed(np.zeros((32, 32, 3), np.uint8))

    def _start_anew_like(self, model: Model) -> None:
        backbone = model.show()["backbone"]
        if backbone is not None:
            self.new = New(self.new.backbone, backbone["size"], self.new.device)

    def _weights(self) -> str | None:
        """Where the weights are, if the command line says so; None: where the model's file says."""
        return self.new.backbone if self.new.backbone != New.backbone else None


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class Shelf:
    """All models of a server, by name. folder: where to look for new ones."""

    def __init__(self, models: list[Served], folder: Path | None = None, warn: Callable[[str], None] = print) -> None:
        self._models = {m.name: m for m in models}
        self.folder, self._warn, self._refused = folder, warn, dict[Path, tuple[int, ...] | None]()

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def get(self, name: str | None) -> Served:
        """name: None for the only model there is."""
        if name is None:
            if len(self._models) == 1:
                return next(iter(self))
            raise UserError(f"there are several models; name one of {', '.join(self._models)}")
        if name not in self._models:
            raise UnknownModel(f"there is no model {name[:100]!r}; the models are {', '.join(self._models) or 'none'}")
        return self._models[name]

    def look_again(self, new: New, most_versions: int) -> None:
        """Notice what other programs did: models taught with `vqprompt learn`, files added or deleted."""
        for served in self:
            if self.folder is not None and not served.path.is_file() and served.snapshot.model.classes:
                self._models.pop(served.name, None)
                continue
            try:
                served.refresh()
            except UserError as error:  # it is being copied, or damaged: the old snapshot keeps answering
                self._warn_once(served.path, error)
        if self.folder is not None:
            for path in model_files(self.folder):
                if path.stem not in self._models:
                    try:
                        self._models[path.stem] = Served(path.stem, path, new, most_versions)
                    except UserError as error:
                        self._warn_once(path, error)

    def _warn_once(self, path: Path, error: Exception) -> None:
        stamp = _stamp(path)
        if path not in self._refused or self._refused[path] != stamp:
            self._refused[path] = stamp
            self._warn(str(error))


class UnknownModel(ModelError):
    """A name that no model has."""


def model_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.vqp") if p.is_file() and not p.name.startswith("."))

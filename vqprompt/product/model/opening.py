"""Opens a model's file, or makes a new model where there is none; and replaces the file when the model has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vqprompt.core.backbones.registry import BEST, BEST_SIZE
from vqprompt.product.model.file import locked
from vqprompt.product.model.model import Model


@dataclass(frozen=True)
class ModelDefaults:
    """How to make a model that does not exist yet, and where to compute. backbone: for an existing model, where its
    weights are now; None: where its file says."""

    backbone: str | None = None
    size: int | None = None
    device: str = "auto"

    @classmethod
    def of(cls, backbone: str | None, size: int | None, device: str) -> ModelDefaults:
        """From what a person gave: `best` stands for a backbone and a size."""
        return cls(BEST, size or BEST_SIZE, device) if backbone == "best" else cls(backbone, size, device)

    def open(self, path: Path) -> Model:
        if path.exists():
            return Model.load(path, device=self.device, backbone=self.backbone)
        return Model(self.backbone or "vit-s14", size=self.size, device=self.device)


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Differs when a file was changed or replaced; None if it is not there. The first number is its mode."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def changing(path: Path, opened: Callable[[Path], Model] = Model.load) -> Iterator[Model]:
    """A model that replaces its file when the block ends, if it has changed. Until then nobody else can change it."""
    with locked(path):
        model = opened(path)
        version = model.knowledge.version
        yield model
        if model.knowledge.version != version:
            model.save(path, locked=True)

"""Everything that is kept of a class, and how to delete it: what `forget --for-good` promises.

- The model's file: the class, its past in older versions, its name in the history (`Model.forget`).
- `.NAME.vqp.versions/` beside it, where servers before kept whole older models.
- A running server, which notices that the file has changed: thumbnails, exported files, finished jobs, uploads
  (`serve/state.py`).

The cache has no names, and teaching keeps nothing there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from vqprompt.product.model.model import Model


def erase_class(model: Model, name: str) -> list[str]:
    """Forget a class for good, and delete what is kept of it beside the file. To be saved by the caller, who holds the
    file's lock. Returns notes for people."""
    model.forget(name, for_good=True)
    notes = []
    if model.path is not None and (folder := _older_versions(model.path)).is_dir():
        shutil.rmtree(folder)
        notes.append(f"deleted {folder.name}, where older versions were kept")
    return notes


def _older_versions(path: Path) -> Path:
    return path.with_name(f".{path.name}.versions")

"""Everything that is kept of a class, and how to delete it: what `forget --for-good` promises.

- The model's file: the class, its past in older versions, its name in the history (`Model.forget`).
- `.NAME.vqp.versions/` beside it, where servers before kept whole older models.
- The cache of file hashes, which knows the names of files in folders that were named like the class.
- A running server, which notices that the file has changed: thumbnails, exported files, finished jobs, uploads
  (`serve/state.py`).
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath

from vqprompt.core.files import cache_folder
from vqprompt.product.model.model import Model


def erase_class(model: Model, name: str) -> list[str]:
    """Forget a class for good, and delete what is kept of it beside the file. To be saved by the caller, who holds the
    file's lock. Returns notes for people."""
    model.forget(name, for_good=True)
    notes = []
    if model.path is not None and (folder := _older_versions(model.path)).is_dir():
        shutil.rmtree(folder)
        notes.append(f"deleted {folder.name}, where older versions were kept")
    for index in (cache_folder() / "hashes").glob("*.json"):
        if _names_folder(index, name):
            index.unlink(missing_ok=True)
    return notes


def _older_versions(path: Path) -> Path:
    return path.with_name(f".{path.name}.versions")


def _names_folder(index: Path, name: str) -> bool:
    """Whether a list of hashes has files below a folder of this name."""
    with suppress(OSError, ValueError, RecursionError):
        text = index.read_text(encoding="utf-8", errors="replace")
        known, _ = json.JSONDecoder().raw_decode(text)
        return any(name in PurePosixPath(path).parent.parts for path in known)
    return False

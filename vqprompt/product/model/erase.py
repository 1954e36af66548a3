"""Everything that is kept of a class, and how to delete it: what `forget --for-good` promises.

- The model's file: the class, other versions that know it, its name in the history (`Model.forget`).
- `.NAME.vqp.versions/` beside it, where servers kept whole older models before these were part of the file.
- A running server, which notices that the file has changed: thumbnails, exported files, finished jobs, uploads
  (`State.refresh` in serve/state.py).

The cache knows no names of files or classes, and nothing of images that were taught.
"""

from __future__ import annotations

import shutil

from vqprompt.product.model.model import Model


def erase_class(model: Model, name: str) -> list[str]:
    """Forget a class for good, and delete what is kept of it beside the file. To be saved by the caller, who holds the
    file's lock. Returns notes for people."""
    model.forget(name, for_good=True)
    if model.path is None or not (folder := model.path.with_name(f".{model.path.name}.versions")).is_dir():
        return []
    shutil.rmtree(folder)
    return [f"deleted {folder.name}, where older versions were kept"]

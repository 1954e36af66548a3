"""Anybody's images: a folder or zip of `train/<class>/…` + `test/<class>/…`, or of `<class>/…`, split 80/20."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vqprompt.errors import ImageError
from vqprompt.images import Progress, Source, build_store, no_progress
from vqprompt.stream import Dataset, check_classes, split_rows

TEST_FRACTION = 0.2


def open_folder(path: str | Path, side: int, seed: int, progress: Progress = no_progress) -> Dataset:
    """seed: which images of each class are held out, where the source has no split of its own."""
    source = Source(path)
    classes = sorted({e.label for e in source.entries})
    position = {name: i for i, name in enumerate(classes)}
    labels = np.array([position[e.label] for e in source.entries])
    is_test = np.array([e.split == "test" for e in source.entries])
    notes = []
    if source.entries[0].split is None:
        notes.append(f"no train/ and test/ folders: {TEST_FRACTION:.0%} of each class held out for testing (seed {seed})")
        for c, name in enumerate(classes):
            rows = np.flatnonzero(labels == c)
            if len(rows) < 2:
                raise ImageError(f"{path}: the class {name!r} has a single image; it needs two, one of them to test with")
            is_test[split_rows(rows, TEST_FRACTION, f"{seed}:{name}")[1]] = True
    if source.ignored:
        shown = ", ".join(source.ignored[:3]) + (" …" if len(source.ignored) > 3 else "")
        notes.append(f"ignored {len(source.ignored)} files that are not images in class folders ({shown})")
    check_classes(str(path), classes, labels, is_test)
    return Dataset(str(path), classes, build_store(source, side, progress), labels, is_test, tuple(notes))

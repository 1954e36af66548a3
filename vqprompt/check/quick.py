"""The quick part of the check, for `learn`: one line about what it has just been taught, from the features it keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from vqprompt.check.doubts import find_doubts
from vqprompt.model.records import ClassRecord

JUDGED = 4000  # images at most, spread evenly over the classes: no slower with a thousand classes than with ten


def noticed(classes: Mapping[str, ClassRecord], taught: Collection[str]) -> str | None:
    """What is odd about the classes that were just taught; None if nothing is."""
    if len(classes) < 2 or not taught:
        return None
    each = max(2, JUDGED // len(classes))
    parts = [record.features[:each] for record in classes.values()]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    seen = find_doubts(np.concatenate(parts), labels, len(parts))
    new = np.isin(labels, [place for place, name in enumerate(classes) if name in taught])
    wrong, strange = int((seen.mislabelled & new).sum()), int((seen.strange & ~seen.mislabelled & new).sum())
    if not wrong and not strange:
        return None
    return (
        f"of the images of these classes, {wrong} look like another class and {strange} unlike theirs; "
        "vqprompt check FOLDER shows which"
    )

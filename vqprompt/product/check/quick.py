"""The quick part of the check, for `learn`: one line about what it has just been taught, from the features it keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from vqprompt.product.check.doubts import find_doubts
from vqprompt.product.model.records import ClassRecord

JUDGED = 4000  # images at most, spread evenly over the classes that are compared
RIVALS = 30  # classes that the taught ones are compared with: no slower with a thousand classes than with ten


def noticed(classes: Mapping[str, ClassRecord], taught: Collection[str]) -> str | None:
    """What is odd about the classes that were just taught; None if nothing is."""
    taught = sorted(taught)
    compared = [*taught, *rivals(classes, taught)]
    if len(compared) < 2 or not taught:
        return None
    each = max(2, JUDGED // len(compared))
    parts = [classes[name].features[:each] for name in compared]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    seen = find_doubts(np.concatenate(parts), labels, len(parts))
    new = labels < len(taught)
    wrong, strange = int((seen.mislabelled & new).sum()), int((seen.strange & ~seen.mislabelled & new).sum())
    if not wrong and not strange:
        return None
    return (
        f"of the images of these classes, {wrong} look like another class and {strange} unlike theirs; "
        "vqprompt check FOLDER shows which"
    )


def rivals(classes: Mapping[str, ClassRecord], taught: Collection[str]) -> list[str]:
    """The other classes that images of the taught ones are nearest to."""
    others = [name for name in classes if name not in taught]
    if len(others) <= RIVALS:
        return others
    each = max(2, JUDGED // len(taught))
    images = np.concatenate([classes[name].features[:each] for name in taught])
    means = np.stack([classes[name].mean for name in others])
    distances = (means**2).sum(1) - 2 * images @ means.T  # [images, classes], less the same number in each row
    rank = distances.argsort(1).argsort(1).min(0)  # 0: the nearest class of at least one image
    return [others[place] for place in rank.argsort(kind="stable")[:RIVALS]]

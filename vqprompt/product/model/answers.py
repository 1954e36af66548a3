"""What a model answers about images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What is in one image. name: the best class, or "unknown". classes: the best ones with their probabilities.
    familiarity: how far the image is above the threshold for known images; below 0 it is unknown. note: what to say
    instead of percentages, where too few images were taught to check them."""

    name: str
    classes: tuple[tuple[str, float], ...]
    familiarity: float
    note: str = ""

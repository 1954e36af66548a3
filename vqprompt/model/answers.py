"""What a model says: answers about images, and words for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass(frozen=True)
class Answer:
    """What is in one image. name: the best class, or "unknown". classes: the best ones with their probabilities.
    familiarity: how far above the threshold for known images it lies; below 0 is unknown."""

    name: str
    classes: tuple[tuple[str, float], ...]
    familiarity: float


class PromptUse(TypedDict):
    """A prompt that an image met. block: in which block of the network, from 0. prompt: which of the block's prompts.
    attention: how much of the class token's attention it got there, from 0 to 1, over all heads."""

    block: int
    prompt: int
    attention: float


def share(right: int, tested: int) -> float | None:
    return right / tested if tested else None


def shorten(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (f" … ({len(names)} in all)" if len(names) > most else "") or "none yet"


def describe(event: dict[str, Any]) -> str:
    if event["what"] == "learned":
        return f"learned {event['images']} images of {shorten(list(event['classes']), 3)} ({event['date'][:10]})"
    return f"{event['what']} {event.get('detail', '')} ({event['date'][:10]})"

"""What a model answers about images, and its changes in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from vqprompt.core.words import counted, shorten


@dataclass(frozen=True)
class Answer:
    """What is in one image. name: the best class, or "unknown". classes: the best ones with their probabilities.
    familiarity: how far the image is above the threshold for known images; below 0 it is unknown."""

    name: str
    classes: tuple[tuple[str, float], ...]
    familiarity: float


class PromptUse(TypedDict):
    """A prompt that an image uses. block: in which block of the network, from 0. prompt: which of the block's prompts.
    attention: how much of the class token's attention it got there, from 0 to 1, over all heads."""

    block: int
    prompt: int
    attention: float


def share(right: int, tested: int) -> float | None:
    return right / tested if tested else None


def describe(event: dict[str, Any]) -> str:
    if event["what"] == "learned":
        what = f"learned {counted(event['images'], 'image')} of {shorten(list(event['classes']), 3)}"
    else:
        what = f"{event['what']} {event.get('detail', '')}"
    return f"{what} ({event['date'][:10]})"

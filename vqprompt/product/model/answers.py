"""What a model answers about images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True)
class Answer:
    """What is in one image. name: the best class, or "unknown". classes: the best ones with their probabilities.
    familiarity: how far the image is above the threshold for known images; below 0 it is unknown. note: what to say
    instead of percentages, where too few images were taught to check them."""

    name: str
    classes: tuple[tuple[str, float], ...]
    familiarity: float
    note: str = ""


class PromptUse(TypedDict):
    """A prompt that an image uses. block: in which block of the network, from 0. prompt: which of the block's prompts.
    attention: how much of the class token's attention it got there, from 0 to 1, over all heads."""

    block: int
    prompt: int
    attention: float

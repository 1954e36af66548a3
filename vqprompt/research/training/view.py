"""A batch of images as a method sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.runtime.distributed import WHOLE, Part


@dataclass(eq=False)
class View:
    """A batch of images as a method sees it. Nothing is computed before it is needed."""

    vit: ViT
    draw: Callable[[], Tensor]
    known_query: Tensor | None = None  # given, or already computed
    labels: Tensor | None = None  # positions in the head; only in training
    task: int | None = None  # number of the task; only known for its training images
    part: Part = WHOLE  # of the training batch; losses that compare its images with each other need all of them
    known_frozen: Tensor | None = None  # `Method.frozen_features`, if they were computed before

    @cached_property
    def images(self) -> Tensor:
        """Normalized images [B, 3, S, S]."""
        return self.draw()

    @cached_property
    def tokens(self) -> Tensor:
        """What enters block 0 [B, L, D]; the query and the prompted pass share it."""
        return self.vit.embed(self.images)

    @property
    def query(self) -> Tensor:
        """Class-token features without prompts [B, D]; already known for images that are not augmented."""
        if self.known_query is None:
            with torch.no_grad():
                self.known_query = self.vit.query(self.tokens).float()
        return self.known_query

    def mirrored(self) -> View:
        """The mirrored images. They keep their query, so an image and its mirror image get the same prompts."""
        return View(self.vit, lambda: self.images.flip(-1), self.known_query, task=self.task)

    def through(self, vit: ViT) -> View:
        """The same images, without labels, for another network. With the same network, nothing is computed twice."""
        other = View(vit, lambda: self.images)
        if vit is self.vit:
            other.known_query, other.tokens = self.known_query, self.tokens
        return other

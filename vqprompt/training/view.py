"""A batch of images as a method sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from vqprompt.backbones.vit import ViT


class View:
    """A batch of images as a method sees it. Nothing is computed before it is asked for."""

    def __init__(
        self,
        vit: ViT,
        images: Callable[[], Tensor],
        query: Tensor | None = None,
        labels: Tensor | None = None,
        task: int | None = None,
    ) -> None:
        self.vit, self._images, self._query = vit, images, query
        self.labels = labels  # in training only: positions in the head
        self.task = task  # of the task's own training images only

    @cached_property
    def images(self) -> Tensor:
        """Normalized images [B, 3, S, S]."""
        return self._images()

    @cached_property
    def tokens(self) -> Tensor:
        """What enters block 0 [B, L, D]; the query and the prompted pass share it."""
        return self.vit.embed(self.images)

    @cached_property
    def query(self) -> Tensor:
        """Class-token features without prompts [B, D]; known beforehand for images that are not augmented."""
        if self._query is not None:
            return self._query
        with torch.no_grad():
            return self.vit.encode(self.tokens).float()

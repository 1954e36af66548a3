"""Queries that are computed once: a frozen backbone always gives the same ones.

`QueryCache` keeps the queries of un-augmented images in memory or on disk. Those of augmented views, a third of a
training step's work, it keeps in a folder if one is given, one file per epoch: views depend on the seed and not on the
method, so runs that follow each other can share them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vqprompt.core.cache import cache_folder, keep_array, load_array, save_array, temporary_file, warn_no_cache
from vqprompt.core.data.images import Images
from vqprompt.core.data.limits import CACHE_GB
from vqprompt.core.runtime.distributed import ShardedRows
from vqprompt.research.learner.rows import BYTES, Rows, RowsInFile, open_rows, save_rows, write_rows
from vqprompt.research.methods.base import Method
from vqprompt.research.training.batches import BatchQueries, KnownQueries, draw, epoch_views
from vqprompt.research.training.settings import Training

SPARE_DISK = 20 << 30  # bytes that shared queries leave free
IN_MEMORY = {"cuda": 1 << 30}  # bytes of queries that are kept in the memory of the device
IN_MEMORY_OTHERWISE = 4 << 20  # little, because reading from files is fast: the system caches them
Compute = Callable[[Images, bool], ShardedRows]


class QueryCache:
    """Class-token features without prompts, of images as they are or mirrored.

    Those of few images are kept in memory. Those of many are in a file, and rows are read when they are needed.
    """

    def __init__(self, compute: Compute, method: Method, device: torch.device, depends_on: Sequence[Any]) -> None:
        """compute: the queries of images, as they are or mirrored; or `frozen_features`, if the method uses these.
        depends_on: what their values depend on besides the images and the settings of method and backbone."""
        self.compute, self.method, self.device, self.depends_on = compute, method, device, depends_on
        self.vit = method.vit
        self.width = self.vit.config.width * (method.class_tokens if method.uses_frozen else 1)
        self.kept: dict[str, Rows | None] = {}  # None: they could not be written
        self._of_the_task: list[str] = []  # keys of the open task's training images

    def start_task(self, images: Images) -> None:
        """Free the memory of the previous task's training images; they are not needed again."""
        for key in self._of_the_task:
            self.kept.pop(key, None)
        self._of_the_task = [self.key(images, mirrored) for mirrored in (False, True)]

    def of(self, images: Images, mirrored: bool = False, again: bool = True) -> Rows | None:
        """Queries [n, D]: from memory, else from disk, else computed now and kept. None if they are not kept, because
        there is no room for them, or because they are many and not needed `again`: compute them batch by batch."""
        images.check()  # images of a closed task are refused, even if their queries are known
        key = self.key(images, mirrored)
        if key not in self.kept:
            name = hashlib.sha256(key.encode()).hexdigest()[:24]
            file = cache_folder() / "queries" / f"{name}.npy" if images.named else None
            computed, shape = self.compute(images, mirrored), (len(images), self.width)
            try:
                most = IN_MEMORY.get(self.device.type, IN_MEMORY_OTHERWISE)
                if self._bytes(Tensor) + shape[0] * shape[1] * BYTES <= most:
                    self.kept[key] = self._in_memory(computed, file)
                elif (rows := self._in_file(computed, shape, file, again)) is not None:
                    self.kept[key] = rows
            except OSError as error:  # all were computed and could not be written: do not try that again
                self.kept[key] = None
                warn_no_cache(error)
        return self.kept.get(key)

    def _bytes(self, kind: type[Tensor] | type[RowsInFile]) -> int:
        return sum(rows.nbytes for rows in self.kept.values() if isinstance(rows, kind))

    def _in_memory(self, computed: ShardedRows, file: Path | None) -> Tensor:
        known, ranks = None if file is None else load_array(file), computed.ranks
        # processes compute together: either all of them load the queries, or all compute them
        if ranks.all(known is not None and len(known) == len(computed)):
            return torch.from_numpy(known).to(self.device)
        queries = computed.whole()
        if file is not None and ranks.first_here:
            keep_array(file, queries.cpu().numpy())
        return queries

    def _in_file(
        self, computed: ShardedRows, shape: tuple[int, int], file: Path | None, again: bool
    ) -> RowsInFile | None:
        """Raises OSError if they could not be written."""
        device, ranks = self.device, computed.ranks
        known = None if file is None else open_rows(file, shape, device)
        if ranks.all(known is not None):
            return known
        if file is not None and ranks.count == 1:  # the next run finds it
            save_rows(file, computed.in_order(), shape)
            return open_rows(file, shape, device)
        size, used = shape[0] * shape[1] * BYTES, self._bytes(RowsInFile)
        room = None
        if again and used + size <= CACHE_GB.value * 1e9:
            with suppress(OSError):
                room = temporary_file(size)
        if not ranks.all(room is not None) or room is None:
            return None
        failed = write_rows(room, computed.in_order())
        if not ranks.all(failed is None):
            raise failed or OSError("another process has no space left")
        return RowsInFile(room, 0, shape, device)

    def key(self, images: Images, mirrored: bool) -> str:
        """Everything that a query depends on, as one text."""
        config, own = self.vit.config, [self.vit.raw_queries, str(self.vit.dtype)]
        if self.method.uses_frozen:
            own.append(self.method.options.model_dump(include={"class_tokens", "scaled", "mirror"}))
        return json.dumps([*self.depends_on, images.key, mirrored, config.image_size, config.mean, config.std, *own])

    def for_training(
        self, images: Images, settings: Training, seed: int, shared: Path | None = None
    ) -> KnownQueries | None:
        """Queries of training views that are known, or are computed only once. shared: a folder for the queries of
        augmented views."""
        self._of_the_task += [self.key(images, mirrored) for mirrored in (False, True)]  # also of exemplars
        if settings.augment in ("flip", "none"):
            plain, flips = self.of(images), settings.augment == "flip"
            mirrored = self.of(images, mirrored=True) if flips and plain is not None else None
            return None if plain is None or (flips and mirrored is None) else lambda *_: partial(_join, plain, mirrored)
        return None if shared is None or not images.named else partial(self._shared, images, settings, seed, shared)

    @torch.no_grad()
    def _shared(
        self, images: Images, s: Training, seed: int, folder: Path, epoch: int, batches: Sequence[Tensor]
    ) -> BatchQueries:
        """Queries of an epoch's augmented views, from the folder or computed now."""
        drawn = [s.batch_for(len(images)), s.epochs, s.augment, s.crop_area, seed, epoch]
        key = json.dumps([self.key(images, False), *drawn])
        file = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
        known = load_array(file)
        if known is not None:
            queries = torch.from_numpy(known).to(self.device)
        else:  # no other run has computed them yet
            vit, views = self.vit, epoch_views(images, batches, s, seed, epoch, self.device)
            queries = torch.cat([vit.query(vit.embed(draw(inputs, vit))).float() for _, inputs in views])
            with suppress(OSError):  # the disk is full, or the folder was deleted: then nothing is shared
                folder.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(folder).free > SPARE_DISK:
                    save_array(file, queries.cpu().numpy())
        per_batch = torch.split(queries, [len(batch) for batch in batches])
        return lambda number, *_: per_batch[number]


def _join(plain: Rows, mirrored: Rows | None, number: int, index: Tensor, flips: Tensor | None) -> Tensor:
    """Queries of images that are not augmented, or only mirrored."""
    if flips is None or mirrored is None:
        return plain[index]
    return torch.where(flips[:, None], mirrored[index], plain[index])

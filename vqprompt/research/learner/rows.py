"""Rows of features that are looked up by index: in memory, or in a file from which they are read when needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.cache import load_array, replacing_cached
from vqprompt.core.files import open_regular, read_at

BYTES = 4  # per number: rows are kept in float32


class RowsInFile:
    """Rows in a file that stays open as long as they are needed. start: the byte where the first row begins."""

    def __init__(self, file: BinaryIO, start: int, shape: tuple[int, int], device: torch.device) -> None:
        self.file, self.start, self.width, self.device = file, start, shape[1], device
        self.nbytes = shape[0] * shape[1] * BYTES

    def __getitem__(self, index: Tensor) -> Tensor:
        size = self.width * BYTES  # read, not mapped: mapped pages around the rows would count as memory of the process
        data = bytearray().join(read_at(self.file, self.start + row * size, size) for row in index.tolist())
        return torch.from_numpy(np.frombuffer(data, np.float32).reshape(len(index), self.width)).to(self.device)


Rows = Tensor | RowsInFile
"""Rows [n, D], which are looked up by an index [B]."""


class JoinedRows:
    """Rows of several sets, one after the other. None stands for a set whose rows are not known."""

    def __init__(self, parts: Sequence[Rows | None], sizes: Sequence[int]) -> None:
        self.parts, self.ends = parts, torch.tensor(list(accumulate(sizes)))

    def __getitem__(self, index: Tensor) -> Tensor | None:
        """None if some of these rows are not known. The index is on the CPU and in ascending order. A GPU that has the
        rows is not waited for."""
        which = torch.bucketize(index, self.ends, right=True)
        rows = []
        for number in sorted(set(which.tolist())):
            part, start = self.parts[number], int(self.ends[number - 1]) if number else 0
            if part is None:
                return None
            inside = index[which == number] - start
            rows.append(part[inside.to(part.device, non_blocking=True) if isinstance(part, Tensor) else inside])
        return torch.cat(rows)


def write_rows(file: BinaryIO, pieces: Iterable[Tensor]) -> OSError | None:
    """Returns the error if the disk is full. All pieces are computed also then: other processes take part in that."""
    failed: OSError | None = None
    for piece in pieces:
        if failed is None:
            try:
                file.write(piece.float().cpu().numpy().tobytes())
                file.flush()
            except OSError as error:
                failed = error
    return failed


def save_rows(path: Path, pieces: Iterable[Tensor], shape: tuple[int, int]) -> None:
    """Writes what `save_array` writes, but never has all of it in memory."""
    with replacing_cached(path) as partial, open(partial, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        if failed := write_rows(file, pieces):
            raise failed


def open_rows(path: Path, shape: tuple[int, int], device: torch.device) -> RowsInFile | None:
    """What `save_rows` or `save_array` wrote, if it is there, passes its check and has this shape."""
    known = load_array(path, mapped=True)
    if isinstance(known, np.memmap) and known.shape == shape and known.dtype == np.float32:
        return RowsInFile(open_regular(path), known.offset, shape, device)
    return None

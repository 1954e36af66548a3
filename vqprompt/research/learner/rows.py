"""Rows of features that are looked up by index: in memory, or in a file from which they are read when needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from vqprompt.core.cache import replacing_cached, sealed_length
from vqprompt.core.files import open_regular, read_at

BYTES = 4  # per number: rows are kept in float32


class Rows(Protocol):
    """Rows [n, D], which are looked up by an index [B], as in a tensor. A tensor is one kind of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


class RowsInFile:
    """Rows in a file that stays open as long as they are needed. start: the byte where the first row begins."""

    def __init__(self, file: BinaryIO, start: int, shape: tuple[int, int], device: torch.device) -> None:
        self.file, self.start, self.shape, self.device = file, start, shape, device

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * BYTES

    def __getitem__(self, index: Tensor) -> Tensor:
        rows, size = index.cpu().numpy(), self.shape[1] * BYTES
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)  # rows that follow each other: one read
        data = b"".join(read_at(self.file, self.start + int(run[0]) * size, len(run) * size) for run in runs)
        values = np.frombuffer(bytearray(data), np.float32).reshape(len(rows), self.shape[1])
        return torch.from_numpy(values).to(self.device)


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


def write_rows(file: BinaryIO, pieces: Iterable[Tensor]) -> None:
    """Raises OSError if the disk is full, but only after all pieces are computed: other processes take part in that."""
    failed: OSError | None = None
    for piece in pieces:
        if failed is None:
            try:
                file.write(piece.float().cpu().numpy().tobytes())
                file.flush()
            except OSError as error:
                failed = error
    if failed is not None:
        raise failed


def save_rows(path: Path, pieces: Iterable[Tensor], shape: tuple[int, int]) -> None:
    """Writes what `save_array` writes, but never has all of it in memory."""
    with replacing_cached(path) as partial, open(partial, "wb") as file:
        np.lib.format.write_array_header_1_0(file, _header(shape))
        write_rows(file, pieces)


def open_rows(path: Path, shape: tuple[int, int], device: torch.device) -> RowsInFile | None:
    """What `save_rows` or `save_array` wrote, if it is there, passes its check and has this shape."""
    if sealed_length(path) is None:
        return None
    with suppress(OSError, ValueError):
        file, expected = open_regular(path), BytesIO()
        np.lib.format.write_array_header_1_0(expected, _header(shape))
        if read_at(file, 0, expected.tell()) == expected.getvalue():
            return RowsInFile(file, expected.tell(), shape, device)
    return None


def _header(shape: tuple[int, int]) -> dict[str, Any]:
    return {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}

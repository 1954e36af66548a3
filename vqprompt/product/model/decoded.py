"""The pictures of one teaching, decoded once: in memory if they are few, else in a temporary file.

The file has no name on systems that allow that, so the system deletes it when the process ends, even if it is killed.
Pixels are read and written, not mapped: mapped pages would count as memory of the process.
"""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vqprompt.core.files import cache_folder, temporary_file, writing

if TYPE_CHECKING:
    from vqprompt.core.data.store import Store

IN_MEMORY = 128 << 20  # bytes; 650 pictures at 224 px


class DecodedPictures:
    """A growing list of squashed pixels uint8 [n, 3, side, side] and aspect ratios. Many threads may read it.

    on_disk: False keeps all of it in memory.
    """

    def __init__(self, side: int, on_disk: bool = True) -> None:
        self.side, self.on_disk = side, on_disk
        self.aspects: list[float] = []
        self._file: BinaryIO = io.BytesIO()
        self._lock = threading.Lock()

    def add(self, pixels: np.ndarray, aspect: float) -> int:
        """Returns the row of the new picture."""
        with self._lock, writing(cache_folder()):
            self._file.seek(0, io.SEEK_END)
            self._file.write(np.ascontiguousarray(pixels).data)
            if self.on_disk and isinstance(self._file, io.BytesIO) and self._file.tell() > IN_MEMORY:
                memory, self._file = self._file, temporary_file()
                self._file.write(memory.getbuffer())
            self.aspects.append(aspect)
            return len(self.aspects) - 1

    def row(self, row: int) -> tuple[np.ndarray, float]:
        """Pixels [3, side, side] and aspect ratio."""
        size = 3 * self.side**2
        with self._lock:
            self._file.seek(row * size)
            data = bytearray(self._file.read(size))
        return np.frombuffer(data, np.uint8).reshape(3, self.side, self.side), self.aspects[row]

    def store(self, rows: np.ndarray) -> Store:
        """Some rows, as training reads them."""
        from vqprompt.core.data.store import Store  # imports PyTorch

        pixels: Any = _Rows(self, rows)
        return Store(pixels, np.array([self.aspects[row] for row in rows]), "")

    def close(self) -> None:
        self._file.close()


class _Rows:
    """Looks like an array [n, 3, side, side] to `Store`."""

    def __init__(self, pictures: DecodedPictures, rows: np.ndarray) -> None:
        self.pictures, self.rows = pictures, rows
        self.shape = (len(rows), 3, pictures.side, pictures.side)
        self.nbytes = int(np.prod(self.shape))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return np.stack([self.pictures.row(int(row))[0] for row in self.rows[index]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[np.arange(len(self))]

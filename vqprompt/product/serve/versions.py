"""Older versions of a model's file, so that any of them can be returned to.

They are in a hidden folder beside the file, `.garden.vqp.versions/`, one whole model each, numbered from 1. Keeping one
costs no time, and no space until the file is replaced: it is a second name (a hard link) for the file, which is never
changed in place. The current version's number is one more than the largest in the folder.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from vqprompt.core.errors import UserError
from vqprompt.core.files import partial_path, write_atomically


class Versions:
    """The older versions of one model's file. most: how many are kept."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.most = path, most
        self.folder = path.with_name(f".{path.name}.versions")

    def numbers(self) -> list[int]:
        """The numbers of the older versions, ascending."""
        try:
            names = [p.stem for p in self.folder.iterdir() if p.suffix == ".vqp" and p.stem.isdecimal()]
        except OSError:
            return []
        return sorted(int(name) for name in names)

    @property
    def current(self) -> int:
        return max(self.numbers(), default=0) + 1

    def file(self, number: int) -> Path:
        """The file of a version; for the current one, the model's own file."""
        if number == self.current:
            return self.path
        if number not in self.numbers():
            raise UserError(f"there is no version {number}; the versions are {', '.join(map(str, self.all()))}")
        return self._place(number)

    def all(self) -> list[int]:
        return [*self.numbers(), self.current]

    def keep(self) -> None:
        """Keep the file as it is now; to be called before it is replaced, while its lock is held."""
        if not self.path.is_file():
            return
        self.mend()
        self.folder.mkdir(exist_ok=True)
        place = self._place(self.current)
        try:
            os.link(self.path, place)
        except OSError:  # a file system without hard links
            partial = partial_path(place)
            shutil.copyfile(self.path, partial)
            os.replace(partial, place)
        self._prune()

    def mend(self) -> None:
        """After a kill between keeping a version and replacing the file, the newest version is the file itself."""
        numbers = self.numbers()
        if numbers and self.path.is_file():
            newest = self._place(numbers[-1])
            with suppress(OSError):
                same = newest.samefile(self.path) or newest.read_bytes() == self.path.read_bytes()
                if same:
                    newest.unlink()

    def return_to(self, number: int) -> None:
        """Replace the file by an older version. The version before that is kept as well."""
        content = self.file(number).read_bytes()
        self.keep()
        write_atomically(self.path, content)

    def clear(self) -> None:
        """Delete all older versions; numbers start again."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _prune(self) -> None:
        numbers = self.numbers()
        # the newest always stays, even if none should be kept: otherwise the numbers would start again
        for number in numbers[: max(0, len(numbers) - max(self.most, 1))]:
            with suppress(OSError):
                self._place(number).unlink()

    def _place(self, number: int) -> Path:
        return self.folder / f"{number:06}.vqp"

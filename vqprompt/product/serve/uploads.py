"""Images that wait to be taught: in a private folder, under names of our own, deleted as soon as they are taught.

Nothing that a client sends becomes part of a path. The names of its files are used only in messages.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vqprompt.core.errors import UserError
from vqprompt.core.files import delete_abandoned, partial_path
from vqprompt.product.serve.errors import Busy, NotThere
from vqprompt.product.serve.limits import Limits

LONGEST_NAME = 120


def private_folder() -> Path:
    """A new folder that only this user can read. Folders that killed servers left behind are deleted."""
    place = Path(tempfile.gettempdir())
    delete_abandoned(place, "vqprompt-serve")
    folder = partial_path(place / "vqprompt-serve")
    folder.mkdir(mode=0o700)
    return folder


def shown_name(name: str | None) -> str:
    """A client's name for its file, safe to show: the last part of a path, printable, not too long."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "�" for c in last)[:LONGEST_NAME] or "image"


@dataclass(eq=False)
class Upload:
    """names: the client's names for the images. labels: the class of each. used: how many jobs are using it."""

    id: str
    model: str
    folder: Path
    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    born: float = field(default_factory=time.monotonic)
    used: int = 0

    def add(self, name: str | None, label: str, content: bytes) -> None:
        (self.folder / f"{len(self.names):06}").write_bytes(content)
        self.names.append(shown_name(name))
        self.labels.append(label)

    def images(self, without: Sequence[int] = ()) -> tuple[list[Path], list[str]]:
        """Paths and labels of the images, without some of them."""
        left_out = set(without)
        kept = [number for number in range(len(self.names)) if number not in left_out]
        if not kept:
            raise UserError("no image is left to teach; choose at least one")
        return [self.folder / f"{number:06}" for number in kept], [self.labels[number] for number in kept]

    def in_words(self, text: str) -> str:
        """A message in which our names for the images are replaced by the client's."""
        place = re.escape(str(self.folder)) + r"[/\\](\d{6})"
        return re.sub(place, lambda found: self.names[int(found[1])], text)


class Uploads:
    """All uploads that wait to be taught."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self._held: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def new(self, model: str) -> Upload:
        self._expire()
        with self._lock:
            if len(self._held) >= self.limits.uploads:
                raise Busy(f"{len(self._held)} uploads are already waiting to be taught; try again later")
            name = secrets.token_hex(8)
            made = self._held[name] = Upload(name, model, self.folder / name)
            made.folder.mkdir(mode=0o700)
            return made

    def get(self, name: str, model: str) -> Upload:
        found = self._held.get(name)
        if found is None or found.model != model:
            raise NotThere("there is no such upload: it was taught, deleted, or has expired; upload the images again")
        return found

    def drop(self, upload: Upload) -> None:
        with self._lock:
            self._held.pop(upload.id, None)
        shutil.rmtree(upload.folder, ignore_errors=True)

    def _expire(self) -> None:
        old = time.monotonic() - self.limits.upload_minutes * 60
        for upload in list(self._held.values()):
            if upload.born < old and not upload.used:
                self.drop(upload)

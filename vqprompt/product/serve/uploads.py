"""Images that wait to be taught: in a private folder, under names of our own, deleted as soon as they are taught.

Nothing that a client sends becomes part of a path. The names of its files are used only in messages.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vqprompt.core.errors import UserError
from vqprompt.core.files import delete_abandoned, partial_path
from vqprompt.product.serve.changes import UploadedImage
from vqprompt.product.serve.errors import Busy, Conflict, NotThere
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


class Upload:
    """The images of one request. waits: whether a client may still teach it. It is deleted as soon as nobody uses it,
    and it does not wait or has waited too long. left_out: numbers of images that people do not want to teach. check,
    used_by: ids of the job that looked through it, and of the last job that used it. revision: of what was decided."""

    def __init__(self, model: str, folder: Path, expires: float, drop: Callable[[Upload], None]) -> None:
        self.id, self.model = secrets.token_hex(8), model
        self.folder, self.images = folder / self.id, list[UploadedImage]()
        self.waits, self.expires = False, expires
        self._users, self._counting, self._drop = 0, threading.Lock(), drop
        self._names: set[str] = set()
        self.left_out, self.revision = set[int](), 0
        self.check = self.used_by = ""

    @contextmanager
    def in_use(self) -> Iterator[Upload]:
        with self._counting:
            self._users += 1
        try:
            yield self
        finally:
            with self._counting:
                self._users -= 1
                if not self._users and (not self.waits or time.monotonic() >= self.expires):
                    self._drop(self)

    @property
    def is_used(self) -> bool:
        return self._users > 0

    def add(self, name: str | None, label: str, content: bytes) -> None:
        file = self.folder / f"{len(self.images):06}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        file.write_bytes(content)
        shown = shown_name(name)
        while shown in self._names:
            shown += f" ({len(self.images) + 1})"
        self._names.add(shown)
        self.images.append(UploadedImage(shown, label, file))

    def decide(self, numbers: Sequence[int], label: str | None, left_out: bool | None) -> None:
        """Move images to another class, or leave them out, or take them back in."""
        if self.is_used:
            raise Conflict("a job is using this upload; wait until it has ended")
        changed = {number: self.image(number) for number in numbers}
        for number, image in changed.items() if label is not None else ():
            self.images[number] = replace(image, label=label or "")
        if left_out is not None:
            self.left_out = self.left_out | set(numbers) if left_out else self.left_out - set(numbers)
        self.revision += 1

    def image(self, number: int) -> UploadedImage:
        if not 0 <= number < len(self.images):
            raise NotThere(f"the upload has no image {number}; it has {len(self.images)}, counted from 0")
        return self.images[number]

    def without(self, left_out: Sequence[int]) -> tuple[UploadedImage, ...]:
        """Its images, except those with these numbers."""
        numbers = set(left_out)
        kept = tuple(image for number, image in enumerate(self.images) if number not in numbers)
        if not kept:
            raise UserError("no image is left to teach; choose at least one")
        return kept


class Uploads:
    """All uploads of a server."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self._held: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def new(self, model: str) -> Upload:
        with self._lock:
            if len(self._held) >= self.limits.uploads:
                raise Busy(f"{len(self._held)} uploads are already waiting to be taught; try again later")
            upload = Upload(model, self.folder, time.monotonic() + self.limits.upload_minutes * 60, self._drop)
            self._held[upload.id] = upload
            return upload

    def get(self, name: str, model: str) -> Upload:
        upload = self._held.get(name)
        if upload is None or upload.model != model:
            raise NotThere("there is no such upload: it was taught, deleted, or has expired; upload the images again")
        return upload

    def waiting(self, model: str) -> list[Upload]:
        return [upload for upload in list(self._held.values()) if upload.model == model and upload.waits]

    def delete(self, upload: Upload) -> None:
        if upload.is_used:
            raise Conflict("a job is using this upload; cancel the job first")
        with upload.in_use():
            upload.waits = False

    def delete_expired(self) -> None:
        for upload in list(self._held.values()):
            with upload.in_use():
                pass

    def forget_classes(self, model: str, labels: Set[str]) -> None:
        """Delete what waits to be taught as one of these classes."""
        for upload in list(self._held.values()):
            if upload.model == model and any(image.label in labels for image in upload.images):
                with upload.in_use():
                    upload.waits = False

    def _drop(self, upload: Upload) -> None:
        with self._lock:
            self._held.pop(upload.id, None)
        shutil.rmtree(upload.folder, ignore_errors=True)

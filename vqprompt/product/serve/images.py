"""Images that a server keeps: those that wait to be taught, and thumbnails of those that were taught.

Uploads are in a private folder, under names of our own, and are deleted as soon as they are taught. Nothing that a
client sends becomes part of a path; the names of its files are used only in messages. Thumbnails, so that people can
look at mistakes, are only in memory, and only the newest: a model keeps no image.
"""

from __future__ import annotations

import io
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from vqprompt.core.data.decode import decode
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.files import delete_abandoned, partial_path
from vqprompt.product.model.pictures import Given, Picture, content_id
from vqprompt.product.serve.errors import Busy, Conflict, NotThere
from vqprompt.product.serve.settings import Limits

LONGEST_NAME = 120
SIDE = 96  # px of a thumbnail
THUMBNAILS_PER_TEACHING = 500
Thumbnail = tuple[int, bytes]  # the name of the image by its content, and a small JPEG


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


def _read(file: Path, name: str) -> bytes:
    """A message has the client's name of the image, never the server's path."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ImageError(f"{name}: cannot be read ({error.strerror})") from None


@dataclass(eq=False)
class Upload:
    """The images of one request, each under its client's name; no two names are equal. left_out: the numbers of those
    that are not to be taught. waits: whether a client may still teach it; else it is deleted when its job has ended.
    in_use: it is being written, or a job uses it. check, used_by: ids of the job that looked through it, and of the
    last job that used it. revision: of what was decided about its images."""

    model: str
    folder: Path
    expires: float
    images: list[Picture] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    waits: bool = False
    in_use: bool = True
    revision: int = 0
    check: str = ""
    used_by: str = ""

    @property
    def id(self) -> str:
        return self.folder.name

    def add(self, name: str | None, label: str, content: bytes) -> None:
        file = self.folder / f"{len(self.images):06}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        file.write_bytes(content)
        shown, names = shown_name(name), {image.where for image in self.images}
        while shown in names:
            shown += f" ({len(self.images) + 1})"
        self.images.append(Picture(shown, label, partial(_read, file, shown)))

    def decide(self, numbers: Sequence[int], label: str | None, left_out: bool | None) -> None:
        """Move images to another class, or leave them out, or take them back in."""
        if self.in_use:
            raise Conflict("a job is using this upload; wait until it has ended")
        for number, image in [(number, self.image(number)) for number in numbers]:
            self.images[number] = image if label is None else replace(image, label=label)
        if left_out is not None:
            self.left_out = self.left_out.union(numbers) if left_out else self.left_out.difference(numbers)
        self.revision += 1

    def image(self, number: int) -> Picture:
        if not 0 <= number < len(self.images):
            raise NotThere(f"the upload has no image {number}; it has {len(self.images)}, counted from 0")
        return self.images[number]

    def without(self, numbers: Sequence[int]) -> tuple[Picture, ...]:
        """Its images, except those with these numbers."""
        kept = tuple(image for number, image in enumerate(self.images) if number not in numbers)
        if not kept:
            raise UserError("no image is left to teach; choose at least one")
        return kept


class Uploads:
    """All uploads of a server."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def add(self, model: str, images: Iterable[tuple[str | None, str, bytes]]) -> Upload:
        """images: the client's name, the class and the content of each. If one of them raises, nothing is kept."""
        with self._lock:
            if len(self._uploads) >= self.limits.uploads:
                raise Busy(f"{len(self._uploads)} uploads are already waiting to be taught; try again later")
            expires = time.monotonic() + self.limits.upload_minutes * 60
            upload = Upload(model, self.folder / secrets.token_hex(8), expires)
            self._uploads[upload.id] = upload
        try:
            for name, label, content in images:
                upload.add(name, label, content)
        except BaseException:
            self._delete(upload)
            raise
        return upload

    def get(self, name: str, model: str) -> Upload:
        upload = self._uploads.get(name)
        if upload is None or upload.model != model:
            raise NotThere("there is no such upload: it was taught, deleted, or has expired; upload the images again")
        return upload

    def waiting(self, model: str) -> list[Upload]:
        return [upload for upload in list(self._uploads.values()) if upload.model == model and upload.waits]

    def release(self, upload: Upload) -> None:
        """No job uses it any more."""
        upload.in_use = False
        self.tidy()

    def delete(self, upload: Upload) -> None:
        if upload.in_use:
            raise Conflict("a job is using this upload; cancel the job first")
        self._delete(upload)

    def forget_classes(self, model: str, labels: Set[str]) -> None:
        """Delete what waits to be taught as one of these classes; what a job is using, when the job has ended."""
        for upload in self.waiting(model):
            upload.waits = all(image.label not in labels for image in upload.images)
        self.tidy()

    def tidy(self) -> None:
        """Delete what does not wait to be taught, or not any more."""
        for upload in list(self._uploads.values()):
            if not (upload.in_use or (upload.waits and time.monotonic() < upload.expires)):
                self._delete(upload)

    def _delete(self, upload: Upload) -> None:
        self._uploads.pop(upload.id, None)
        shutil.rmtree(upload.folder, ignore_errors=True)


class Gallery:
    """Thumbnails. most: how many are kept; the oldest are dropped first."""

    def __init__(self, most: int) -> None:
        self.most, self._thumbnails = most, dict[tuple[str, str], bytes]()

    def add(self, model: str, thumbnails: Iterable[Thumbnail]) -> None:
        self._thumbnails |= {(model, f"{image:016x}"): picture for image, picture in thumbnails}
        for oldest in list(self._thumbnails)[: max(0, len(self._thumbnails) - self.most)]:
            self._thumbnails.pop(oldest, None)

    def get(self, model: str, image: str) -> bytes | None:
        """image: its id, in hexadecimal digits."""
        return self._thumbnails.get((model, image))

    def keep_only(self, model: str, images: np.ndarray) -> None:
        """Drop the thumbnails of images that a model no longer knows. images: those it knows, uint64 [n]."""
        known = {f"{image:016x}" for image in images.tolist()}
        for key in list(self._thumbnails):
            if key[0] == model and key[1] not in known:
                self._thumbnails.pop(key, None)


def thumbnail(content: Given, name: str = "") -> Thumbnail:
    image = decode(content, name, SIDE)
    image.thumbnail((SIDE, SIDE))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=80)
    return content_id(content), packed.getvalue()


def thumbnails(images: Iterable[Picture]) -> Iterator[Thumbnail]:
    """What cannot be read is left out."""
    for image in islice(images, THUMBNAILS_PER_TEACHING):
        with suppress(UserError, OSError):
            yield thumbnail(image.open(), image.where)

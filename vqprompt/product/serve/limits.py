"""How much a server accepts. Requests beyond these limits are refused before any work is done for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vqprompt.core.errors import UserError


def _limit(default: float, says: str) -> Any:
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True)
class Limits:
    """Each can be raised or lowered: `vqprompt serve --limit upload_mb=1000`."""

    image_mb: float = _limit(32, "MB per image, and per request that is not an upload")
    upload_mb: float = _limit(512, "MB per upload of images to teach")
    upload_images: float = _limit(2000, "images per upload")
    receiving_mb: float = _limit(1024, "MB of uploads that are on their way at the same time, in memory")
    uploads: float = _limit(8, "uploads that wait to be taught")
    upload_minutes: float = _limit(30, "minutes until an upload that nobody teaches is deleted")
    jobs: float = _limit(16, "teachings and other changes that wait")
    job_minutes: float = _limit(240, "minutes that a teaching or another change may take")
    waiting: float = _limit(256, "predictions that wait")
    predict_seconds: float = _limit(60, "seconds that a prediction may take")
    body_seconds: float = _limit(60, "seconds that a client may take to send 16 MB (larger bodies get more)")
    header_seconds: float = _limit(10, "seconds that a client may take to send its headers")
    idle_seconds: float = _limit(30, "seconds that a connection may be idle between two requests")
    connections: float = _limit(512, "connections at once")
    answer_seconds: float = _limit(60, "seconds that a client may take to read the next 64 kB of an answer")
    thumbnails: float = _limit(4000, "thumbnails of taught images, in memory")

    @classmethod
    def parse(cls, given: Sequence[str]) -> Limits:
        """From `name=number`, as on the command line."""
        limits: dict[str, float] = {}
        for text in given:
            name, _, number = text.partition("=")
            try:
                limits[name] = float(number)
            except ValueError:
                raise UserError(f"--limit {text!r}: give a name and a number, such as upload_mb=1000") from None
            if name not in {f.name for f in fields(cls)}:
                raise UserError(f"--limit {text!r}: there is no such limit; the limits are\n{cls.described()}")
            if not 0 <= limits[name] < 1e9 or (limits[name] < 1 and name != "thumbnails"):
                raise UserError(f"--limit {text!r}: give a number from 1 (thumbnails: from 0)")
        return replace(cls(), **limits)

    @classmethod
    def described(cls) -> str:
        return "\n".join(f"  {f.name}={f.default:g}  {f.metadata['says']}" for f in fields(cls))

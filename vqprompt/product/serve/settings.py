"""What a server serves, where, and how much it accepts. Requests beyond its limits are refused before any work is done
for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vqprompt.core.errors import UserError, explain
from vqprompt.product.model.opening import ModelDefaults


def _limit(default: float, says: str, least: float = 1) -> Any:
    return Field(default, ge=least, lt=1e9, description=says)


class Limits(BaseModel):
    """Each can be raised or lowered: `vqprompt serve --limit upload_mb=1000`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    image_mb: float = _limit(32, "MB per image, and per request that is not an upload")
    upload_mb: float = _limit(512, "MB per upload of images to teach")
    upload_images: float = _limit(2000, "images per upload")
    receiving_mb: float = _limit(1024, "MB of requests that are on their way at the same time, in memory")
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
    thumbnails: float = _limit(4000, "thumbnails of taught images, in memory", least=0)

    @classmethod
    def parse(cls, given: Sequence[str]) -> Limits:
        """From `name=number`, as on the command line."""
        try:
            return cls.model_validate({name: number for name, _, number in (text.partition("=") for text in given)})
        except ValidationError as error:
            limits = "\n".join(f"  {name}={f.default:g}  {f.description}" for name, f in cls.model_fields.items())
            raise UserError(f"{explain(error, '--limit NAME=NUMBER')}; the limits are\n{limits}") from None


@dataclass(frozen=True)
class Settings:
    """model: a file, a folder of them, or None for a new one. token: required if other machines can reach it.
    allow_hosts: names under which a proxy offers the server. lan: for phones on the same network, with https."""

    model: Path | None = None
    example: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    allow_hosts: tuple[str, ...] = ()
    lan: bool = False

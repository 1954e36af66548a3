"""Errors of the server, with their HTTP status."""

from __future__ import annotations

import json

from vqprompt.core.errors import UserError


class Refused(UserError):
    """status: of the answer. headers: sent with the answer."""

    status = 400
    headers: dict[str, str] = {}


class NotThere(Refused):
    status = 404


class Conflict(Refused):
    """This cannot be done in the present state of the model."""

    status = 409


class TooLarge(Refused):
    status = 413


class NotAnImage(Refused):
    status = 415


class Busy(Refused):
    """Too many requests are already waiting."""

    status = 429

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after)}


class TooSlow(Refused):
    """It took longer than the server allows."""

    status = 504


class NoSpace(Refused):
    """The disk for uploads is full."""

    status = 507


def error_body(message: str) -> bytes:
    """What every error looks like. Characters beyond ASCII are escaped: what a client sent may not be valid text."""
    return json.dumps({"error": message}).encode()

"""Errors of the server, with their HTTP status."""

from __future__ import annotations

from vqprompt.core.errors import UserError


class Refused(UserError):
    """status: of the answer. headers: sent with the answer."""

    status = 400

    def __init__(self, message: str, status: int | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status or self.status, headers or {}


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

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, 429, {"Retry-After": str(retry_after)})

"""What a server refuses, as HTTP says it."""

from __future__ import annotations

from vqprompt.errors import UserError


class Refused(UserError):
    """status: of the answer. headers: to be sent with it."""

    status = 400
    headers: dict[str, str] = {}


class NotThere(Refused):
    status = 404


class Conflict(Refused):
    """The model is not in a state for this."""

    status = 409


class TooLarge(Refused):
    status = 413


class NotAnImage(Refused):
    status = 415


class Busy(Refused):
    """Too much is waiting already."""

    status = 429

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after)}


class TooSlow(Refused):
    """It took longer than the server allows."""

    status = 504

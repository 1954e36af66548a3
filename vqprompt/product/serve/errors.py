"""Errors of the server, with their HTTP status, and what a client is told about any error."""

from __future__ import annotations

import errno
import json
import re
from functools import partial

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vqprompt.core.errors import ImageError, UserError


class Refused(UserError):
    """status: of the answer. headers: sent with the answer."""

    def __init__(self, message: str, status: int = 400, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


NotThere = partial(Refused, status=404)
Conflict = partial(Refused, status=409)  # this cannot be done in the present state of the model
TooLarge = partial(Refused, status=413)
NotAnImage = partial(Refused, status=415)
Busy = partial(Refused, status=429, headers={"Retry-After": "5"})  # too many are already waiting


def as_response(error: Exception) -> Response:
    """What every error looks like. Characters beyond ASCII are escaped: what a client sent may not be valid text."""
    refused = _as_refused(error)
    return Response(json.dumps({"error": str(refused)}), refused.status, refused.headers, "application/json")


def _as_refused(error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case ImageError():
            return NotAnImage(re.sub(r"^image \d+: ", "", str(error)))  # its place among those asked together
        case UserError():
            return Refused(str(error))
        case RequestValidationError():
            first = error.errors()[:5]
            return Refused("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in first), 422)
        case HTTPException(status_code=404):
            return NotThere("there is no such address; /docs lists them")
        case HTTPException():
            return Refused(str(error.detail), error.status_code, dict(error.headers or {}))
        case MemoryError():
            return TooLarge("there is not enough memory for this image; make it smaller")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Refused("the disk of the server is full; free some space and try again", 507)
    raise error

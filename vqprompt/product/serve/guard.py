"""Checks before every request: who may ask, from where, how much, and how slowly.

- The name in the Host header must be one of ours, so that another site's page cannot reach a local server under that
  site's name (DNS rebinding).
- A request that changes something, or reads anything except the page itself, must not come from another site's page.
- A token, if there is one, is compared in constant time, taken only from the Authorization header, and never logged.
- The size of a body is limited, and the time it may take to arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
from base64 import b64decode
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vqprompt.core.errors import UserError
from vqprompt.product.serve.errors import NotAnImage, Refused
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.metrics import Metrics

SHORTEST_TOKEN = 12
OPEN = ("/", "/docs", "/v2/health/live", "/v2/health/ready")  # without a token: pages without data, and probes
OPEN_FOLDER = "/static/"
SAFE = ("GET", "HEAD", "OPTIONS")
JSON_BYTES = 1_000_000  # of a body that describes a change
CLOSE = {"connection": "close"}  # what is left of the body is not read
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(host: str, token: str | None) -> None:
    """Refuse to serve other machines without a token, and refuse tokens that are easy to guess."""
    if token is None and not is_local(host):
        raise UserError(
            f"--host {host} can be reached from other machines, so it needs --token (or VQPROMPT_TOKEN): a secret of "
            f"at least {SHORTEST_TOKEN} characters, such as what `openssl rand -hex 16` prints"
        )
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(f"the token must have at least {SHORTEST_TOKEN} printable ASCII characters")


class Guard:
    """ASGI middleware around the whole app. hosts: the names that requests may use for this server; None: any. behind:
    names under which a proxy offers it."""

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, token: str | None = None,
        hosts: frozenset[str] | None = None, behind: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.app, self.limits, self.metrics = app, limits, metrics
        self.hosts, self.behind = None if hosts is None else hosts | behind, behind
        self._token = None if token is None else _digest(token)
        self.arriving = 0  # bytes of all bodies that are on their way or being answered, counted when they arrive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no web sockets here
        started = False
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        body = _Body(self, receive, self._most_bytes(scope, headers))

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(scope["method"], str(message["status"])).inc()
                sent = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    sent.setdefault(name, value)
            await send(message)

        async def answer(message: Message) -> None:
            """What the app says, unless the body was refused; then the client gets our reason instead."""
            nonlocal started
            if body.refused is None or started:
                started = True
                await reply(message)

        try:
            self._check(scope, headers, body.most)
            with suppress(ClientDisconnect):
                await self.app(scope, body, answer)
        except Refused as error:
            body.refused = error
        finally:
            self.arriving -= body.read
        if body.refused is not None and not started:
            await as_response(body.refused)(scope, receive, reply)

    def _most_bytes(self, scope: Scope, headers: dict[str, str]) -> int:
        if headers.get("content-type", "").startswith("multipart/") and scope["path"].endswith(("/teach", "/uploads")):
            return int(self.limits.upload_mb * 1e6)
        return int(self.limits.image_mb * 1e6) if scope["path"].endswith(("/predict", "/infer")) else JSON_BYTES

    def _check(self, scope: Scope, headers: dict[str, str], most: int) -> None:
        path, host = scope["path"], headers.get("host", "")
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise Refused("the request has several Host headers; send one")
        if self.hosts is not None and _name(host) not in self.hosts:
            advice = "use the address that it printed, or start it with --allow-host"
            raise Refused(f"this server is not called {host[:100]!r}; {advice}", 421)
        page = path in OPEN or path.startswith(OPEN_FOLDER)
        if not (page and scope["method"] in SAFE):
            site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
            if site not in ("same-origin", "none") or (origin is not None and self._is_foreign(origin, host)):
                raise Refused("requests from pages of other sites are refused", 403)
            if self._token is not None and not self._knows(headers):
                advice = "send it as Authorization: Bearer TOKEN"
                raise Refused(f"the token is missing or wrong; {advice}", 401, {"www-authenticate": "Bearer"})
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise NotAnImage(f"compressed bodies ({encoding[:20]}) are not accepted; send the body without compression")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 15 or int(length) > most:
            raise _too_large(most)

    def _is_foreign(self, origin: str, host: str) -> bool:
        address = origin.partition("://")[2]
        return address != host and _name(address) not in self.behind

    def _knows(self, headers: dict[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        assert self._token is not None
        if basic := scheme.lower() == "basic":  # as in http://any:TOKEN@SERVER/, for programs that know no other way
            with suppress(ValueError):
                given = b64decode(given).decode("latin-1").partition(":")[2]
        return hmac.compare_digest(_digest(given.strip()), self._token) and (basic or scheme.lower() == "bearer")


class _Body:
    """The body of a request, while it arrives. It is refused if it is too large or arrives too slowly. read: bytes."""

    ALLOWANCE = 16e6  # bytes that must arrive within the given seconds; larger bodies get more time

    def __init__(self, guard: Guard, receive: Receive, most: int) -> None:
        self._guard, self._receive, self.most = guard, receive, most
        self.read, self._over = 0, False
        self.refused: Refused | None = None
        self._started: float | None = None

    async def __call__(self) -> Message:
        if self._over:
            return await self._receive()  # waits until the client hangs up
        message = await self._next() if self.refused is None else {}
        if self.refused is not None:
            raise ClientDisconnect  # so that the app gives up; the guard then tells the reason
        return message

    async def _next(self) -> Message:
        now = asyncio.get_running_loop().time()
        self._started = self._started or now
        left = self._started + self._guard.limits.body_seconds * max(1.0, self.read / self.ALLOWANCE) - now
        try:
            async with asyncio.timeout(max(left, 0.001)):
                message = await self._receive()
        except TimeoutError:
            self.refused = Refused("the request arrived too slowly; send it faster, or send less", 408, CLOSE)
            return {}
        self._over = not message.get("more_body", False)  # also if the client has left
        self.read += len(message.get("body", b""))
        self._guard.arriving += len(message.get("body", b""))
        if self.read > self.most:
            self.refused = _too_large(self.most)
        elif self._guard.arriving > self._guard.limits.receiving_mb * 1e6:
            self.refused = Refused("too much is being sent at the same time; try again later", 429, CLOSE)
        return message


def _too_large(most: int) -> Refused:
    advice = "send less, or raise the limit (vqprompt serve --limit)"
    return Refused(f"the request has more than {most / 1e6:g} MB; {advice}", 413, CLOSE)


def as_response(error: Refused) -> Response:
    """What every error looks like. Characters beyond ASCII are escaped: what a client sent may not be valid text."""
    return Response(json.dumps({"error": str(error)}), error.status, error.headers, "application/json")


def _digest(token: str) -> bytes:
    """Has the same length for all tokens, so that every comparison takes the same time."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""

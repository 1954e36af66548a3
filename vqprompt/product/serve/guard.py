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
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect

from vqprompt.core.errors import UserError
from vqprompt.product.serve.errors import error_body
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SHORTEST_TOKEN = 12
OPEN = ("/", "/docs", "/v2/health/live", "/v2/health/ready")  # without a token: pages without data, and probes
OPEN_FOLDER = "/static/"
SAFE = ("GET", "HEAD", "OPTIONS")
JSON_BYTES = 1_000_000  # of a body that describes a change
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
        self, app: App, limits: Limits, metrics: Metrics, token: str | None = None,
        hosts: frozenset[str] | None = None, behind: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.app, self.limits, self.metrics = app, limits, metrics
        self.hosts, self.behind = None if hosts is None else hosts | behind, behind
        self._token = None if token is None else _digest(token)
        self._arriving = _Arriving(limits.receiving_mb * 1e6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no web sockets here
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        most = self._most_bytes(scope, headers)

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(scope["method"], str(message["status"])).inc()
                own = {name for name, _ in message["headers"]}
                added = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in own]
                if b"cache-control" not in own:
                    added.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = self._refusal(scope, headers, most)
        if refusal is not None:
            await _refuse(reply, *refusal)
            return
        with _Body(receive, most, self.limits.body_seconds, self._arriving) as body:
            held = _Held(reply, body)
            with suppress(_BodyRefused, ClientDisconnect):
                await self.app(scope, body, held)
        if body.refused is not None and not held.started:
            await _refuse(reply, body.refused.status, body.refused.message, {"connection": "close"})

    def _most_bytes(self, scope: Scope, headers: dict[str, str]) -> int:
        if headers.get("content-type", "").startswith("multipart/") and scope["path"].endswith(("/teach", "/uploads")):
            return int(self.limits.upload_mb * 1e6)
        return int(self.limits.image_mb * 1e6) if scope["path"].endswith(("/predict", "/infer")) else JSON_BYTES

    def _refusal(self, scope: Scope, headers: dict[str, str], most: int) -> tuple[int, str, dict[str, str]] | None:
        """Status, message and headers of an answer that says no; None if the request may pass."""
        path, host = scope["path"], headers.get("host", "")
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return 400, "the request has several Host headers; send one", {}
        if self.hosts is not None and _name(host) not in self.hosts:
            advice = "use the address that it printed, or start it with --allow-host"
            return 421, f"this server is not called {host[:100]!r}; {advice}", {}
        page = path in OPEN or path.startswith(OPEN_FOLDER)
        if not (page and scope["method"] in SAFE):
            site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
            if site not in ("same-origin", "none") or (origin is not None and self._is_foreign(origin, host)):
                return 403, "requests from pages of other sites are refused", {}
            if self._token is not None and not self._knows(headers):
                return 401, "the token is missing or wrong; send it as Authorization: Bearer TOKEN", {
                    "www-authenticate": "Bearer"
                }  # fmt: skip
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            return 415, f"compressed bodies ({encoding[:20]}) are not accepted; send the body without compression", {}
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 15 or int(length) > most:
            return 413, _too_large(most), {"connection": "close"}
        return None

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


class _Arriving:
    """Bytes of all bodies that are on their way or being answered. They count when they arrive, not when announced."""

    def __init__(self, most: float) -> None:
        self.most, self.now = most, 0


class _BodyRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class _Body:
    """The body of a request, while it arrives. It is refused if it is too large or arrives too slowly."""

    ALLOWANCE = 16e6  # bytes that must arrive within the given seconds; larger bodies get more time

    def __init__(self, receive: Receive, most: int, seconds: float, arriving: _Arriving) -> None:
        self._receive, self._most, self._seconds, self._arriving = receive, most, seconds, arriving
        self._read, self._over = 0, False
        self.refused: _BodyRefused | None = None
        self._started: float | None = None

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, *error: object) -> None:
        self._arriving.now -= self._read

    async def __call__(self) -> Message:
        if self.refused is not None:
            raise self.refused
        if self._over:
            return await self._receive()  # waits until the client hangs up
        now = asyncio.get_running_loop().time()
        self._started = self._started or now
        left = self._started + self._seconds * max(1.0, self._read / self.ALLOWANCE) - now
        try:
            async with asyncio.timeout(max(left, 0.001)):
                message = await self._receive()
        except TimeoutError:
            self.refused = _BodyRefused(408, "the request arrived too slowly; send it faster, or send less")
            raise self.refused from None
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._arriving.now += len(message.get("body", b""))
            self._over = not message.get("more_body", False)
            if self._read > self._most:
                self.refused = _BodyRefused(413, _too_large(self._most))
            elif self._arriving.now > self._arriving.most:
                self.refused = _BodyRefused(429, "too much is being sent at the same time; try again later")
            if self.refused is not None:
                raise self.refused
        else:
            self._over = True
        return message


class _Held:
    """Passes the app's answer on, unless the body was refused; then the client gets our reason instead."""

    def __init__(self, send: Send, body: _Body) -> None:
        self._send, self._body, self.started = send, body, False

    async def __call__(self, message: Message) -> None:
        if self._body.refused is None or self.started:
            self.started = True
            await self._send(message)


def _too_large(most: int) -> str:
    return f"the request has more than {most / 1e6:g} MB; send less, or raise the limit (vqprompt serve --limit)"


async def _refuse(send: Send, status: int, message: str, headers: dict[str, str]) -> None:
    body = error_body(message)
    sent = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


def _digest(token: str) -> bytes:
    """Has the same length for all tokens, so that every comparison takes the same time."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""

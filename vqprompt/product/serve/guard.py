"""Checks before every request: who may ask, from where, how much, and how slowly. Nobody can hold a connection for
nothing.

- The name in the Host header must be one of ours, so that another site's page cannot reach a local server under that
  site's name (DNS rebinding).
- A request that changes something, or reads anything except the page itself, must not come from another site's page.
- A token, if there is one, is compared in constant time, taken only from the Authorization header, and never logged.
- The size of a body is limited, and the time it may take to arrive.
- Headers must arrive within `header_seconds`, of the first request and of every later one, and the next part of an
  answer must be read within `answer_seconds`. (Between two requests, uvicorn closes a connection that is idle.)
- When there are as many connections as are allowed, one of those that wait for their clients is closed: the one whose
  client has sent nothing for the longest time. If there is none, the new one is answered with 503.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import socket
from base64 import b64decode
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vqprompt.core.errors import UserError
from vqprompt.product.serve.errors import NotAnImage, Refused, as_response
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.settings import Settings

SHORTEST_TOKEN = 12
OPEN = ("/", "/docs", "/v2/health/live", "/v2/health/ready")  # without a token: pages without data, and probes
SAFE = ("GET", "HEAD", "OPTIONS")
JSON_BYTES = 1_000_000  # of a body that describes a change
ALLOWANCE = 16e6  # bytes that must arrive within `body_seconds`; larger bodies get more time
RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})|bytes=-\d{1,15}")
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
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
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
    """ASGI middleware around the whole app. hosts: the names that requests may use for this server; None: any."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics, self.behind = app, settings.limits, metrics, settings.allow_hosts
        local = {"localhost", "127.0.0.1", "::1", settings.host.lower()}
        self.hosts = local.union(self.behind) if is_local(settings.host) else None
        self._token = None if settings.token is None else _digest(settings.token)
        self.arriving = 0  # bytes of all bodies that are on their way or being answered, counted when they arrive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        most = self._most_bytes(scope, headers)

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(scope["method"], str(message["status"])).inc()
            await send(message)

        try:
            self._check(scope, headers, most)
            async with self._whole_body(receive, most) as body:

                async def read_again() -> Message:
                    return body.popleft() if body else await receive()  # which waits until the client hangs up

                if body[-1]["type"] == "http.request":  # else the client has left
                    await self.app(scope, read_again, reply)
        except Refused as error:
            await as_response(error)(scope, receive, reply)

    @asynccontextmanager
    async def _whole_body(self, receive: Receive, most: int) -> AsyncIterator[deque[Message]]:
        """The body of a request, when all of it has arrived. It counts as arriving until the request is answered."""
        body, size, began = deque[Message](), 0, asyncio.get_running_loop().time()
        try:
            while not body or body[-1].get("more_body", False):
                try:
                    async with asyncio.timeout_at(began + self.limits.body_seconds * max(1.0, size / ALLOWANCE)):
                        body.append(await receive())
                except TimeoutError:
                    raise Refused("the request arrived too slowly; send it faster, or send less", 408, CLOSE) from None
                arrived = len(body[-1].get("body", b""))
                size, self.arriving = size + arrived, self.arriving + arrived
                if size > most:
                    raise _too_large(most)
                if self.arriving > self.limits.receiving_mb * 1e6:
                    raise Refused("too much is being sent at the same time; try again later", 429, CLOSE)
            yield body
        finally:
            self.arriving -= size

    def _most_bytes(self, scope: Scope, headers: Headers) -> int:
        last = scope["path"].rpartition("/")[2]
        if headers.get("content-type", "").startswith("multipart/") and last in ("teach", "uploads"):
            return int(self.limits.upload_mb * 1e6)
        return int(self.limits.image_mb * 1e6) if last in ("predict", "infer", "attention") else JSON_BYTES

    def _check(self, scope: Scope, headers: Headers, most: int) -> None:
        path, host = scope["path"], headers.get("host", "")
        if len(headers.getlist("host")) > 1:
            raise Refused("the request has several Host headers; send one")
        if self.hosts is not None and _name(host) not in self.hosts:
            advice = "use the address that it printed, or start it with --allow-host"
            raise Refused(f"this server is not called {host[:100]!r}; {advice}", 421)
        page = path in OPEN or path.startswith("/static/")
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
        wanted = RANGE.fullmatch(headers.get("range", "bytes=0-"))
        if wanted is None or (wanted[2] and int(wanted[1]) > int(wanted[2])):
            raise Refused("the Range header is not understood; send one range, as bytes=FIRST-LAST, or none")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 15 or int(length) > most:
            raise _too_large(most)

    def _is_foreign(self, origin: str, host: str) -> bool:
        address = origin.partition("://")[2]
        return address != host and _name(address) not in self.behind

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        assert self._token is not None
        if basic := scheme.lower() == "basic":  # as in http://any:TOKEN@SERVER/, for programs that know no other way
            with suppress(ValueError):
                given = b64decode(given).decode("latin-1").partition(":")[2]
        return hmac.compare_digest(_digest(given.strip()), self._token) and (basic or scheme.lower() == "bearer")


def _too_large(most: int) -> Refused:
    advice = "send less, or raise the limit (vqprompt serve --limit)"
    return Refused(f"the request has more than {most / 1e6:g} MB; {advice}", 413, CLOSE)


def _digest(token: str) -> bytes:
    """Has the same length for all tokens, so that every comparison takes the same time."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    with suppress(ValueError):
        return (urlsplit(f"//{host}").hostname or "").lower()
    return ""


# ---------------------------------------------------------------------------------------------- connections


class Connection(HttpToolsProtocol):
    """The protocol for uvicorn. due: what the client must do in time, and the timer that ends the connection otherwise.
    heard: when the client has last sent something."""

    @property
    def is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def awaits_client(self) -> bool:
        """To send the rest of a request, or to read the answer. Clients that send further requests before they have
        read an answer count too: they could keep the connection busy for ever."""
        unread = "read" in self.due or bool(self.pipeline)
        return self.is_between_requests or self.cycle.more_body or unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        assert isinstance(self.config.app, Guard)
        self.limits = self.config.app.limits
        self.due: dict[str, asyncio.TimerHandle] = {}
        others = [c for c in self.connections if isinstance(c, Connection) and not c.transport.is_closing()]
        waiting = [other for other in others if other.awaits_client]
        full = len(others) >= self.limits.connections - 1
        if full and waiting:
            min(waiting, key=lambda other: other.heard).transport.abort()
            full = False
        self.limit_concurrency = 0 if full else None  # uvicorn's own count has requests of clients that have left, too
        super().connection_made(transport)
        # asyncio forgets it for sockets of socket.create_server: the body of an answer would wait for the client's
        # acknowledgment of its headers, 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        transport.set_write_buffer_limits(1)  # what a client does not read is noticed at once; TLS would stop at 0
        self.heard = self.loop.time()
        self._expect("send headers", self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.heard = self.loop.time()
        if not self.is_between_requests:
            self._done("send headers")
        elif "send headers" not in self.due:
            self._expect("send headers", self.limits.header_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("read", self.limits.answer_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._done("read")

    def connection_lost(self, exc: Exception | None) -> None:
        for what in list(self.due):
            self._done(what)
        self.pipeline.clear()  # requests that wait behind the one whose answer nobody reads any more
        super().connection_lost(exc)

    def _expect(self, what: str, seconds: float) -> None:
        self.due[what] = self.loop.call_later(seconds, self.transport.abort)

    def _done(self, what: str) -> None:
        if what in self.due:
            self.due.pop(what).cancel()

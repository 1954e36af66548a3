"""Deadlines for what a client does with its connection, so that nobody can hold one for nothing.

- Headers must arrive within `header_seconds`, of the first request and of every later one.
- An answer must be read: the next part of it within `answer_seconds`.
- When there are as many connections as are allowed, one of those that wait for their clients is closed: the one whose
  client has sent nothing for the longest time. If there is none, the new one is answered with 503.

The body of a request has its deadline in guard.py. Between two requests, uvicorn closes a connection that is idle.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vqprompt.product.serve.limits import Limits


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    limits: Limits
    _headers_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    @property
    def is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def awaits_client(self) -> bool:
        """To send the rest of a request, or to read the answer. Clients that send further requests before they have
        read an answer count too: they could keep the connection busy for ever."""
        unread = self._reading_due is not None or bool(getattr(self, "pipeline", ()))
        return self.is_between_requests or self.cycle.more_body or unread

    def connection_made(self, transport: asyncio.Transport) -> None:
        others = [other for other in self.connections if not other.transport.is_closing()]
        waiting = [other for other in others if other.awaits_client]
        full = len(others) >= self.limits.connections - 1
        if full and waiting:
            min(waiting, key=lambda other: other.heard).hang_up()
            full = False
        self.limit_concurrency = 0 if full else None  # uvicorn's own count has requests of clients that have left, too
        super().connection_made(transport)
        transport.set_write_buffer_limits(1)  # what a client does not read is noticed at once; TLS would stop at 0
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.heard = self.loop.time()
        if not self.is_between_requests:
            self._cancel("_headers_due")
        elif self._headers_due is None:
            self._expect_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(self.limits.answer_seconds, self.hang_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("_reading_due")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel("_headers_due")
        self._cancel("_reading_due")
        if hasattr(self, "pipeline"):
            self.pipeline.clear()  # requests that wait behind the one whose answer nobody reads any more
        super().connection_lost(exc)

    def hang_up(self) -> None:
        self.transport.abort()

    def _expect_headers(self) -> None:
        self.heard = self.loop.time()
        self._headers_due = self.loop.call_later(self.limits.header_seconds, self.hang_up)

    def _cancel(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


def with_deadlines(limits: Limits) -> type[Any]:
    """The protocol for uvicorn."""
    return type("Connection", (_Connection,), {"limits": limits})

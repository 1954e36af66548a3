"""Clients that stop in the middle: while they connect, send headers or a body, or read the answer. They are given up,
and everybody else is answered meanwhile."""

from __future__ import annotations

import functools
import random
import socket
import tempfile
import time
from pathlib import Path

from serving import Client

from faults.requests import FORM
from faults.servers import SECONDS, complaint, image, start


@functools.cache
def client() -> Client:
    folder = Path(tempfile.mkdtemp(prefix="vqprompt-fault-"))
    return start(folder, header_seconds=0.3, body_seconds=0.3, answer_seconds=0.3, idle_seconds=1, connections=50)


def try_slow_client(rng: random.Random, folder: Path) -> str:
    """A few connections that stop at the same random place."""
    whole = rng.choice([b"", f"GET /v2/health/live {client().head}\r\n".encode()])
    request = _request(rng)
    cut = rng.randrange(len(request))
    reads = rng.random() < 0.8
    data = whole + request[:cut] if reads else f"GET /models/m/file {client().head}\r\n".encode() * 100
    slow = [client().connect(data, None if reads else 4096) for _ in range(rng.randrange(1, 60))]
    wrong = complaint(client(), 0, b"")
    for connection in slow:
        if wrong is None and reads and not _ends(connection):
            wrong = "a slow client is kept"
    if wrong is None and not reads:
        wrong = _until_alone()
    for connection in slow:
        connection.close()
    return "handled" if wrong is None else f"bad: {data[:300]!r}: {wrong}"


def _request(rng: random.Random) -> bytes:
    path, body = rng.choice(
        [("models/m/predict", image()), ("models/m/teach", FORM % image()), ("models/m/uploads", FORM % image()),
         ("models/m/undo", b'{"steps": 999}'), ("v2/models/m/infer", b'{"inputs": []}')]
    )  # fmt: skip
    kind = "multipart/form-data; boundary=x" if body.startswith(b"--x") else "application/json"
    head = f"POST /{path} {client().head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _ends(connection: socket.socket) -> bool:
    """Whether the server hangs up, with or without an answer."""
    connection.settimeout(SECONDS)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def _until_alone() -> str | None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not client().server.server_state.connections:
            return None
        time.sleep(0.05)
    return "a client that does not read is kept"

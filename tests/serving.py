"""A server in this process or in one of its own, and a client, for tests of `vqprompt serve`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from conftest import command_environment
from drawings import write_drawings

from vqprompt.product.model.opening import ModelDefaults
from vqprompt.product.serve.server import Server, open_server
from vqprompt.product.serve.settings import Limits, Settings

SIZE = 28


class Client:
    """Requests to a server; `teach` and `change` wait for the job and return it. server: if it is in this process."""

    def __init__(self, url: str, model: str = "m", server: Server | None = None) -> None:
        self.url, self.model, self.session, self._server = url.rstrip("/"), model, requests.Session(), server

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def connect(self, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        """A connection of its own, over which `data` is sent. receive_buffer: bytes that it takes without reading."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(300)
        connection.connect((host, int(port)))
        connection.sendall(data)
        return connection

    @property
    def head(self) -> str:
        """What comes after the first line of every request."""
        return f"HTTP/1.1\r\nHost: {self.url.removeprefix('http://')}\r\n"

    def get(self, path: str, **more: Any) -> requests.Response:
        return self.session.get(self.url + path, timeout=120, **more)

    def post(self, path: str, **more: Any) -> requests.Response:
        return self.session.post(self.url + path, timeout=120, **more)

    def about(self) -> dict[str, Any]:
        return self.get(f"/models/{self.model}").json()

    def wait(self, answer: requests.Response) -> dict[str, Any]:
        assert answer.status_code == 202, answer.text
        told = answer.json()
        job = told["job"] if "upload" in told else told
        for _ in range(10):  # minutes, on a machine with a lot to do
            job = self.get(f"/jobs/{job['id']}", params={"wait": 60}).json()
            if job["state"] in ("done", "failed", "cancelled"):
                break
        return job

    def send(self, what: str, images: Sequence[Path], label: str) -> requests.Response:
        files = [("files", (image.name, image.read_bytes())) for image in images]
        return self.post(f"/models/{self.model}/{what}", files=files, data={"label": label})

    def teach(self, images: Sequence[Path], label: str) -> dict[str, Any]:
        return self.wait(self.send("teach", images, label))

    def change(self, what: str, **body: Any) -> dict[str, Any]:
        return self.wait(self.post(f"/models/{self.model}/{what}", json=body))

    def predict(self, image: Path | bytes, **query: Any) -> dict[str, Any]:
        content = image if isinstance(image, bytes) else image.read_bytes()
        answer = self.post(f"/models/{self.model}/predict", data=content, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving(
    model: Path | None, token: str | None = None, example: bool = False, allow_hosts: tuple[str, ...] = (),
    lan: bool = False, **limits: float,
) -> Iterator[Client]:  # fmt: skip
    """A server in a thread of this process."""
    settings = Settings(
        model, port=0, token=token, example=example, limits=Limits.model_construct(**limits),
        defaults=ModelDefaults(size=SIZE, device="cpu"), allow_hosts=allow_hosts, lan=lan,
    )  # fmt: skip
    up = threading.Event()
    server = open_server(settings, lambda text: None, lambda url: up.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert up.wait(300)
        yield Client(server.url, "" if model is None else model.stem, server)
    finally:
        server.should_exit = True
        server.state.closing = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def served_by_command(*arguments: Any, home: Path) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """`vqprompt serve` as a process of its own, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vqprompt", "serve", *map(str, arguments), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=command_environment(home),
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        assert lines and lines[-1].startswith("ready"), lines
        yield Client(lines[-1].split()[-1]), process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def drawn(folder: Path, name: str, rows: Sequence[int]) -> list[Path]:
    """Drawings as PNG files."""
    write_drawings(folder, [name], rows)
    return [folder / name / f"{row}.png" for row in rows]


def until(condition: Any, seconds: float = 300) -> Any:
    """Wait until something is so, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")

"""A server in this process, with a tiny model, for faults that come over the network."""

from __future__ import annotations

import functools
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import requests
from PIL import Image
from serving import Client

from faults.tiny import scene
from vqprompt import Model
from vqprompt.core.progress import Progress
from vqprompt.product.model.opening import ModelDefaults
from vqprompt.product.serve.jobs import CANCEL, Job, Jobs, _do
from vqprompt.product.serve.server import open_server
from vqprompt.product.serve.settings import Limits, Settings

SECONDS = 20  # that a server may take for anything, on a busy machine


@functools.cache
def image() -> bytes:
    packed = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)).save(packed, "PNG")
    return packed.getvalue()


@functools.cache
def model_file() -> bytes:
    model = Model(scene() / "tiny.safetensors", size=28, device="cpu")
    model.learn(scene() / "images" / "train")
    return model.to_bytes()


class OwnConnection:
    """For a worker in the server's own process: children of this campaign may have no children."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def poll(self) -> bool:
        return self.job._cancelled.is_set()

    def recv(self) -> str:
        return CANCEL

    def send(self, event: Progress) -> None:
        self.job.follow(event)


def start(folder: Path, **limits: float) -> Client:
    """A server that runs until the process ends. Its model is called m."""
    Jobs._hand_over = lambda jobs, job: _do(job._change, OwnConnection(job))  # type: ignore
    (folder / "m.vqp").write_bytes(model_file())
    defaults = ModelDefaults(str(scene() / "tiny.safetensors"), 28, "cpu")
    settings = Settings(folder / "m.vqp", port=0, limits=Limits.model_construct(**limits), defaults=defaults)
    up = threading.Event()
    server = open_server(settings, lambda text: None, lambda url: up.set())
    threading.Thread(target=server.run, daemon=True).start()
    if not up.wait(SECONDS):
        raise RuntimeError("the server does not start")
    return Client(server.url, "m", server)


def complaint(client: Client, status: int, body: bytes) -> str | None:
    """What is wrong with an answer, or with the server after it; None if nothing is."""
    if status >= 500:
        return f"status {status}: {body[:200]!r}"
    if status >= 400 and body and not _is_error(body):
        return f"status {status} without words: {body[:200]!r}"
    alive = requests.get(f"{client.url}/v2/health/live", timeout=SECONDS)
    return None if alive.status_code == 200 else f"health: {alive.status_code}"


def _is_error(body: bytes) -> bool:
    if body == b"Invalid HTTP request received.":  # by uvicorn, before anything of ours
        return True
    try:
        told: Any = json.loads(body)
    except ValueError:
        return False
    return isinstance(told, dict) and (bool(told.get("error")) or "ready" in told)

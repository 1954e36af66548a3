"""Runs the server: finds its models, puts routes and pages together, opens the port, answers until it is stopped."""

from __future__ import annotations

import asyncio
import secrets
import socket
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vqprompt._version import __version__
from vqprompt.core.cache import cache_folder
from vqprompt.core.errors import UserError, missing
from vqprompt.core.plugins import Registry
from vqprompt.product import example
from vqprompt.product.serve import api_models, api_predict
from vqprompt.product.serve.errors import as_response
from vqprompt.product.serve.guard import HEADERS, Connection, Guard, check_token
from vqprompt.product.serve.images import thumbnail
from vqprompt.product.serve.lan import certificate, network_address
from vqprompt.product.serve.models import ModelFolder, ServedModel, warn
from vqprompt.product.serve.settings import Settings
from vqprompt.product.serve.state import State

UNNAMED = "my-model.vqp"
STATIC = Path(__file__).parent / "static"
DESCRIPTION = """Teach a model classes of images, ask it, and look at what it knows.

Errors are JSON, `{"error": "…"}`, with a message that says what to do. If the server has a token, send
`Authorization: Bearer TOKEN`."""
SECONDS_TO_END = 3  # for answers that are being sent when the server is stopped


def find_models(settings: Settings, private: Path, say: Callable[[str], None]) -> ModelFolder:
    """The models to serve; makes the example if it is asked for. private: a folder for an example that is not kept."""
    given, defaults = settings.model, settings.defaults
    if given is not None and given.is_dir():
        if settings.example:
            raise UserError(
                f"{given}: this is a folder, and --example makes one model; give a file such as {given}/drawings.vqp"
            )
        return ModelFolder([], defaults, given)
    path = given or (private / f"{example.NAME}.vqp" if settings.example else Path(UNNAMED))
    if path.suffix != ".vqp" and not path.is_file():
        raise missing(path, "model", "give a file that ends in .vqp (it may be new), or a folder of them")
    if not path.parent.is_dir():
        raise missing(path.parent, "folder", "create it, or give another path")
    if settings.example and not path.exists():
        say(f"learning {example.PER_CLASS} drawings of each of {len(example.THINGS)} things …")
        example.make_example(path, defaults.device)
    elif not path.exists():
        say(f"{path}: a new model; it knows nothing until it is taught")
    return ModelFolder([ServedModel(path.stem, path, defaults, drawings=settings.example)], defaults)


def open_server(settings: Settings, say: Callable[[str], None], ready: Callable[[str], None]) -> Server:
    """A server that has its port and its models; `run` answers until Ctrl-C or SIGTERM. ready: called with the address
    as soon as requests are answered."""
    if settings.lan:
        settings = replace(settings, host=network_address(), token=settings.token or secrets.token_urlsafe(12))
    check_token(settings.host, settings.token)
    with ExitStack() as opened:
        listening = opened.enter_context(_listen(settings.host, settings.port))
        state = opened.enter_context(closing(State(settings)))
        state.models = find_models(settings, state.folder, say)
        state.models.look_again(state.refresh)
        if not list(state.models):
            advice = "no model in this folder; put .vqp files there, made with vqprompt learn"
            raise UserError(f"{settings.model}: {advice}" if state.models.folder else state.models.get(None).problem)
        if settings.example:
            state.gallery.add(state.models.get(None).name, map(thumbnail, example.example_drawings()[0]))
        server = Server(state, listening, ready)
        opened.pop_all()
        return server


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError, OverflowError) as error:
        advice = f"try another, such as --port {port + 1}"
        raise UserError(f"--host {host} --port {port}: cannot be used ({error}); {advice}") from None


class Server(uvicorn.Server):
    """Answers that it is not ready when it is being stopped."""

    def __init__(self, state: State, listening: socket.socket, ready: Callable[[str], None]) -> None:
        self.state, self._listening, settings = state, listening, state.settings
        host, port = settings.host, listening.getsockname()[1]
        self.url = f"http{'s' if settings.lan else ''}://{f'[{host}]' if ':' in host else host}:{port}/"
        if settings.lan:
            self.url = state.phone_url = f"{self.url}#token={settings.token}"
        app = Guard(make_app(state, lambda: ready(self.url)), settings, state.metrics)
        config = uvicorn.Config(
            app, ws="none", access_log=False, log_level="warning", http=Connection, server_header=False,
            timeout_keep_alive=int(settings.limits.idle_seconds), timeout_graceful_shutdown=SECONDS_TO_END,
            proxy_headers=False, headers=list(HEADERS.items()),
            ssl_certfile=certificate(host, cache_folder() / "certificates") if settings.lan else None,
        )  # fmt: skip
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with self._listening, closing(self.state):
            for served in self.state.models:
                try:
                    served.snapshot.model.embed(np.zeros((32, 32, 3), np.uint8))  # so that no answer waits for it
                except UserError as error:  # such as weights that were moved: the other models can answer
                    if self.state.models.folder is None:
                        raise
                    warn(f"{served.path}: {error}")
            super().run(sockets=[self._listening])

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.state.closing = True
        super().handle_exit(sig, frame)


class ErrorAnswer(BaseModel):
    error: str


def make_app(state: State, ready: Callable[[], None]) -> FastAPI:
    """ready: called when requests are answered; those that come a moment before wait at the open port."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(state))
        ready()
        yield
        tidying.cancel()
        state.close()

    app = FastAPI(
        title="vqprompt", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None,
        lifespan=lifespan, responses={"4XX": {"model": ErrorAnswer}},
    )  # fmt: skip
    app.state.serving = state
    for part in (api_models.router, api_predict.router, api_predict.protocol):
        app.include_router(part)
    for kind in (UserError, OSError, MemoryError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, lambda request, error: as_response(error))
    app.add_route("/", lambda request: FileResponse(STATIC / "index.html"), include_in_schema=False)
    app.add_route("/docs", lambda request: FileResponse(STATIC / "docs.html"), include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    added: Registry[APIRouter] = Registry("vqprompt.serve", APIRouter, {})
    for part in added.values():  # after our own, whose addresses it cannot take
        app.include_router(part)
    return app


async def _tidy(state: State) -> None:
    while True:
        await asyncio.sleep(1)
        try:
            await run_in_threadpool(state.tidy)
        except Exception:  # whatever a model or a disk does, the next one is done
            traceback.print_exc()

"""Runs the server: finds its models, puts routes and pages together, opens the port, answers until it is stopped."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.core.files.cache import cache_folder
from vqprompt.product.serve import api_changes, api_models, api_predict, example, label_studio
from vqprompt.product.serve.connections import with_deadlines
from vqprompt.product.serve.errors import NotThere, Refused
from vqprompt.product.serve.guard import Guard, as_response, check_token, is_local
from vqprompt.product.serve.lan import certificate, network_address
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.models import ModelDefaults, ModelFolder, ServedModel
from vqprompt.product.serve.state import State, warn

UNNAMED = "my-model.vqp"
STATIC = Path(__file__).parent / "static"
SECONDS_TIDYING = 5.0  # between two looks for uploads that have waited too long
DESCRIPTION = """Teach a model classes of images, ask it, and look at what it knows.

Errors are JSON, `{"error": "…"}`, with a message that says what to do. If the server has a token, send
`Authorization: Bearer TOKEN`."""
SECONDS_TO_END = 3  # for answers that are being sent when the server is stopped


@dataclass(frozen=True)
class Settings:
    """model: a file, a folder of them, or None for a new one. token: required if other machines can reach it.
    allow_hosts: names under which a proxy offers the server. lan: for phones on the same network, with https."""

    model: Path | None = None
    example: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    allow_hosts: tuple[str, ...] = ()
    lan: bool = False


def find_models(settings: Settings, private: Path, say: Callable[[str], None]) -> ModelFolder:
    """The models to serve; makes the example if it is asked for. private: a folder for an example that is not kept."""
    given, defaults = settings.model, settings.defaults
    if given is not None and given.is_dir():
        if settings.example:
            raise UserError(
                f"{given}: this is a folder, and --example makes one model; give a file such as {given}/drawings.vqp"
            )
        models = ModelFolder([], defaults, given, warn)
        models.look_again()
        if not list(models):
            raise UserError(f"{given}: no model in this folder; put .vqp files there, made with vqprompt learn")
        return models
    path = given or (private / f"{example.NAME}.vqp" if settings.example else Path(UNNAMED))
    if path.suffix != ".vqp" and not path.is_file():
        raise UserError(f"{path}: no such model; give a file that ends in .vqp (it may be new), or a folder of them")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; create it, or give another path")
    if settings.example and not path.exists():
        say(f"learning {example.PER_CLASS} drawings of each of {len(example.THINGS)} things …")
        example.make_example(path, defaults.device)
    elif not path.exists():
        say(f"{path}: a new model; it knows nothing until it is taught")
    served = ServedModel(path.stem, path, defaults, drawings=settings.example)
    served.refresh()
    if served.problem is not None:
        raise UserError(served.problem)
    return ModelFolder([served], defaults, None, warn)


def open_server(settings: Settings, say: Callable[[str], None], ready: Callable[[str], None]) -> Server:
    """A server that has its port and its models; `run` answers until Ctrl-C or SIGTERM. ready: called with the address
    as soon as requests are answered."""
    if settings.lan:
        settings = replace(settings, host=network_address(), token=settings.token or secrets.token_urlsafe(12))
    check_token(settings.host, settings.token)
    with ExitStack() as opened:
        listening = opened.enter_context(_listen(settings.host, settings.port))
        state = opened.enter_context(closing(State(settings.limits, settings.defaults)))
        state.models = find_models(settings, state.folder, say)
        if settings.example:
            example.fill(state.gallery, next(iter(state.models)).name)
        server = Server(settings, state, listening, ready)
        opened.pop_all()
        return server


def _listen(host: str, port: int) -> socket.socket:
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = opened.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except (OSError, UnicodeError, OverflowError) as error:
            advice = f"try another, such as --port {port + 1}"
            raise UserError(f"--host {host} --port {port}: cannot be used ({error}); {advice}") from None
        opened.pop_all()
        return listening


class Server(uvicorn.Server):
    """Says when it is ready, and answers that it is not when it is being stopped."""

    def __init__(
        self, settings: Settings, state: State, listening: socket.socket, ready: Callable[[str], None]
    ) -> None:
        self.state, self._listening, self._tell = state, listening, ready
        host, port = settings.host, listening.getsockname()[1]
        self.url = f"http{'s' if settings.lan else ''}://{f'[{host}]' if ':' in host else host}:{port}/"
        if settings.lan:
            self.url = state.phone_url = f"{self.url}#token={settings.token}"
        limits = settings.limits
        own = frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if is_local(host) else None
        app = Guard(make_app(state), limits, state.metrics, settings.token, own, frozenset(settings.allow_hosts))
        config = uvicorn.Config(
            app, ws="none", access_log=False, log_level="warning", http=with_deadlines(limits), server_header=False,
            timeout_keep_alive=int(limits.idle_seconds), timeout_graceful_shutdown=SECONDS_TO_END, proxy_headers=False,
            ssl_certfile=certificate(host, cache_folder() / "certificates") if settings.lan else None,
        )  # fmt: skip
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with self._listening, closing(self.state):
            for served in self.state.models:
                try:
                    served.warm_up()
                except UserError as error:  # such as weights that were moved: the other models can answer
                    if self.state.models.folder is None:
                        raise
                    warn(f"{served.path}: {error}")
            super().run(sockets=[self._listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell(self.url)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.state.closing = True
        super().handle_exit(sig, frame)


# ---------------------------------------------------------------------------------------------- routes and pages


class ErrorAnswer(BaseModel):
    error: str


def make_app(state: State) -> FastAPI:

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(state))
        yield
        tidying.cancel()
        state.close()

    app = FastAPI(
        title="vqprompt", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None,
        lifespan=lifespan, responses={"4XX": {"model": ErrorAnswer}},
    )  # fmt: skip
    app.state.serving = state
    for part in (api_models.router, api_predict.router, api_changes.router, api_predict.protocol, label_studio.router):
        app.include_router(part)
    for kind in (UserError, OSError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, lambda request, error: as_response(_as_refused(error)))
    _add_pages(app, state)
    return app


async def _tidy(state: State) -> None:
    """Delete uploads that nobody teaches in time."""
    while True:
        await asyncio.sleep(min(SECONDS_TIDYING, state.limits.upload_minutes * 60))
        with suppress(OSError):
            await run_in_threadpool(state.uploads.delete_expired)


def _add_pages(app: FastAPI, state: State) -> None:
    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return FileResponse(STATIC / "docs.html")

    @app.get("/metrics", tags=["metrics"], summary="Numbers for Prometheus")
    def metrics() -> Response:
        m = state.metrics
        m.waiting.set(state.batcher.waiting())
        m.jobs_waiting.set(state.jobs.waiting())
        for served in state.models:
            snapshot = served.snapshot
            m.classes.labels(served.name).set(len(snapshot.model.classes))
            m.version.labels(served.name).set(snapshot.version)
            if snapshot.model.accuracy is not None:
                m.accuracy.labels(served.name).set(snapshot.model.accuracy)
        return Response(m.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


def _as_refused(error: Exception) -> Refused:
    """What a client is told about an error."""
    match error:
        case Refused():
            return error
        case UserError():
            return Refused(str(error))
        case RequestValidationError():
            first = error.errors()[:5]
            return Refused("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in first), 422)
        case HTTPException(status_code=404):
            return NotThere("there is no such address; /docs lists them")
        case HTTPException():
            return Refused(str(error.detail), error.status_code, dict(error.headers or {}))
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Refused("the disk of the server is full; free some space and try again", 507)
    raise error

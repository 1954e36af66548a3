"""Puts the parts together: routes, the page, errors as answers, and the guard around all of it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.product.serve import api_changes, api_models, api_predict, api_state, inference, label_studio
from vqprompt.product.serve.errors import NoSpace, Refused, error_body
from vqprompt.product.serve.guard import Guard
from vqprompt.product.serve.state import State

STATIC = Path(__file__).parent / "static"
SECONDS_TIDYING = 5.0  # between two looks for uploads that have waited too long
DESCRIPTION = """Teach a model classes of images, ask it, and look at what it knows.

Errors are JSON, `{"error": "…"}`, with a message that says what to do. If the server has a token, send
`Authorization: Bearer TOKEN`."""


class ErrorAnswer(BaseModel):
    error: str


def make_app(
    state: State, token: str | None = None, hosts: frozenset[str] | None = None, behind: frozenset[str] = frozenset()
) -> Any:
    """The whole server as an ASGI application. hosts: the names that requests may use for it; None: any. behind: names
    under which a proxy offers it."""

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
    for part in (api_models, api_predict, api_changes, api_state, inference, label_studio):
        app.include_router(part.router)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(OSError, _system_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    _add_pages(app, state)
    return Guard(app, state.limits, state.metrics, token, hosts, behind)


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


# ---------------------------------------------------------------------------------------------- errors


def _answer(status: int, message: str, headers: Any = None) -> Response:
    return Response(error_body(message), status, headers, "application/json")


def _user_error(request: Request, error: Exception) -> Response:
    return _answer(error.status, str(error), error.headers) if isinstance(error, Refused) else _answer(400, str(error))


def _system_error(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _user_error(request, NoSpace("the disk of the server is full; free some space and try again"))
    raise error


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(422, "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "there is no such address; /docs lists them" if error.status_code == 404 else str(error.detail)
    return _answer(error.status_code, message, error.headers)

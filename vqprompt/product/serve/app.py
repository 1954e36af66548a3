"""Puts the parts together: routes, the page, and errors as answers."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.product.serve import api_changes, api_models, api_predict, label_studio
from vqprompt.product.serve.errors import NotThere, Refused
from vqprompt.product.serve.guard import as_response
from vqprompt.product.serve.state import State

STATIC = Path(__file__).parent / "static"
SECONDS_TIDYING = 5.0  # between two looks for uploads that have waited too long
DESCRIPTION = """Teach a model classes of images, ask it, and look at what it knows.

Errors are JSON, `{"error": "…"}`, with a message that says what to do. If the server has a token, send
`Authorization: Bearer TOKEN`."""


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

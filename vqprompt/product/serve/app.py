"""Puts the parts together: routes, the page, errors as answers, and the guard around all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.product.serve import api_jobs, api_models, api_predict, api_teach, inference
from vqprompt.product.serve.errors import Refused
from vqprompt.product.serve.models import UnknownModel
from vqprompt.product.serve.schemas import ErrorAnswer
from vqprompt.product.serve.security import Guard
from vqprompt.product.serve.state import State

STATIC = Path(__file__).parent / "static"
DESCRIPTION = """Teach a model classes of images, ask it, and look at what it knows.

Errors are JSON, `{"error": "…"}`, with a message that says what to do. If the server has a token, send
`Authorization: Bearer TOKEN`."""


def make_app(state: State, token: str | None = None, hosts: frozenset[str] | None = None) -> Any:
    """The whole server as an ASGI application. hosts: the names that requests may use for it; None: any."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    app = FastAPI(
        title="vqprompt", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None,
        lifespan=lifespan, responses={"4XX": {"model": ErrorAnswer}},
    )  # fmt: skip
    app.state.serving = state
    for part in (api_models, api_predict, api_teach, api_jobs, inference):
        app.include_router(part.router)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    _add_pages(app, state)
    return Guard(app, state.limits, state.metrics, token, hosts)


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
        for served in state.shelf:
            snapshot = served.snapshot
            m.classes.labels(served.name).set(len(snapshot.model.classes))
            m.version.labels(served.name).set(snapshot.version)
            if snapshot.model.accuracy is not None:
                m.accuracy.labels(served.name).set(snapshot.model.accuracy)
        return Response(m.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


# ---------------------------------------------------------------------------------------------- errors


def _user_error(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, Refused) else 404 if isinstance(error, UnknownModel) else 400
    return JSONResponse(
        {"error": str(error)}, status_code=status, headers=error.headers if isinstance(error, Refused) else None
    )


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
    return JSONResponse({"error": message}, status_code=422)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "there is no such address; /docs lists them" if error.status_code == 404 else str(error.detail)
    return JSONResponse({"error": message}, status_code=error.status_code, headers=error.headers)

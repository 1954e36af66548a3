"""Jobs over HTTP: their progress, live, and how to stop them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from vqprompt.product.serve.api_models import state_of
from vqprompt.product.serve.jobs import ENDED, Job
from vqprompt.product.serve.schemas import JobAnswer
from vqprompt.product.serve.state import State

router = APIRouter(tags=["jobs"])
BETWEEN_EVENTS = 0.15  # seconds
QUIET = 10.0  # seconds after which an unchanged state is sent again, to keep a stream of events open


@router.get("/jobs", response_model=list[JobAnswer])
def jobs(request: Request) -> list[dict[str, Any]]:
    """Changes of models: those that wait, the one that runs, and the last ones that ended."""
    return [job.as_dict() for job in state_of(request).jobs.all()]


@router.get("/jobs/{job}", response_model=JobAnswer)
async def job(
    request: Request, job: str, wait: Annotated[float, Query(ge=0, le=60, description="Seconds to wait for it.")] = 0
) -> dict[str, Any]:
    """The state and progress of a job."""
    found = state_of(request).jobs.get(job)
    until = asyncio.get_running_loop().time() + wait
    while found.state not in ENDED and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.05)
    return found.as_dict()


@router.get("/jobs/{job}/events", summary="Its progress as server-sent events, until it has ended")
async def events(request: Request, job: str) -> StreamingResponse:
    found = state_of(request).jobs.get(job)
    return StreamingResponse(_events(found, state_of(request)), media_type="text/event-stream")


async def _events(job: Job, state: State) -> AsyncIterator[str]:
    last, quiet = "", 0.0
    while not state.closing:
        now = job.as_dict()
        text = json.dumps({**now, "elapsed": None, "remaining": None})
        if text != last or quiet >= QUIET:
            last, quiet = text, 0.0
            yield f"event: {now['state']}\ndata: {json.dumps(now)}\n\n"
        if now["state"] in ENDED:
            return
        await asyncio.sleep(BETWEEN_EVENTS)
        quiet += BETWEEN_EVENTS


@router.post("/jobs/{job}/cancel", status_code=202, response_model=JobAnswer)
def cancel(request: Request, job: str) -> dict[str, Any]:
    """Stop a job. The model stays as it was; a job that has just finished stays finished."""
    jobs, found = state_of(request).jobs, state_of(request).jobs.get(job)
    jobs.cancel(found)
    return found.as_dict()

"""Changes of models over HTTP: the routes of the table in changes.py, uploads, and the jobs that they become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vqprompt.core.errors import UserError, explain
from vqprompt.product.model.pictures import check_spelling, clean_name
from vqprompt.product.serve.api_models import find, state_of
from vqprompt.product.serve.api_predict import check_image
from vqprompt.product.serve.changes import KINDS, NO_LABEL, Body, Check, Teach
from vqprompt.product.serve.errors import Conflict, Refused, TooLarge
from vqprompt.product.serve.jobs import ENDED
from vqprompt.product.serve.models import ServedModel
from vqprompt.product.serve.uploads import Upload

router = APIRouter()
UPLOAD_FORM = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "label": {"type": "string", "description": "The class of all images."},
        "labels": {"type": "string", "description": "Or the class of each image, as a JSON list."},
        "effort": {"type": "string", "default": "instant"},
        "as_unknown": {"type": "boolean", "description": "These images are none of the classes; no label is needed."},
        "preview": {"type": "boolean", "description": "Only tell which answers would change."},
    },
}


class JobAnswer(BaseModel):
    """A change of a model: waiting, running or ended."""

    id: str
    kind: str = Field(json_schema_extra={"enum": list(KINDS)})
    model: str
    state: str = Field(json_schema_extra={"enum": ["queued", "running", *ENDED]})
    stage: str = Field(description="What is being done.")
    done: float
    total: float
    elapsed: float | None = Field(description="Seconds since it started.")
    remaining: float | None = Field(description="Estimated seconds until this stage is done.")
    result: dict[str, Any]
    error: str | None


class UploadAnswer(BaseModel):
    """Images that wait to be taught, and the job that checks them."""

    upload: str
    images: list[dict[str, Any]]
    job: JobAnswer


# ---------------------------------------------------------------------------------------------- changes


def with_body(kind: str, schema: type[Body]) -> Callable[..., Any]:
    """The endpoint of a change that a JSON body describes."""

    def endpoint(request: Request, name: str, body: Body) -> dict[str, Any]:
        return state_of(request).submit(find(request, name), kind, body).to_json()

    endpoint.__annotations__["body"] = schema
    return endpoint


async def teach(request: Request, name: str) -> dict[str, Any]:
    """With a form, all images that can be read are taught. With an upload, all except those in `leave_out`."""
    served, state = find(request, name), state_of(request)
    with ExitStack() as held:
        if request.headers.get("content-type", "").startswith("multipart/"):
            upload, form = await receive(request, served, held)
            asked = Teach(
                upload=upload.id, effort=str(form.get("effort") or "instant"), as_unknown=_flag(form, "as_unknown"),
                preview=_flag(form, "preview"),
            )  # fmt: skip
        else:
            try:
                asked = Teach.model_validate_json(await request.body())
            except ValidationError as error:
                raise UserError(explain(error, "teach")) from None
            upload = state.uploads.get(asked.upload, name)
            if upload.is_used:
                raise Conflict("another job is already using this upload; wait until it has ended")
        return state.submit(served, "teach", asked, upload, asked.leave_out).to_json()


async def check(request: Request, name: str) -> dict[str, Any]:
    """The job's result has the findings: images that cannot be read, copies, doubtful ones, each with a reason."""
    served, state = find(request, name), state_of(request)
    with ExitStack() as held:
        upload, _ = await receive(request, served, held)
        job = state.submit(served, "check", Check(), upload)
        upload.waits = True
        images = [{"name": image.name, "label": image.label} for image in upload.images]
        return {"upload": upload.id, "images": images, "job": job.to_json()}


async def receive(request: Request, served: ServedModel, held: ExitStack) -> tuple[Upload, FormData]:
    """A form of images with their classes, written into the private folder. Nothing is kept before all of it is here:
    the guard limits how much can be on its way. held: uses the upload until the request has been answered."""
    state, limits = state_of(request), state_of(request).limits
    most = int(limits.upload_images)
    parser = MultiPartParser(request.headers, request.stream(), max_files=most, max_fields=10)
    parser.spool_max_size = int(limits.upload_mb * 1e6) + 1  # in memory

    def close_files() -> None:
        for file in parser._files_to_close_on_error:  # all of them, also if the client leaves
            file.close()

    held.callback(close_files)
    try:
        form = await parser.parse()
    except MultiPartException as error:  # it cannot be read, or has too much in it
        raise Refused(f"{error.message} (at most {most} images per upload)") from None
    files = [f for f in form.getlist("files") if isinstance(f, UploadFile)]
    label = NO_LABEL if _flag(form, "as_unknown") else form.get("label")
    labels = _labels(label, form.get("labels"), len(files))
    check_spelling(served.snapshot.model.classes, labels)
    upload = held.enter_context(state.uploads.new(served.name).in_use())
    for file, label in zip(files, labels, strict=True):
        content = check_image(await file.read())
        if len(content) > limits.image_mb * 1e6:
            raise TooLarge(f"an image has more than {limits.image_mb:g} MB; make it smaller")
        await run_in_threadpool(upload.add, file.filename, label, content)
    return upload, form


def _flag(form: FormData, name: str) -> bool:
    value = form.get(name, "false")
    if value not in ("true", "false"):
        raise Refused(f"{name} must be true or false")
    return value == "true"


def _labels(label: Any, labels: Any, count: int) -> list[str]:
    if not count:
        raise Refused("the form has no image; send images in fields called files")
    if isinstance(labels, str):
        try:
            names = json.loads(labels)
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
            raise Refused(f"labels must be a JSON list of {count} names, one per image")
        return [clean_name(name) for name in names]
    if not isinstance(label, str) or not label.strip():
        raise Refused("which class is it? Send its name in the field label, or one name per image in labels")
    return [clean_name(label)] * count


@router.get("/models/{name}/images", tags=["models"], summary="The images that were taught as a class")
def images(request: Request, name: str, label: str) -> dict[str, Any]:
    """Ids for `GET /models/{name}/thumbnails/{image}` and for corrections, of images that have a thumbnail. label:
    "unknown" for those that are none of the classes. total: how many were taught."""
    records = find(request, name).snapshot.model.knowledge.records
    ids = records[label].ids.tolist() if label in records else []
    gallery = state_of(request).gallery
    return {"images": [f"{n:016x}" for n in ids if gallery.get(name, n) is not None], "total": len(ids)}


@router.delete("/models/{name}/uploads/{upload}", tags=["teach"], status_code=204, summary="Delete an upload")
def delete_upload(request: Request, name: str, upload: str) -> None:
    uploads = state_of(request).uploads
    uploads.delete(uploads.get(upload, name))


def _add_routes() -> None:
    form = {"multipart/form-data": {"schema": UPLOAD_FORM}}
    by_json = {"application/json": {"schema": Teach.model_json_schema()}}
    images = {
        "teach": (teach, "Teach images: of an upload, or sent along", JobAnswer, form | by_json),
        "check": (check, "Upload images and have them checked before they are taught", UploadAnswer, form),
    }
    for name, kind in KINDS.items():
        if kind.with_images:
            endpoint, summary, answer, content = images[name]
            router.post(
                kind.route, tags=["teach"], status_code=202, summary=summary, response_model=answer,
                openapi_extra={"requestBody": {"required": True, "content": content}},
            )(endpoint)  # fmt: skip
        else:
            router.post(
                kind.route, tags=["change"], status_code=202, response_model=JobAnswer, summary=name.capitalize(),
                description=kind.body.__doc__,
            )(with_body(name, kind.body))  # fmt: skip


_add_routes()


# ---------------------------------------------------------------------------------------------- jobs


@router.get("/jobs", tags=["jobs"], response_model=list[JobAnswer])
def jobs(request: Request) -> list[dict[str, Any]]:
    """Changes of models: those that wait, the one that runs, and the last ones that ended."""
    return [job.to_json() for job in state_of(request).jobs.all()]


@router.get("/jobs/{job}", tags=["jobs"], response_model=JobAnswer)
async def job(
    request: Request, job: str, wait: Annotated[float, Query(ge=0, le=60, description="Seconds to wait for it.")] = 0
) -> dict[str, Any]:
    """The state and progress of a job."""
    followed = state_of(request).jobs.get(job)
    until = asyncio.get_running_loop().time() + wait
    while (
        followed.state not in ENDED
        and asyncio.get_running_loop().time() < until
        and not await request.is_disconnected()
    ):
        await asyncio.sleep(0.05)
    return followed.to_json()


@router.post("/jobs/{job}/cancel", tags=["jobs"], status_code=202, response_model=JobAnswer)
def cancel(request: Request, job: str) -> dict[str, Any]:
    """Stop a job. The model stays as it was; a job that has just finished stays finished."""
    jobs = state_of(request).jobs
    jobs.cancel(stopped := jobs.get(job))
    return stopped.to_json()

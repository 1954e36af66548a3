"""Changes of models over HTTP: images that wait to be taught, the kinds of changes.py, and jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response, UploadFile
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.formparsers import MultiPartException, MultiPartParser

from vqprompt.core.errors import UserError, explain
from vqprompt.product.model.pictures import check_spelling, clean_name
from vqprompt.product.serve.api_predict import check_image
from vqprompt.product.serve.changes import EDITS, NO_LABEL, Body, Check, Teach
from vqprompt.product.serve.errors import Conflict, NotThere, Refused, TooLarge
from vqprompt.product.serve.gallery import thumbnails
from vqprompt.product.serve.jobs import ENDED, Job
from vqprompt.product.serve.models import ServedModel
from vqprompt.product.serve.state import Serving, State, ThisModel
from vqprompt.product.serve.uploads import Upload

router = APIRouter()
JOBS_SHOWN = 20


class JobAnswer(BaseModel):
    """A change of a model: waiting, running or ended."""

    id: str
    kind: str = Field(json_schema_extra={"enum": ["teach", "check", *EDITS]})
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


class UploadForm(BaseModel):
    """Images with their classes."""

    files: list[UploadFile]
    label: str = Field("", description="The class of all images.")
    labels: Json[list[str]] | None = Field(None, description="Or the class of each image, as a JSON list.")
    effort: str = "instant"
    as_unknown: bool = Field(False, description="These images are none of the classes; no label is needed.")
    preview: bool = Field(False, description="Only tell which answers would change.")

    def names(self) -> list[str]:
        """The class of each image."""
        label = NO_LABEL if self.as_unknown else self.label
        names = [label] * len(self.files) if self.labels is None else self.labels
        if not self.files:
            raise Refused("the form has no image; send images in fields called files")
        if self.labels is None and not label.strip():
            raise Refused("which class is it? Send its name in the field label, or one name per image in labels")
        if len(names) != len(self.files):
            raise Refused(f"labels must be a JSON list of {len(self.files)} names, one per image")
        return [clean_name(name) for name in names]


class Decision(BaseModel):
    """What to do with some images of an upload. What is not given stays as it is."""

    model_config = ConfigDict(extra="forbid")
    images: list[int] = Field(description="Their numbers in the upload, from 0.")
    label: str | None = Field(None, description="Move them to this class.")
    left_out: bool | None = Field(None, description="Whether they are not to be taught.")


async def _upload(state: Serving, name: str, upload: str) -> Upload:
    return state.uploads.get(upload, name)


async def _job(state: Serving, job: str) -> Job:
    return state.jobs.get(job)


ThisUpload = Annotated[Upload, Depends(_upload)]
ThisJob = Annotated[Job, Depends(_job)]
Seconds = Annotated[float, Query(ge=0, le=60, description="Seconds to wait for it.")]
FORM = {"multipart/form-data": {"schema": UploadForm.model_json_schema()}}
FORM_OR_UPLOAD = FORM | {"application/json": {"schema": Teach.model_json_schema()}}


# ---------------------------------------------------------------------------------------------- uploads


@router.post(
    "/models/{name}/uploads", tags=["teach"], status_code=202, response_model=UploadAnswer,
    summary="Upload images and have them checked before they are taught",
    openapi_extra={"requestBody": {"required": True, "content": FORM}},
)  # fmt: skip
async def check(request: Request, state: Serving, served: ThisModel) -> dict[str, Any]:
    """The job's result has the findings: images that cannot be read, copies, doubtful ones, each with a reason."""
    with ExitStack() as held:
        upload, _ = await _receive(request, state, served, held)
        job = state.submit(served, Check(), upload)
        upload.waits = True
        images = [{"name": image.name, "label": image.label} for image in upload.images]
        return {"upload": upload.id, "images": images, "job": job.to_json()}


async def _receive(request: Request, state: State, served: ServedModel, held: ExitStack) -> tuple[Upload, UploadForm]:
    """A form of images with their classes, written into the private folder. Nothing is kept before all of it is here:
    the guard limits how much can be on its way. held: uses the upload until the request has been answered."""
    limits = state.limits
    parser = MultiPartParser(request.headers, request.stream(), max_files=int(limits.upload_images), max_fields=10)
    parser.spool_max_size = int(limits.upload_mb * 1e6) + 1  # in memory

    def close_files() -> None:
        for file in parser._files_to_close_on_error:  # all of them, also if the client leaves
            file.close()

    held.callback(close_files)
    try:
        fields = await parser.parse()
        form = UploadForm.model_validate({**fields, "files": fields.getlist("files")})
    except MultiPartException as error:  # it cannot be read, or has too much in it
        raise Refused(f"{error.message} (at most {limits.upload_images:g} images per upload)") from None
    except ValidationError as error:
        raise Refused(explain(error, "form")) from None
    names = form.names()
    check_spelling(served.snapshot.model.classes, names)
    upload = held.enter_context(state.uploads.new(served.name).in_use())
    for file, label in zip(form.files, names, strict=True):
        content = check_image(await file.read())
        if len(content) > limits.image_mb * 1e6:
            raise TooLarge(f"an image has more than {limits.image_mb:g} MB; make it smaller")
        await run_in_threadpool(upload.add, file.filename, label, content)
    return upload, form


@router.get("/models/{name}/uploads/{upload}", tags=["state"], summary="The images of an upload that waits")
def waiting_images(upload: ThisUpload) -> dict[str, Any]:
    images = [
        {"name": image.name, "label": image.label, "left_out": number in upload.left_out}
        for number, image in enumerate(upload.images)
    ]
    return {"revision": upload.revision, "images": images}


@router.patch(
    "/models/{name}/uploads/{upload}", tags=["state"], summary="Move images to another class, or leave them out"
)
def decide(served: ThisModel, upload: ThisUpload, decision: Decision) -> dict[str, Any]:
    label = None if decision.label is None else clean_name(decision.label)
    if label is not None:
        check_spelling(served.snapshot.model.classes, [label])
    upload.decide(decision.images, label, decision.left_out)
    return {"revision": upload.revision}


@router.get("/models/{name}/uploads/{upload}/images/{number}", tags=["state"], summary="A small picture of one of them")
def waiting_image(upload: ThisUpload, number: int) -> Response:
    image = upload.image(number)
    for _, picture in thumbnails([(image.name, image.read)]):
        return Response(picture, media_type="image/jpeg")
    raise NotThere("this image cannot be read, so there is no small picture of it")


@router.delete("/models/{name}/uploads/{upload}", tags=["teach"], status_code=204, summary="Delete an upload")
def delete_upload(state: Serving, upload: ThisUpload) -> None:
    state.uploads.delete(upload)


# ---------------------------------------------------------------------------------------------- changes


@router.post(
    "/models/{name}/teach", tags=["teach"], status_code=202, response_model=JobAnswer,
    summary="Teach images: of an upload, or sent along",
    openapi_extra={"requestBody": {"required": True, "content": FORM_OR_UPLOAD}},
)  # fmt: skip
async def teach(request: Request, state: Serving, served: ThisModel) -> dict[str, Any]:
    """With a form, all images that can be read are taught. With an upload, all except those in `leave_out`."""
    with ExitStack() as held:
        if request.headers.get("content-type", "").startswith("multipart/"):
            upload, form = await _receive(request, state, served, held)
            asked = Teach(upload=upload.id, effort=form.effort, as_unknown=form.as_unknown, preview=form.preview)
        else:
            try:
                asked = Teach.model_validate_json(await request.body())
            except ValidationError as error:
                raise UserError(explain(error, "teach")) from None
            upload = state.uploads.get(asked.upload, served.name)
            if upload.is_used:
                raise Conflict("another job is already using this upload; wait until it has ended")
        return state.submit(served, asked, upload, asked.leave_out).to_json()


def _edit(schema: type[Body]) -> Callable[..., Any]:
    """The endpoint of a change that a JSON body describes."""

    def endpoint(state: Serving, served: ThisModel, body: Body) -> dict[str, Any]:
        return state.submit(served, body).to_json()

    endpoint.__annotations__["body"] = schema
    return endpoint


for name, edit in EDITS.items():
    router.post(
        f"/models/{{name}}/{name}", tags=["change"], status_code=202, response_model=JobAnswer,
        summary=name.capitalize(), description=edit.__doc__,
    )(_edit(edit))  # fmt: skip


# ---------------------------------------------------------------------------------------------- jobs


@router.get("/models/{name}/state", tags=["state"], summary="What changes all the time: jobs, uploads, the version")
def now(state: Serving, served: ThisModel) -> dict[str, Any]:
    """Small, to be asked often. `GET /jobs/{id}` has a job's result, `GET /models/{name}/uploads/{id}` the images."""
    jobs = [job for job in state.jobs.all() if job.model == served.name][-JOBS_SHOWN:]
    return {
        "version": served.snapshot.version,
        "jobs": [{**j.to_json(), "result": None, "preview": getattr(j.change.body, "preview", False)} for j in jobs],
        "uploads": [
            {"upload": u.id, "images": len(u.images), "revision": u.revision, "check": u.check, "used_by": u.used_by}
            for u in state.uploads.waiting(served.name)
        ],
    }


@router.get("/jobs", tags=["jobs"], response_model=list[JobAnswer])
def jobs(state: Serving) -> list[dict[str, Any]]:
    """Changes of models: those that wait, the one that runs, and the last ones that ended."""
    return [job.to_json() for job in state.jobs.all()]


@router.get("/jobs/{job}", tags=["jobs"], response_model=JobAnswer)
async def follow(request: Request, job: ThisJob, wait: Seconds = 0) -> dict[str, Any]:
    """The state and progress of a job."""
    clock = asyncio.get_running_loop().time
    until = clock() + wait
    while job.state not in ENDED and clock() < until and not await request.is_disconnected():
        await asyncio.sleep(0.05)
    return job.to_json()


@router.post("/jobs/{job}/cancel", tags=["jobs"], status_code=202, response_model=JobAnswer)
def cancel(state: Serving, job: ThisJob) -> dict[str, Any]:
    """Stop a job. The model stays as it was; a job that has just finished stays finished."""
    state.jobs.cancel(job)
    return job.to_json()

"""Models over HTTP: what they know and confuse, their files, images that wait to be taught, changes, and jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse, PlainTextResponse
from prometheus_client import generate_latest
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError
from starlette.concurrency import run_in_threadpool

from vqprompt.core.errors import UserError, explain
from vqprompt.product.model.efforts import EFFORTS, TRAINING
from vqprompt.product.model.pictures import check_spelling, clean_name
from vqprompt.product.serve.api_predict import check_image
from vqprompt.product.serve.changes import EDITS, NO_LABEL, Body, Check, Teach
from vqprompt.product.serve.errors import Conflict, NotThere, Refused, TooLarge
from vqprompt.product.serve.images import Upload, thumbnails
from vqprompt.product.serve.jobs import Job
from vqprompt.product.serve.lan import code_to_scan
from vqprompt.product.serve.models import ServedModel
from vqprompt.product.serve.state import Serving, State, ThisModel

router = APIRouter()


@router.get("/models", tags=["models"], summary="All models, and the efforts that teaching can have")
def models(state: Serving) -> dict[str, Any]:
    """passes: the most work that an effort does, as a multiple of looking once at each image."""
    return {
        "models": [
            {
                "name": m.name, "classes": len(m.snapshot.model.classes), "accuracy": m.snapshot.model.accuracy,
                "version": m.snapshot.version, "drawings": m.drawings,
            }
            for m in state.models
        ],
        "efforts": {name: {"says": says, "passes": _passes(name)} for name, says in EFFORTS.items()},
    }  # fmt: skip


def _passes(effort: str) -> float:
    training = TRAINING.get("best" if effort == "auto" else effort)
    return 1 if training is None else training.epochs * (training.passes + 1)


@router.get("/models/{name}", tags=["models"], summary="Everything about a model")
def model(served: ThisModel) -> dict[str, Any]:
    """attention: whether `POST /models/{name}/attention` can answer."""
    attention = find_spec("torch") is not None
    return {**served.snapshot.shown, "name": served.name, "drawings": served.drawings, "attention": attention}


@router.get("/models/{name}/confusion", tags=["models"], summary="Which class is taken for which")
def confusion(served: ThisModel) -> dict[str, Any]:
    """Measured by leaving out one image at a time.

    cells: [class, class it is taken for, number of images]. The classes are given by their position in `classes`; pairs
    that never occur are left out.
    """
    left_out = served.snapshot.left_out
    cells = [[a, b, n] for (a, b), n in left_out.confusion().items()]
    return {"classes": left_out.classes, "cells": cells, "tested": len(left_out.images)}


@router.get("/models/{name}/confusion/images", tags=["models"], summary="The images behind one cell of the confusion")
def confused_images(state: Serving, served: ThisModel, label: str, answer: str) -> dict[str, Any]:
    """Names for `GET /models/{name}/thumbnails/{image}`, of the images that the server still has in memory."""
    return _with_thumbnails(state, served.name, served.snapshot.left_out.images_of(label, answer))


@router.get("/models/{name}/images", tags=["models"], summary="The images that were taught as a class")
def images(state: Serving, served: ThisModel, label: str) -> dict[str, Any]:
    """Ids for `GET /models/{name}/thumbnails/{image}` and for corrections, of images that have a thumbnail. label:
    "unknown" for those that are none of the classes. total: how many were taught."""
    records = served.snapshot.model.knowledge.records
    return _with_thumbnails(state, served.name, records[label].ids.tolist() if label in records else [])


def _with_thumbnails(state: State, model: str, ids: Sequence[int]) -> dict[str, Any]:
    names = [f"{n:016x}" for n in ids]
    return {"images": [name for name in names if state.gallery.get(model, name) is not None], "total": len(ids)}


@router.get("/models/{name}/thumbnails/{image}", tags=["models"], summary="A small picture of an image it was taught")
def thumbnail(state: Serving, name: str, image: str) -> Response:
    if (picture := state.gallery.get(name, image)) is None:
        raise NotThere("there is no such thumbnail; the server keeps only the newest ones, in memory")
    return Response(picture, media_type="image/jpeg")


@router.get("/models/{name}/file", tags=["models"], summary="Download the model")
def download(served: ThisModel) -> Response:
    served.snapshot.check_taught()
    return _send_file(served.path, f"{served.name}.vqp")


@router.get("/models/{name}/onnx", tags=["models"], summary="Download the ONNX file that was made of it")
def download_onnx(served: ThisModel) -> Response:
    if served.export is None:
        raise NotThere(f"make it first: POST /models/{served.name}/onnx")
    return _send_file(*served.export)


def _send_file(path: Path, title: str) -> Response:
    if not path.is_file():
        raise NotThere(f"{title} is not there any more; try again")
    return FileResponse(path, media_type="application/octet-stream", filename=title)


@router.get("/models/{name}/card", tags=["models"], summary="Its card: what it knows, how well, and its limits")
def card(served: ThisModel) -> Response:
    from vqprompt.product.model.hub import model_card

    served.snapshot.check_taught()
    return PlainTextResponse(model_card(served.snapshot.model, repo_id=None), media_type="text/markdown")


@router.get("/metrics", tags=["metrics"], summary="Numbers for Prometheus")
def metrics(state: Serving) -> Response:
    m = state.metrics
    for served in state.models:
        snapshot = served.snapshot
        m.classes.labels(served.name).set(len(snapshot.model.classes))
        m.version.labels(served.name).set(snapshot.version)
        if snapshot.model.accuracy is not None:
            m.accuracy.labels(served.name).set(snapshot.model.accuracy)
    return Response(generate_latest(m.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/phone", tags=["state"], summary="The address for phones, and a code to scan; null without --lan")
def phone(state: Serving) -> dict[str, str | None]:
    url = state.phone_url
    return {"url": url, "code": None if url is None else code_to_scan(url)[1]}


# ---------------------------------------------------------------------------------------------- uploads


class UploadForm(BaseModel):
    """Images with their classes."""

    files: list[UploadFile] = Field(min_length=1)
    label: str = Field("", description="The class of all images.")
    labels: Json[list[str]] | None = Field(None, description="Or the class of each image, as a JSON list.")
    effort: str = "instant"
    as_unknown: bool = Field(False, description="These images are none of the classes; no label is needed.")
    preview: bool = Field(False, description="Only tell which answers would change.")

    def names(self) -> list[str]:
        """The class of each image. It is checked before anything is kept."""
        label = NO_LABEL if self.as_unknown else self.label
        names = [label] * len(self.files) if self.labels is None else self.labels
        if self.labels is None and not label.strip():
            raise Refused("which class is it? Send its name in the field label, or one name per image in labels")
        if len(names) != len(self.files):
            raise Refused(f"labels must be a JSON list of {len(self.files)} names, one per image")
        return [clean_name(name) for name in names]

    def images(self, names: list[str], most_mb: float) -> Iterator[tuple[str | None, str, bytes]]:
        for file, name in zip(self.files, names, strict=True):
            content = check_image(file.file.read())
            if len(content) > most_mb * 1e6:
                raise TooLarge(f"an image has more than {most_mb:g} MB; make it smaller")
            yield file.filename, name, content


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
FORM = {"multipart/form-data": {"schema": UploadForm.model_json_schema()}}
FORM_OR_UPLOAD = FORM | {"application/json": {"schema": Teach.model_json_schema()}}


@router.post(
    "/models/{name}/uploads", tags=["teach"], status_code=202,
    summary="Upload images and have them checked before they are taught",
    openapi_extra={"requestBody": {"required": True, "content": FORM}},
)  # fmt: skip
async def check(request: Request, state: Serving, served: ThisModel) -> dict[str, Any]:
    """The job's result has the findings: images that cannot be read, copies, doubtful ones, each with a reason."""
    upload, _ = await _receive(request, state, served)
    return {**waiting_images(upload), "job": state.submit(served, Check(), upload)}


async def _receive(request: Request, state: State, served: ServedModel) -> tuple[Upload, UploadForm]:
    """A form of images with their classes, written into the private folder. Nothing is kept there before all of it is
    here: the guard limits how much can be on its way."""
    limits = state.limits
    async with request.form(max_files=int(limits.upload_images), max_fields=10) as fields:
        try:
            form = UploadForm.model_validate({**fields, "files": fields.getlist("files")})
        except ValidationError as error:
            raise Refused(explain(error, "form")) from None
        names = form.names()
        check_spelling(served.snapshot.model.classes, names)
        images = form.images(names, limits.image_mb)
        return await run_in_threadpool(state.uploads.add, served.name, images), form


@router.get("/models/{name}/uploads/{upload}", tags=["state"], summary="The images of an upload that waits")
def waiting_images(upload: ThisUpload) -> dict[str, Any]:
    """revision: of what was decided about them."""
    listed = enumerate(upload.images)
    images = [{"name": i.where, "label": i.label, "left_out": number in upload.left_out} for number, i in listed]
    return {"upload": upload.id, "revision": upload.revision, "images": images}


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
    for _, picture in thumbnails([upload.image(number)]):
        return Response(picture, media_type="image/jpeg")
    raise NotThere("this image cannot be read, so there is no small picture of it")


@router.delete("/models/{name}/uploads/{upload}", tags=["teach"], status_code=204, summary="Delete an upload")
def delete_upload(state: Serving, upload: ThisUpload) -> None:
    state.uploads.delete(upload)


# ---------------------------------------------------------------------------------------------- changes


@router.post(
    "/models/{name}/teach", tags=["teach"], status_code=202,
    summary="Teach images: of an upload, or sent along",
    openapi_extra={"requestBody": {"required": True, "content": FORM_OR_UPLOAD}},
)  # fmt: skip
async def teach(request: Request, state: Serving, served: ThisModel) -> Job:
    """With a form, all images that can be read are taught. With an upload, all except those in `leave_out`."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        upload, form = await _receive(request, state, served)
        asked = Teach(upload=upload.id, effort=form.effort, as_unknown=form.as_unknown, preview=form.preview)
    else:
        try:
            asked = Teach.model_validate_json(await request.body())
        except ValidationError as error:
            raise UserError(explain(error, "teach")) from None
        upload = state.uploads.get(asked.upload, served.name)
        if upload.in_use:
            raise Conflict("another job is already using this upload; wait until it has ended")
    return state.submit(served, asked, upload)


def _edit(schema: type[Body]) -> Callable[..., Any]:
    """The endpoint of a change that a JSON body describes."""

    def endpoint(state: Serving, served: ThisModel, body: Body) -> Job:
        return state.submit(served, body)

    endpoint.__annotations__["body"] = schema
    return endpoint


for name, edit in EDITS.items():
    router.post(
        f"/models/{{name}}/{name}", tags=["change"], status_code=202,
        summary=name.capitalize(), description=edit.__doc__,
    )(_edit(edit))  # fmt: skip


# ---------------------------------------------------------------------------------------------- jobs


@router.get("/models/{name}/state", tags=["state"], summary="What changes all the time: jobs, uploads, the version")
def now(state: Serving, served: ThisModel) -> dict[str, Any]:
    """Small, to be asked often. `GET /jobs/{id}` has a job's result, `GET /models/{name}/uploads/{id}` the images."""
    jobs = [job for job in state.jobs.all() if job.model == served.name][-20:]
    return {
        "version": served.snapshot.version,
        "jobs": [job.model_dump(exclude={"result"}) for job in jobs],
        "uploads": [
            {"upload": u.id, "images": len(u.images), "revision": u.revision, "check": u.check, "used_by": u.used_by}
            for u in state.uploads.waiting(served.name)
        ],
    }


@router.get("/jobs", tags=["jobs"])
def jobs(state: Serving) -> list[Job]:
    """Changes of models: those that wait, the one that runs, and the last ones that ended."""
    return state.jobs.all()


@router.get("/jobs/{job}", tags=["jobs"])
async def follow(request: Request, job: ThisJob, wait: Annotated[float, Query(ge=0, le=60)] = 0) -> Job:
    """The state and progress of a job. wait: seconds to wait until it has ended."""
    clock = asyncio.get_running_loop().time
    until = clock() + wait
    while job.is_active and clock() < until and not await request.is_disconnected():
        await asyncio.sleep(0.05)
    return job


@router.post("/jobs/{job}/cancel", tags=["jobs"], status_code=202)
def cancel(state: Serving, job: ThisJob) -> Job:
    """Stop a job. The model stays as it was; a job that has just finished stays finished."""
    state.jobs.cancel(job)
    return job

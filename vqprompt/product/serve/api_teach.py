"""Teaching over HTTP: upload, check, teach; and the other changes of a model. Each is a job."""

from __future__ import annotations

import json
import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from vqprompt.core.errors import UserError, explain
from vqprompt.core.words import counted
from vqprompt.product.model.efforts import check_effort
from vqprompt.product.model.pictures import check_spelling, clean_name
from vqprompt.product.serve.api_models import find, model, must_know_something, state_of
from vqprompt.product.serve.api_predict import check_image
from vqprompt.product.serve.errors import Conflict, NotThere, Refused, TooLarge
from vqprompt.product.serve.models import Served
from vqprompt.product.serve.schemas import Export, Forget, JobAnswer, Rename, Return, Teach, Undo, UploadAnswer
from vqprompt.product.serve.teacher import Report
from vqprompt.product.serve.uploads import Upload

router = APIRouter()
post_change = partial(router.post, tags=["change"], status_code=202, response_model=JobAnswer)

UPLOAD_FORM = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "label": {"type": "string", "description": "The class of all images."},
        "labels": {"type": "string", "description": "Or the class of each image, as a JSON list."},
        "effort": {"type": "string", "default": "instant"},
    },
}
UPLOAD_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD_FORM}}}}
TEACH_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": UPLOAD_FORM},
            "application/json": {"schema": Teach.model_json_schema()},
        },
    }
}


@router.post(
    "/models/{name}/uploads",
    tags=["teach"],
    status_code=202,
    response_model=UploadAnswer,
    openapi_extra=UPLOAD_BODY,
    summary="Upload images and have them checked before they are taught",
)
async def upload(request: Request, name: str) -> dict[str, Any]:
    """The job's result has the findings: images that cannot be read, copies, doubtful ones, each with a reason."""
    served, state = find(request, name), state_of(request)
    received, _ = await _receive(request, served)
    try:
        job = state.check(served, received)
    except UserError:
        state.uploads.drop(received)
        raise
    images = [{"name": n, "label": label} for n, label in zip(received.names, received.labels, strict=True)]
    return {"upload": received.id, "images": images, "job": job.as_dict()}


@router.delete("/models/{name}/uploads/{upload}", tags=["teach"], status_code=204, summary="Delete an upload")
def give_up(request: Request, name: str, upload: str) -> None:
    state = state_of(request)
    found = state.uploads.get(upload, name)
    if found.used:
        raise Conflict("a job is using this upload; cancel the job first")
    state.uploads.drop(found)


@router.post(
    "/models/{name}/teach",
    tags=["teach"],
    status_code=202,
    response_model=JobAnswer,
    openapi_extra=TEACH_BODY,
    summary="Teach images: of an upload, or sent along",
)
async def teach(request: Request, name: str) -> dict[str, Any]:
    """With a form, all images that can be read are taught. With an upload, all except those in `leave_out`."""
    served, state = find(request, name), state_of(request)
    if request.headers.get("content-type", "").startswith("multipart/"):
        received, effort = await _receive(request, served)
        check_effort(effort)
        try:
            return state.teach(served, received, [], effort, keep=False).as_dict()
        except UserError:
            state.uploads.drop(received)
            raise
    try:
        asked = Teach.model_validate_json(await request.body())
    except ValidationError as error:
        raise UserError(explain(error, "teach")) from None
    check_effort(asked.effort)
    found = state.uploads.get(asked.upload, name)
    if found.used:
        raise Conflict("another job is already using this upload; wait until it has ended")
    return state.teach(served, found, asked.leave_out, asked.effort, keep=True).as_dict()


async def _receive(request: Request, served: Served) -> tuple[Upload, str]:
    """A form of images with their classes, written into the private folder; and the effort it asks for."""
    state = state_of(request)
    most = int(state.limits.upload_images)
    received = state.uploads.new(served.name)
    try:
        async with request.form(max_files=most, max_fields=10) as form:
            files = [f for f in form.getlist("files") if isinstance(f, UploadFile)]
            labels = _labels(form.get("label"), form.get("labels"), len(files))
            check_spelling(served.snapshot.model.classes, labels)
            for file, label in zip(files, labels, strict=True):
                content = check_image(await file.read())
                if len(content) > state.limits.image_mb * 1e6:
                    raise TooLarge(f"an image has more than {state.limits.image_mb:g} MB; make it smaller")
                await run_in_threadpool(received.add, file.filename, label, content)
            return received, str(form.get("effort") or "instant")
    except HTTPException as error:  # a form that cannot be read, or with too much in it
        state.uploads.drop(received)
        raise Refused(f"{error.detail} (at most {most} images per upload)") from None
    except BaseException:
        state.uploads.drop(received)
        raise


def _labels(label: Any, labels: Any, count: int) -> list[str]:
    if not count:
        raise Refused("the form has no image; send images in fields called files")
    if isinstance(labels, str):
        try:
            found = json.loads(labels)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or len(found) != count or not all(isinstance(name, str) for name in found):
            raise Refused(f"labels must be a JSON list of {count} names, one per image")
        return [clean_name(name) for name in found]
    if not isinstance(label, str) or not label.strip():
        raise Refused("which class is it? Send its name in the field label, or one name per image in labels")
    return [clean_name(label)] * count


# ---------------------------------------------------------------------------------------------- change


@post_change("/models/{name}/undo")
def undo(request: Request, name: str, body: Undo) -> dict[str, Any]:
    """Go back to the model before the last change, or before several."""
    served = find(request, name)
    if body.steps > (possible := model(request, name)["can_undo"]):
        raise Conflict(f"{counted(possible, 'change')} can be undone, not {body.steps}")
    return state_of(request).change(served, "undo", steps=body.steps).as_dict()


@post_change("/models/{name}/rename")
def rename(request: Request, name: str, body: Rename) -> dict[str, Any]:
    """Give a class another name."""
    state, served, new = state_of(request), find(request, name), clean_name(body.new)
    _known(served, body.old)
    check_spelling([c for c in served.snapshot.model.classes if c != body.old], [new])
    return state.change(
        served, "rename",
        lambda report: state.gallery.rename(name, body.old, new) if report.state == "done" else None,
        old=body.old, new=new,
    ).as_dict()  # fmt: skip


@post_change("/models/{name}/forget")
def forget(request: Request, name: str, body: Forget) -> dict[str, Any]:
    """Remove a class, as if it had never been taught."""
    state, served = state_of(request), find(request, name)
    _known(served, body.name)
    return state.change(
        served, "forget",
        lambda report: state.gallery.forget(name, body.name) if report.state == "done" else None,
        name=body.name, for_good=body.for_good,
    ).as_dict()  # fmt: skip


@post_change("/models/{name}/return")
def return_to(request: Request, name: str, body: Return) -> dict[str, Any]:
    """Return to an older version. The current one is kept as well."""
    served = find(request, name)
    if body.version not in served.versions.numbers():
        older = served.versions.numbers()
        raise NotThere(f"there is no older version {body.version}; the older versions are {older or 'none'}")
    return state_of(request).change(served, "return", version=body.version).as_dict()


def _known(served: Served, name: str) -> None:
    if name not in served.snapshot.model.classes:
        raise NotThere(f"the model knows no class {name[:100]!r}")


@post_change("/models/{name}/onnx")
def export(request: Request, name: str, body: Export) -> dict[str, Any]:
    """Make the model's ONNX file; `GET /models/{name}/onnx` downloads it when the job is done."""
    state, served = state_of(request), find(request, name)
    must_know_something(served)
    version, target = served.snapshot.version, state.folder / f"{secrets.token_hex(8)}.onnx"

    def ready(report: Report) -> None:
        if report.state == "done":
            before = state.exports.get(name)
            state.exports[name] = (version, body.int8, target)
            if before is not None:
                before[2].unlink(missing_ok=True)

    return state.change(served, "onnx", ready, target=target, int8=body.int8).as_dict()


@router.get("/models/{name}/onnx", tags=["models"], summary="Download the ONNX file that was made last")
def download_onnx(request: Request, name: str) -> Response:
    served = find(request, name)
    made = state_of(request).exports.get(name)
    if made is None:
        raise NotThere(f"make it first: POST /models/{served.name}/onnx")
    version, int8, path = made
    title = f"{served.name}-{version}{'-int8' if int8 else ''}.onnx"
    return FileResponse(path, media_type="application/octet-stream", filename=title)

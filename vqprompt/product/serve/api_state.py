"""What all open pages show alike: jobs, uploads that wait with what people decided about their images, the version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from vqprompt.product.model.pictures import check_spelling, clean_name
from vqprompt.product.serve.api_models import find, state_of
from vqprompt.product.serve.errors import NotThere
from vqprompt.product.serve.gallery import thumbnails
from vqprompt.product.serve.lan import code_to_scan

router = APIRouter(tags=["state"])
JOBS_SHOWN = 20


class Decision(BaseModel):
    """What to do with some images of an upload. What is not given stays as it is."""

    model_config = ConfigDict(extra="forbid")
    images: list[int] = Field(description="Their numbers in the upload, from 0.")
    label: str | None = Field(None, description="Move them to this class.")
    left_out: bool | None = Field(None, description="Whether they are not to be taught.")


@router.get("/models/{name}/state", summary="What changes all the time: jobs, uploads that wait, the version")
def now(request: Request, name: str) -> dict[str, Any]:
    """Small, to be asked often. `GET /jobs/{id}` has a job's result, `GET /models/{name}/uploads/{id}` the images."""
    served, state = find(request, name), state_of(request)
    jobs = [job for job in state.jobs.all() if job.model == name][-JOBS_SHOWN:]
    return {
        "version": served.snapshot.version,
        "jobs": [{**j.to_json(), "result": None, "preview": getattr(j.change.body, "preview", False)} for j in jobs],
        "uploads": [
            {"upload": u.id, "images": len(u.images), "revision": u.revision, "check": u.check, "used_by": u.used_by}
            for u in state.uploads.waiting(name)
        ],
    }


@router.get("/models/{name}/uploads/{upload}", summary="The images of an upload that waits")
def upload(request: Request, name: str, upload: str) -> dict[str, Any]:
    held = state_of(request).uploads.get(upload, name)
    return {
        "revision": held.revision,
        "images": [
            {"name": image.name, "label": image.label, "left_out": number in held.left_out}
            for number, image in enumerate(held.images)
        ],
    }


@router.patch("/models/{name}/uploads/{upload}", summary="Move images of an upload to another class, or leave them out")
def decide(request: Request, name: str, upload: str, decision: Decision) -> dict[str, Any]:
    served, held = find(request, name), state_of(request).uploads.get(upload, name)
    label = None if decision.label is None else clean_name(decision.label)
    if label is not None:
        check_spelling(served.snapshot.model.classes, [label])
    held.decide(decision.images, label, decision.left_out)
    return {"revision": held.revision}


@router.get("/models/{name}/uploads/{upload}/images/{number}", summary="A small picture of an image that waits")
def waiting_image(request: Request, name: str, upload: str, number: int) -> Response:
    images = state_of(request).uploads.get(upload, name).images
    if not 0 <= number < len(images):
        raise NotThere(f"the upload has no image {number}; it has {len(images)}, counted from 0")
    for _, picture in thumbnails([(images[number].name, images[number].read)]):
        return Response(picture, media_type="image/jpeg")
    raise NotThere("this image cannot be read, so there is no small picture of it")


@router.get("/phone", summary="The address for phones on the same network, and a code to scan; null without --lan")
def phone(request: Request) -> dict[str, str | None]:
    url = state_of(request).phone_url
    return {"url": url, "code": None if url is None else code_to_scan(url)[1]}

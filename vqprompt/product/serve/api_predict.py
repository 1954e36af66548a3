"""Predictions over HTTP: an image in, its classes out."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile

from vqprompt.product.model.answers import Answer
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.serve.batching import Given
from vqprompt.product.serve.errors import NotAnImage, Refused
from vqprompt.product.serve.models import Snapshot
from vqprompt.product.serve.state import Serving, State, ThisModel

router = APIRouter(tags=["predict"])
MOST_TOP = 1000
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "required": ["file"], "properties": {"file": FILE}}
CONTENT = {"image/*": {"schema": FILE}, "multipart/form-data": {"schema": FORM}}
IMAGE_BODY = {"requestBody": {"required": True, "content": CONTENT}}


class Share(BaseModel):
    name: str
    probability: float


class Prediction(BaseModel):
    """What is in an image. name: the best class, or "unknown". familiarity: below 0 is unknown."""

    name: str
    unknown: bool
    classes: list[Share]
    familiarity: float | None
    note: str = Field(description="Words to show instead of percentages, where too few images were taught.")
    model: str
    version: int


Top = Annotated[int, Query(ge=1, le=MOST_TOP, description="How many classes to name.")]
Strictness = Annotated[float, Query(ge=-100, le=100, description="Above 0, more is called unknown; below 0, less.")]


@router.post("/models/{name}/predict", summary="What is in an image", openapi_extra=IMAGE_BODY)
async def predict(
    request: Request, state: Serving, served: ThisModel, top: Top = 5, strictness: Strictness = 0.0
) -> Prediction:
    """The image is the body of the request, or the field `file` of a form."""
    image, snapshot = await _image_of(request), served.snapshot
    (told,) = await answer(state, snapshot, [image], top, strictness)
    unknown = told.familiarity < strictness
    return Prediction(
        name=UNKNOWN if unknown else told.classes[0][0],
        unknown=unknown,
        classes=[Share(name=name, probability=share) for name, share in told.classes[:top]],
        familiarity=told.familiarity if math.isfinite(told.familiarity) else None,
        note=told.note,
        model=snapshot.name,
        version=snapshot.version,
    )


@router.post("/predict", summary="What is in an image", openapi_extra=IMAGE_BODY)
async def predict_with(
    request: Request, state: Serving, model: str | None = None, top: Top = 5, strictness: Strictness = 0.0
) -> Prediction:
    """The same. model: required if there are several."""
    return await predict(request, state, state.models.get(model), top, strictness)


async def answer(
    state: State, snapshot: Snapshot, images: list[Given], top: int, strictness: float = 0.0
) -> list[Answer]:
    """One answer per image, which the metrics count."""
    with state.metrics.seconds.time():
        answers = await state.batcher.ask(snapshot, images, top)
    for told in answers:
        state.metrics.predictions.labels(snapshot.name, "unknown" if told.familiarity < strictness else "known").inc()
    return answers


async def _image_of(request: Request) -> bytes:
    if not request.headers.get("content-type", "").startswith("multipart/"):
        return check_image(await request.body())
    async with request.form(max_files=1, max_fields=10) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refused("the form has no file; send the image in a field called file")
        return check_image(await file.read())


def check_image(content: bytes) -> bytes:
    if not content:
        raise NotAnImage("the image is empty; send its file as the body, or in the field file of a form")
    if content[:4] == b"PK\x03\x04":
        raise NotAnImage("this is a zip archive; unpack it and send the images")
    return content

"""Predictions over HTTP: an image in, its classes out."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile

from vqprompt.product.model.answers import Answer
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.serve.api_models import find, state_of
from vqprompt.product.serve.errors import NotAnImage, Refused
from vqprompt.product.serve.models import ServedModel, Snapshot

router = APIRouter(tags=["predict"])
MOST_TOP = 1000
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
        },
    }
}


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


@router.post("/predict", summary="What is in an image", response_model=Prediction, openapi_extra=IMAGE_BODY)
async def predict(request: Request, model: str | None = None, top: Top = 5, strictness: Strictness = 0.0) -> Response:
    """The image is the body of the request, or the field `file` of a form. model: required if there are several."""
    return await _predict(request, find(request, model), top, strictness)


@router.post(
    "/models/{name}/predict", summary="What is in an image", response_model=Prediction, openapi_extra=IMAGE_BODY
)
async def predict_with(request: Request, name: str, top: Top = 5, strictness: Strictness = 0.0) -> Response:
    """The image is the body of the request, or the field `file` of a form."""
    return await _predict(request, find(request, name), top, strictness)


async def _predict(request: Request, served: ServedModel, top: int, strictness: float) -> Response:
    content = await _image_of(request)
    state, snapshot = state_of(request), served.snapshot
    with state.metrics.seconds.time():
        (answer,) = await state.batcher.ask(snapshot, [content], top)
    prediction = as_prediction(answer, snapshot, strictness)
    state.metrics.predictions.labels(served.name, "unknown" if prediction["unknown"] else "known").inc()
    return JSONResponse({**prediction, "classes": prediction["classes"][:top]})


def as_prediction(answer: Answer, snapshot: Snapshot, strictness: float = 0.0) -> dict[str, Any]:
    unknown = answer.familiarity < strictness
    return {
        "name": UNKNOWN if unknown else answer.classes[0][0],
        "unknown": unknown,
        "classes": [{"name": name, "probability": share} for name, share in answer.classes],
        "familiarity": answer.familiarity if math.isfinite(answer.familiarity) else None,
        "note": answer.note,
        "model": snapshot.name,
        "version": snapshot.version,
    }


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

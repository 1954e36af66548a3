"""Predictions over HTTP: an image in, its classes out.

Also by the Open Inference Protocol (version 2), which clients of KServe, Triton and others speak. There is one input,
`image`: image files as BYTES [n], or pixels as UINT8 [n, height, width, 3]. In JSON, a file is a string in base64.
Tensors may also follow the JSON in binary, as Triton's clients send them. Outputs: the `class` of each image (or
"unknown"), its `probability`, the `probabilities` of all classes in the order of the model's metadata, and
`familiarity`, which is below 0 for what is unknown.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from vqprompt._version import __version__
from vqprompt.core.errors import explain
from vqprompt.core.words import counted
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.model.predicting import Answer
from vqprompt.product.serve.batching import Given
from vqprompt.product.serve.errors import NotAnImage, Refused, TooLarge
from vqprompt.product.serve.models import Snapshot
from vqprompt.product.serve.state import Serving, State, ThisModel

router = APIRouter(tags=["predict"])
protocol = APIRouter(prefix="/v2", tags=["open inference protocol"])
MOST_TOP = 1000
LENGTH = "inference-header-content-length"
MOST_IMAGES = 256  # per request
MOST_VALUES, MOST_LISTS = 500_000, 100_000  # in the JSON of a request: no other thread works while it is read
OUTPUTS = {"class": "BYTES", "probability": "FP32", "probabilities": "FP32", "familiarity": "FP32"}
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


# ---------------------------------------------------------------------------------------------- the protocol


@protocol.get("/health/live", summary="Whether the server runs")
async def live() -> dict[str, bool]:
    return {"live": True}


@protocol.get("/health/ready", summary="Whether it can answer")
async def ready(state: Serving) -> Response:
    return JSONResponse({"ready": not state.closing}, status_code=503 if state.closing else 200)


@protocol.get("", summary="About the server")
def server() -> dict[str, Any]:
    return {"name": "vqprompt", "version": __version__, "extensions": ["binary_tensor_data"]}


class Parameters(BaseModel):
    binary_data: bool | None = None
    binary_data_output: bool = False
    binary_data_size: int | None = None


class Output(BaseModel):
    name: Literal["class", "probability", "probabilities", "familiarity"]
    parameters: Parameters = Parameters()


class Input(BaseModel):
    name: Literal["image"]
    datatype: Literal["BYTES", "UINT8"]
    shape: list[Annotated[int, Field(strict=True, gt=0, lt=1 << 24)]] = Field(min_length=1, max_length=4)
    data: list[Any] | None = None
    parameters: Parameters = Parameters()


class Asked(BaseModel):
    """A request. Fields of the protocol that are not here are ignored."""

    id: str | None = None
    inputs: list[Input] = Field(min_length=1, max_length=1)
    outputs: Annotated[list[Output], Field(max_length=16)] | None = None
    parameters: Parameters = Parameters()

    def wanted(self) -> dict[str, bool]:
        """The outputs to send, and whether each is sent in binary."""
        binary = self.parameters.binary_data_output
        if not self.outputs:
            return dict.fromkeys(OUTPUTS, binary)
        own = {output.name: output.parameters.binary_data for output in self.outputs}
        return {name: binary if told is None else told for name, told in own.items()}


async def _snapshot(served: ThisModel, version: str | None = None) -> Snapshot:
    return served.snapshot if version is None else await run_in_threadpool(served.at, version)


ThisVersion = Annotated[Snapshot, Depends(_snapshot)]


@protocol.get("/models/{name}", summary="About a model: inputs, outputs, versions, classes")
@protocol.get("/models/{name}/versions/{version}", include_in_schema=False)
def metadata(served: ThisModel, snapshot: ThisVersion) -> dict[str, Any]:
    shapes = {"probabilities": [-1, len(snapshot.model.classes)]}
    return {
        "name": served.name,
        "versions": [str(n) for n in served.versions],
        "platform": "vqprompt",
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": n, "datatype": kind, "shape": shapes.get(n, [-1])} for n, kind in OUTPUTS.items()],
        "parameters": {"classes": list(snapshot.model.classes)},
    }


@protocol.get("/models/{name}/ready", summary="Whether a model has learned something")
@protocol.get("/models/{name}/versions/{version}/ready", include_in_schema=False)
def model_ready(snapshot: ThisVersion) -> Response:
    taught = bool(snapshot.model.classes)
    return JSONResponse({"name": snapshot.name, "ready": taught}, status_code=200 if taught else 400)


@protocol.post("/models/{name}/infer", summary="The classes of images")
@protocol.post("/models/{name}/versions/{version}/infer", include_in_schema=False)
async def infer(request: Request, state: Serving, snapshot: ThisVersion) -> Response:
    body = await request.body()
    async with state.parsing:  # one at a time, so that others are answered in between
        asked, images = await run_in_threadpool(_parse, body, request.headers.get(LENGTH))
    classes = snapshot.model.classes
    answers = await answer(state, snapshot, images, max(len(classes), 1))
    place = {c: number for number, c in enumerate(classes)}
    shares = np.zeros((len(answers), len(classes)), np.float32)
    for row, told in zip(shares, answers, strict=True):
        row[[place[c] for c, _ in told.classes]] = [share for _, share in told.classes]
    values: dict[str, Any] = {
        "class": [a.name for a in answers],
        "probability": np.array([a.classes[0][1] for a in answers], np.float32),
        "probabilities": shares,
        "familiarity": np.clip(np.array([a.familiarity for a in answers]), -1e30, 1e30).astype(np.float32),
    }
    head = {"model_name": snapshot.name, "model_version": str(snapshot.version)}
    return _reply(head if asked.id is None else {**head, "id": asked.id}, values, asked.wanted())


def _parse(body: bytes, length: str | None) -> tuple[Asked, list[Given]]:
    """A request and the images in it."""
    end = len(body)
    if length is not None and (not length.isdecimal() or len(length) > 12 or (end := int(length)) > len(body)):
        raise Refused(f"{LENGTH} must be the length of the JSON in bytes, not {length[:20]!r}")
    if body.count(b",", 0, end) > MOST_VALUES or body.count(b"[", 0, end) + body.count(b"{", 0, end) > MOST_LISTS:
        raise TooLarge(f"the JSON has more than {MOST_VALUES} values or {MOST_LISTS} lists; send pixels in binary")
    try:
        asked = Asked.model_validate_json(body[:end])
    except ValidationError as error:
        raise Refused(explain(error, "the request")[:1000]) from None
    return asked, _images(asked.inputs[0], body[end:])


def _images(given: Input, tensors: bytes) -> list[Given]:
    shape, size = given.shape, given.parameters.binary_data_size
    if size is not None and size != len(tensors):
        raise Refused(f"binary_data_size says {size}, and {len(tensors)} bytes follow the JSON")
    if given.datatype == "UINT8":
        images = _pixels(given.data if size is None else tensors, shape)
    else:
        images = _files(given.data) if size is None else _binary_files(tensors)
        shape = [math.prod(shape)]
    count = 1 if len(shape) == 3 else shape[0]
    if len(images) != count or not 0 < count <= MOST_IMAGES:
        there = counted(len(images), "image")
        raise Refused(f"the shape {shape} does not fit the {there} in data (at most {MOST_IMAGES} per request)")
    return images


def _files(data: list[Any] | None) -> list[Given]:
    try:
        return [check_image(base64.b64decode(text, validate=True)) for text in data or ()]
    except (TypeError, ValueError):
        raise Refused("data must be a list of image files, each as a string in base64") from None


def _binary_files(tensors: bytes) -> list[Given]:
    """Each file is preceded by its length in four bytes."""
    images, rest = list[Given](), io.BytesIO(tensors)
    while length := rest.read(4):
        content = rest.read(int.from_bytes(length, "little"))
        if len(length) < 4 or len(content) < int.from_bytes(length, "little"):
            raise Refused("the binary tensor ends in the middle of an image, or of its length")
        images.append(check_image(content))
    return images


def _pixels(data: list[Any] | bytes | None, shape: list[int]) -> list[Given]:
    if len(shape) not in (3, 4) or shape[-1] != 3:
        raise Refused("give image files (BYTES [n]) or pixels (UINT8 [n, height, width, 3])")
    try:
        pixels = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
        if pixels.dtype.kind not in "iu" or pixels.min(initial=0) < 0 or pixels.max(initial=0) > 255:
            raise ValueError
        pixels = pixels.astype(np.uint8).reshape(shape)
    except (ValueError, TypeError, OverflowError):
        raise Refused(f"data must be whole numbers from 0 to 255 of the shape {shape}") from None
    return list(pixels) if pixels.ndim == 4 else [pixels]


def _reply(head: dict[str, Any], values: dict[str, Any], wanted: dict[str, bool]) -> Response:
    outputs, tensors = [], []
    for name, binary in wanted.items():
        value = values[name]
        shape = [len(value)] if isinstance(value, list) else list(value.shape)
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": shape}
        if binary:
            packed = _pack(value)
            output["parameters"] = {"binary_data_size": len(packed)}
            tensors.append(packed)
        else:
            output["data"] = value if isinstance(value, list) else value.reshape(-1).tolist()
        outputs.append(output)
    text = json.dumps({**head, "outputs": outputs}, ensure_ascii=False).encode()
    if not tensors:
        return Response(text, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(b"".join([text, *tensors]), media_type="application/octet-stream", headers=headers)


def _pack(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.astype("<f4").tobytes()
    encoded = [text.encode() for text in value]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)

"""Predictions over HTTP: an image in, its classes out.

Also by the Open Inference Protocol (version 2), which clients of KServe, Triton and others speak. There is one input,
`image`: image files as BYTES [n], or pixels as UINT8 [n, height, width, 3]. In JSON, a file is a string in base64.
Tensors may also follow the JSON in binary, as Triton's clients send them. Outputs: the `class` of each image (or
"unknown"), the `probability` of the best one, the `probabilities` of all classes in the order of the model's metadata,
`familiarity`, which is below 0 for what is unknown, and a `note` (see `Prediction`): these numbers cannot be null.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from dataclasses import replace
from importlib.util import find_spec
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
from vqprompt.product.model.model import Model
from vqprompt.product.model.pictures import UNKNOWN, Picture
from vqprompt.product.serve.batching import Given
from vqprompt.product.serve.errors import Conflict, NotAnImage, Refused, TooLarge
from vqprompt.product.serve.models import Snapshot
from vqprompt.product.serve.state import Serving, ThisModel

router = APIRouter(tags=["predict"])
protocol = APIRouter(prefix="/v2", tags=["open inference protocol"])
LENGTH = "inference-header-content-length"
MOST_IMAGES = 256  # per request
MOST_VALUES, MOST_LISTS = 500_000, 100_000  # in the JSON of a request: no other thread works while it is read
OUTPUTS = {"class": "BYTES", "probability": "FP32", "probabilities": "FP32", "familiarity": "FP32", "note": "BYTES"}
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "required": ["file"], "properties": {"file": FILE}}
CONTENT = {"image/*": {"schema": FILE}, "multipart/form-data": {"schema": FORM}}
IMAGE_BODY = {"requestBody": {"required": True, "content": CONTENT}}


class Share(BaseModel):
    name: str
    probability: float | None = Field(description="Null if the image is unknown, or if there is a note.")


class Prediction(BaseModel):
    """What is in an image. name: the best class, or "unknown". familiarity: below 0 is unknown."""

    name: str
    unknown: bool
    classes: list[Share]
    familiarity: float | None
    note: str = Field(description="Words to show instead of percentages, where too few images were taught.")
    model: str
    version: int


Top = Annotated[int, Query(ge=1, le=1000, description="How many classes to name.")]
Strictness = Annotated[float, Query(ge=-100, le=100, description="Above 0, more is called unknown; below 0, less.")]


@router.post("/models/{name}/predict", summary="What is in an image", openapi_extra=IMAGE_BODY)
async def predict(
    request: Request, state: Serving, served: ThisModel, top: Top = 5, strictness: Strictness = 0.0
) -> Prediction:
    """The image is the body of the request, or the field `file` of a form."""
    image, snapshot = await _image_of(request), served.snapshot
    (told,) = await state.batcher.ask(snapshot, [image], top, strictness)
    unknown = told.familiarity < strictness
    told = replace(told, name=UNKNOWN if unknown else told.classes[0][0], classes=told.classes[:top])
    shares = [Share(name=name, probability=share) for name, share in told.shares.items()]
    familiarity = told.familiarity if math.isfinite(told.familiarity) else None
    return Prediction(
        name=told.name, unknown=unknown, classes=shares, familiarity=familiarity, note=told.note, model=snapshot.name,
        version=snapshot.version,
    )  # fmt: skip


@router.post("/predict", summary="What is in an image", openapi_extra=IMAGE_BODY)
async def predict_with(
    request: Request, state: Serving, model: str | None = None, top: Top = 5, strictness: Strictness = 0.0
) -> Prediction:
    """The same. model: required if there are several."""
    return await predict(request, state, state.models.get(model), top, strictness)


@router.post("/models/{name}/attention", summary="Where the network looks in an image", openapi_extra=IMAGE_BODY)
async def attention(request: Request, state: Serving, served: ThisModel) -> dict[str, Any]:
    """Shares of the attention of the class token in the last block. patches: of parts of the image, row by row. prompt:
    of prompts that were trained (effort good). box: the part of the image that the network sees (left, top, right and
    bottom, as fractions). Needs PyTorch on the server (see `attention` in `GET /models/{name}`)."""
    image, model = await _image_of(request), served.snapshot.model
    if find_spec("torch") is None:
        raise Conflict("this needs PyTorch on the server: pip install 'vqprompt[train]'")
    async with state.attending:  # one at a time, so that predictions are answered in between
        return await run_in_threadpool(_attention, model, image)


def _attention(model: Model, image: bytes) -> dict[str, Any]:
    from vqprompt.product.model.features import attention  # slow to import

    patches, prompt, box = attention(model.network, Picture("image 1", "", lambda: image))
    return {"patches": patches, "prompt": prompt, "box": box}


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
    name: Literal["class", "probability", "probabilities", "familiarity", "note"]
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
    return served.snapshot if version is None else await run_in_threadpool(served.snapshot.at, version)


ThisVersion = Annotated[Snapshot, Depends(_snapshot)]


@protocol.get("/models/{name}", summary="About a model: inputs, outputs, versions, classes")
@protocol.get("/models/{name}/versions/{version}", include_in_schema=False)
def metadata(served: ThisModel, snapshot: ThisVersion) -> dict[str, Any]:
    shapes = {"probabilities": [-1, len(snapshot.model.classes)]}
    return {
        "name": served.name,
        "versions": [str(n) for n in served.snapshot.versions],
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
    answers = await state.batcher.ask(snapshot, images, max(len(classes), 1))
    place = {c: number for number, c in enumerate(classes)}
    shares = np.zeros((len(answers), len(classes)), np.float32)
    for row, told in zip(shares, answers, strict=True):
        row[[place[c] for c, _ in told.classes]] = [share for _, share in told.classes]
    values = {
        "class": np.array([a.name for a in answers], object),
        "probability": np.array([a.classes[0][1] for a in answers], np.float32),
        "probabilities": shares,
        "familiarity": np.clip(np.array([a.familiarity for a in answers]), -1e30, 1e30).astype(np.float32),
        "note": np.array([a.note for a in answers], object),
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
    shape, size, pixels = given.shape, given.parameters.binary_data_size, given.datatype == "UINT8"
    if size is not None and size != len(tensors):
        raise Refused(f"binary_data_size says {size}, and {len(tensors)} bytes follow the JSON")
    try:
        if pixels:
            images = _pixels(np.asarray(given.data) if size is None else np.frombuffer(tensors, np.uint8), shape)
        elif size is None:
            images = [check_image(base64.b64decode(text, validate=True)) for text in given.data or ()]
        else:
            images = _files(io.BytesIO(tensors))
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            "give image files (BYTES [n]; in JSON each is a string in base64), or pixels: whole numbers from 0 to 255 "
            "(UINT8 [n, height, width, 3])"
        ) from None
    count = math.prod(shape[:-3] if pixels else shape)
    if len(images) != count or count > MOST_IMAGES:
        there = counted(len(images), "image")
        raise Refused(f"the shape {shape} does not fit the {there} in data (at most {MOST_IMAGES} per request)")
    return images


def _pixels(values: np.ndarray, shape: list[int]) -> list[Given]:
    in_range = values.dtype.kind in "iu" and values.min(initial=0) >= 0 and values.max(initial=0) <= 255
    if not in_range or len(shape) not in (3, 4) or shape[-1] != 3:
        raise ValueError
    return list(values.astype(np.uint8).reshape(-1, *shape[-3:]))


def _files(tensors: io.BytesIO) -> list[Given]:
    """Each file is preceded by its length in four bytes."""
    images = list[Given]()
    while length := tensors.read(4):
        content = tensors.read(int.from_bytes(length, "little"))
        if len(length) < 4 or len(content) < int.from_bytes(length, "little"):
            raise Refused("the binary tensor ends in the middle of an image, or of its length")
        images.append(check_image(content))
    return images


def _reply(head: dict[str, Any], values: dict[str, np.ndarray], wanted: dict[str, bool]) -> Response:
    outputs, tensors = [], []
    for name, binary in wanted.items():
        value = values[name]
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": value.shape}
        if binary:
            if value.dtype == object:
                packed = b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, value))
            else:
                packed = value.astype("<f4").tobytes()
            output["parameters"] = {"binary_data_size": len(packed)}
            tensors.append(packed)
        else:
            output["data"] = value.reshape(-1).tolist()
        outputs.append(output)
    text = json.dumps({**head, "outputs": outputs}, ensure_ascii=False).encode()
    if not tensors:
        return Response(text, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(b"".join([text, *tensors]), media_type="application/octet-stream", headers=headers)

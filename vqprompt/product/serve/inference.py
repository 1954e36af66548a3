"""The Open Inference Protocol (version 2), which clients of KServe, Triton and others speak.

One input, `image`: image files as BYTES [n], or pixels as UINT8 [n, height, width, 3]. In JSON, a file is a string in
base64. Tensors may also follow the JSON in binary, as Triton's clients send them. Outputs: the `class` of each image
(or "unknown"), its `probability`, the `probabilities` of all classes in the order of the model's metadata, and
`familiarity`, which is below 0 for what is unknown.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from vqprompt._version import __version__
from vqprompt.core.words import counted
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.product.serve.api_models import find, state_of
from vqprompt.product.serve.api_predict import check_image
from vqprompt.product.serve.batching import Given
from vqprompt.product.serve.errors import NotThere, Refused, TooLarge
from vqprompt.product.serve.models import Snapshot

router = APIRouter(prefix="/v2", tags=["open inference protocol"])
LENGTH = "inference-header-content-length"
MOST_IMAGES = 256  # per request
MOST_VALUES, MOST_LISTS = 500_000, 100_000  # in the JSON of a request: no other thread works while it is read
OUTPUTS = {"class": "BYTES", "probability": "FP32", "probabilities": "FP32", "familiarity": "FP32"}


@router.get("/health/live", summary="Whether the server runs")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.get("/health/ready", summary="Whether it can answer")
async def ready(request: Request) -> Response:
    closing = state_of(request).closing
    return JSONResponse({"ready": not closing}, status_code=503 if closing else 200)


@router.get("", summary="About the server")
def server() -> dict[str, Any]:
    return {"name": "vqprompt", "version": __version__, "extensions": ["binary_tensor_data"]}


@router.get("/models/{name}", summary="About a model: inputs, outputs, versions, classes")
@router.get("/models/{name}/versions/{version}", include_in_schema=False)
def metadata(request: Request, name: str, version: str | None = None) -> dict[str, Any]:
    served, snapshot = find(request, name), _snapshot(request, name, version)
    count = len(snapshot.model.classes)
    shapes = {"probabilities": [-1, count]}
    return {
        "name": name,
        "versions": [str(n) for n in served.versions],
        "platform": "vqprompt",
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": n, "datatype": kind, "shape": shapes.get(n, [-1])} for n, kind in OUTPUTS.items()],
        "parameters": {"classes": list(snapshot.model.classes)},
    }


@router.get("/models/{name}/ready", summary="Whether a model has learned something")
@router.get("/models/{name}/versions/{version}/ready", include_in_schema=False)
def model_ready(request: Request, name: str, version: str | None = None) -> Response:
    taught = bool(_snapshot(request, name, version).model.classes)
    return JSONResponse({"name": name, "ready": taught}, status_code=200 if taught else 400)


@router.post("/models/{name}/infer", summary="The classes of images")
@router.post("/models/{name}/versions/{version}/infer", include_in_schema=False)
async def infer(request: Request, name: str, version: str | None = None) -> Response:
    snapshot = _snapshot(request, name, version)
    body, state = await request.body(), state_of(request)
    async with state.parsing:  # one at a time, so that others are answered in between
        asked, images, wanted = await run_in_threadpool(_parse, body, request.headers.get(LENGTH))
    classes = snapshot.model.classes
    with state.metrics.seconds.time():
        answers = await state.batcher.ask(snapshot, images, max(len(classes), 1))
    place = {c: number for number, c in enumerate(classes)}
    shares = np.zeros((len(answers), len(classes)), np.float32)
    for row, answer in zip(shares, answers, strict=True):
        row[[place[c] for c, _ in answer.classes]] = [share for _, share in answer.classes]
    for answer in answers:
        state.metrics.predictions.labels(name, "unknown" if answer.name == UNKNOWN else "known").inc()
    values: dict[str, Any] = {
        "class": [a.name for a in answers],
        "probability": np.array([a.classes[0][1] for a in answers], np.float32),
        "probabilities": shares,
        "familiarity": np.clip(np.array([a.familiarity for a in answers]), -1e30, 1e30).astype(np.float32),
    }
    head = {"model_name": name, "model_version": str(snapshot.version)}
    if isinstance(asked.get("id"), str):
        head["id"] = asked["id"]
    return _reply(head, values, wanted)


def _snapshot(request: Request, name: str, version: str | None) -> Snapshot:
    served = find(request, name)
    if version is None:
        return served.snapshot
    numbers = {str(number): number for number in served.versions}
    if version not in numbers:
        raise NotThere(f"there is no version {version[:20]!r} of {name}; there are {', '.join(numbers)}")
    return served.at(numbers[version])


# ---------------------------------------------------------------------------------------------- requests


def _parse(body: bytes, length: str | None) -> tuple[dict[str, Any], list[Given], dict[str, bool]]:
    """The JSON of a request, the images in it, and the outputs that it asks for."""
    end = len(body)
    if length is not None and (not length.isdecimal() or len(length) > 12 or (end := int(length)) > len(body)):
        raise Refused(f"{LENGTH} must be the length of the JSON in bytes, not {length[:20]!r}")
    if body.count(b",", 0, end) > MOST_VALUES or body.count(b"[", 0, end) + body.count(b"{", 0, end) > MOST_LISTS:
        raise TooLarge(f"the JSON has more than {MOST_VALUES} values or {MOST_LISTS} lists; send pixels in binary")
    try:
        asked = from_json(body[:end])
    except ValueError as error:
        raise Refused(f"the request is not JSON ({error})") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("inputs"), list) or len(asked["inputs"]) != 1:
        raise Refused('give one input called image: {"inputs": [{"name": "image", "datatype": "BYTES", …}]}')
    return asked, _images(asked, body[end:]), _wanted(asked)


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    parameters = given.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Refused("parameters must be an object")
    return parameters


def _images(asked: dict[str, Any], tensors: bytes) -> list[Given]:
    given = asked["inputs"][0]
    if not isinstance(given, dict) or given.get("name") != "image":
        raise Refused("the input must be called image")
    kind, shape, data = given.get("datatype"), given.get("shape"), given.get("data")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 4
        or not all(type(n) is int and 0 < n < 1 << 24 for n in shape)
    ):
        raise Refused("shape must be a list of one to four whole numbers above 0")
    size = _parameters(given).get("binary_data_size")
    if size is not None:
        if type(size) is not int or size != len(tensors):
            raise Refused(f"binary_data_size says {size!r}, and {len(tensors)} bytes follow the JSON")
        images = _binary_files(tensors) if kind == "BYTES" else _pixels(tensors, shape, kind)
    elif kind == "BYTES":
        images = _files(data)
    else:
        images = _pixels(data, shape, kind)
    count = 1 if kind == "UINT8" and len(shape) == 3 else math.prod(shape) if kind == "BYTES" else shape[0]
    if len(images) != count or not 0 < count <= MOST_IMAGES:
        given = counted(len(images), "image")
        raise Refused(f"the shape {shape} does not fit the {given} in data (at most {MOST_IMAGES} per request)")
    return images


def _files(data: Any) -> list[Given]:
    if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
        raise Refused("data must be a list of image files, each as a string in base64")
    try:
        return [check_image(base64.b64decode(text, validate=True)) for text in data]
    except (binascii.Error, ValueError):
        raise Refused("data must be base64") from None


def _binary_files(tensors: bytes) -> list[Given]:
    """Each file is preceded by its length in four bytes."""
    images: list[Given] = []
    place = 0
    while place < len(tensors):
        if place + 4 > len(tensors):
            raise Refused("the binary tensor ends in the middle of a length")
        (length,) = struct.unpack_from("<I", tensors, place)
        content = tensors[place + 4 : place + 4 + length]
        if len(content) != length:
            raise Refused("the binary tensor ends in the middle of an image")
        images.append(check_image(content))
        place += 4 + length
    return images


def _pixels(data: Any, shape: list[int], kind: Any) -> list[Given]:
    if kind != "UINT8" or len(shape) not in (3, 4) or shape[-1] != 3:
        raise Refused("give image files (BYTES [n]) or pixels (UINT8 [n, height, width, 3])")
    try:
        if isinstance(data, bytes):
            pixels = np.frombuffer(data, np.uint8).reshape(shape)
        else:
            pixels = np.asarray(data)
            if pixels.dtype.kind not in "iu" or pixels.min(initial=0) < 0 or pixels.max(initial=0) > 255:
                raise ValueError
            pixels = pixels.astype(np.uint8).reshape(shape)
    except (ValueError, TypeError, OverflowError):
        raise Refused(f"data must be whole numbers from 0 to 255 of the shape {shape}") from None
    return list(pixels) if pixels.ndim == 4 else [pixels]


def _wanted(asked: dict[str, Any]) -> dict[str, bool]:
    """The outputs to send, and whether each is sent in binary."""
    binary = bool(_parameters(asked).get("binary_data_output"))
    outputs = asked.get("outputs")
    if not outputs:
        return dict.fromkeys(OUTPUTS, binary)
    if not isinstance(outputs, list) or not all(
        isinstance(o, dict) and isinstance(o.get("name"), str) and o["name"] in OUTPUTS for o in outputs
    ):
        raise Refused(f"unknown outputs; there are {', '.join(OUTPUTS)}")
    return {o["name"]: bool(_parameters(o).get("binary_data", binary)) for o in outputs}


# ---------------------------------------------------------------------------------------------- answers


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

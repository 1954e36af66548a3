"""Models over HTTP: what they know, what they confuse, and their files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from vqprompt.product.model.efforts import EFFORTS, TRAINING
from vqprompt.product.serve.changes import check_taught
from vqprompt.product.serve.errors import NotThere
from vqprompt.product.serve.models import ServedModel
from vqprompt.product.serve.state import State

router = APIRouter(tags=["models"])


def state_of(request: Request) -> State:
    state: State = request.app.state.serving
    return state


def find(request: Request, name: str | None) -> ServedModel:
    return state_of(request).models.get(name)


@router.get("/models", summary="All models, and the efforts that teaching can have")
def models(request: Request) -> dict[str, Any]:
    """passes: the most work that an effort does, as a multiple of looking once at each image."""
    return {
        "models": [
            {
                "name": m.name, "classes": len(m.snapshot.model.classes), "accuracy": m.snapshot.model.accuracy,
                "version": m.snapshot.version, "drawings": m.drawings,
            }
            for m in state_of(request).models
        ],
        "efforts": {name: {"says": says, "passes": _passes(name)} for name, says in EFFORTS.items()},
    }  # fmt: skip


def _passes(effort: str) -> float:
    training = TRAINING.get("best" if effort == "auto" else effort)
    return 1 if training is None else training.training["epochs"] * (training.passes + 1)


@router.get("/models/{name}", summary="Everything about a model")
def model(request: Request, name: str) -> dict[str, Any]:
    served = find(request, name)
    snapshot = served.snapshot
    return {
        **snapshot.shown,
        "name": name,
        "drawings": served.drawings,
    }


@router.get("/models/{name}/confusion", summary="Which class is taken for which")
def confusion(request: Request, name: str) -> dict[str, Any]:
    """Measured by leaving out one image at a time.

    cells: [class, class it is taken for, number of images]. The classes are given by their position in `classes`; pairs
    that never occur are left out.
    """
    left_out = find(request, name).snapshot.left_out
    cells = [[a, b, n] for (a, b), n in left_out.confusion().items()]
    return {"classes": left_out.classes, "cells": cells, "tested": len(left_out.images)}


@router.get("/models/{name}/confusion/images", summary="The images behind one cell of the confusion")
def confused_images(request: Request, name: str, label: str, answer: str) -> dict[str, Any]:
    """Names for `GET /models/{name}/thumbnails/{image}`, of the images that the server still has in memory."""
    served = find(request, name)
    names = served.snapshot.left_out.images_of(label, answer)
    gallery = state_of(request).gallery
    return {"images": [f"{n:016x}" for n in names if gallery.get(name, n) is not None], "total": len(names)}


@router.get("/models/{name}/thumbnails/{image}", summary="A small picture of an image it was taught")
def thumbnail(request: Request, name: str, image: str) -> Response:
    try:
        picture = state_of(request).gallery.get(name, int(image, 16))
    except ValueError:
        picture = None
    if picture is None:
        raise NotThere("there is no such thumbnail; the server keeps only the newest ones, in memory")
    return Response(picture, media_type="image/jpeg")


@router.get("/models/{name}/file", summary="Download the model")
def download(request: Request, name: str) -> Response:
    served = find(request, name)
    check_taught(served)
    return _send_file(served.path, f"{served.name}.vqp")


@router.get("/models/{name}/onnx", summary="Download the ONNX file that was made of the model as it is now")
def download_onnx(request: Request, name: str) -> Response:
    served = find(request, name)
    if (made := state_of(request).exports.get(served.name)) is None:
        raise NotThere(f"make it first: POST /models/{served.name}/onnx")
    return _send_file(made.file, made.title)


class _Download(StreamingResponse):
    """Sends an open file, and closes it also if the client leaves before the end."""

    def __init__(self, file: BinaryIO, headers: dict[str, str]) -> None:
        super().__init__(iter(partial(file.read, 1 << 16), b""), 200, headers, "application/octet-stream")
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def _send_file(path: Path, title: str) -> Response:
    """A file as it is now, even if it is replaced or deleted while it is sent."""
    try:
        file = path.open("rb")
    except OSError:
        raise NotThere(f"{title} is not there any more; try again") from None
    headers = {
        "content-length": str(os.fstat(file.fileno()).st_size),
        "content-disposition": f"attachment; filename*=utf-8''{quote(title)}",
    }
    return _Download(file, headers)


@router.get("/models/{name}/card", summary="Its card: what it knows, how well, and its limits")
def card(request: Request, name: str) -> Response:
    from vqprompt.product.model.hub import model_card

    served = find(request, name)
    check_taught(served)
    return PlainTextResponse(model_card(served.snapshot.model, repo_id=None), media_type="text/markdown")

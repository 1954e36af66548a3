"""Models over HTTP: what they know, what they confuse, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, PlainTextResponse

from vqprompt.product.model.efforts import EFFORTS, TRAINING
from vqprompt.product.serve.errors import NotThere
from vqprompt.product.serve.lan import code_to_scan
from vqprompt.product.serve.state import Serving, State, ThisModel

router = APIRouter(tags=["models"])


@router.get("/models", summary="All models, and the efforts that teaching can have")
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
    return 1 if training is None else training.training["epochs"] * (training.passes + 1)


@router.get("/models/{name}", summary="Everything about a model")
def model(served: ThisModel) -> dict[str, Any]:
    """attention: whether `POST /models/{name}/attention` can answer."""
    attention = find_spec("torch") is not None
    return {**served.snapshot.shown, "name": served.name, "drawings": served.drawings, "attention": attention}


@router.get("/models/{name}/confusion", summary="Which class is taken for which")
def confusion(served: ThisModel) -> dict[str, Any]:
    """Measured by leaving out one image at a time.

    cells: [class, class it is taken for, number of images]. The classes are given by their position in `classes`; pairs
    that never occur are left out.
    """
    left_out = served.snapshot.left_out
    cells = [[a, b, n] for (a, b), n in left_out.confusion().items()]
    return {"classes": left_out.classes, "cells": cells, "tested": len(left_out.images)}


@router.get("/models/{name}/confusion/images", summary="The images behind one cell of the confusion")
def confused_images(state: Serving, served: ThisModel, label: str, answer: str) -> dict[str, Any]:
    """Names for `GET /models/{name}/thumbnails/{image}`, of the images that the server still has in memory."""
    return _with_thumbnails(state, served.name, served.snapshot.left_out.images_of(label, answer))


@router.get("/models/{name}/images", summary="The images that were taught as a class")
def images(state: Serving, served: ThisModel, label: str) -> dict[str, Any]:
    """Ids for `GET /models/{name}/thumbnails/{image}` and for corrections, of images that have a thumbnail. label:
    "unknown" for those that are none of the classes. total: how many were taught."""
    records = served.snapshot.model.knowledge.records
    return _with_thumbnails(state, served.name, records[label].ids.tolist() if label in records else [])


def _with_thumbnails(state: State, model: str, ids: Sequence[int]) -> dict[str, Any]:
    return {"images": [f"{n:016x}" for n in ids if state.gallery.get(model, n) is not None], "total": len(ids)}


@router.get("/models/{name}/thumbnails/{image}", summary="A small picture of an image it was taught")
def thumbnail(state: Serving, name: str, image: str) -> Response:
    try:
        picture = state.gallery.get(name, int(image, 16))
    except ValueError:
        picture = None
    if picture is None:
        raise NotThere("there is no such thumbnail; the server keeps only the newest ones, in memory")
    return Response(picture, media_type="image/jpeg")


@router.get("/models/{name}/file", summary="Download the model")
def download(served: ThisModel) -> Response:
    served.snapshot.check_taught()
    return _send_file(served.path, f"{served.name}.vqp")


@router.get("/models/{name}/onnx", summary="Download the ONNX file that was made of the model as it is now")
def download_onnx(state: Serving, served: ThisModel) -> Response:
    if (made := state.exports.get(served.name)) is None:
        raise NotThere(f"make it first: POST /models/{served.name}/onnx")
    return _send_file(*made)


def _send_file(path: Path, title: str) -> Response:
    if not path.is_file():
        raise NotThere(f"{title} is not there any more; try again")
    return FileResponse(path, media_type="application/octet-stream", filename=title)


@router.get("/models/{name}/card", summary="Its card: what it knows, how well, and its limits")
def card(served: ThisModel) -> Response:
    from vqprompt.product.model.hub import model_card

    served.snapshot.check_taught()
    return PlainTextResponse(model_card(served.snapshot.model, repo_id=None), media_type="text/markdown")


@router.get("/phone", tags=["state"], summary="The address for phones, and a code to scan; null without --lan")
def phone(state: Serving) -> dict[str, str | None]:
    url = state.phone_url
    return {"url": url, "code": None if url is None else code_to_scan(url)[1]}

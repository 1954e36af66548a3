"""Models over HTTP: what they know, what they confuse, and their files."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

from vqprompt.core.errors import UserError
from vqprompt.product.model.efforts import EFFORTS, check_effort
from vqprompt.product.serve.errors import Conflict, NotThere
from vqprompt.product.serve.models import Served
from vqprompt.product.serve.state import State

router = APIRouter(tags=["models"])


def state_of(request: Request) -> State:
    state: State = request.app.state.serving
    return state


def find(request: Request, name: str | None) -> Served:
    return state_of(request).shelf.get(name)


@router.get("/models", summary="All models, and the efforts that teaching can have")
def models(request: Request) -> dict[str, Any]:
    shelf = state_of(request).shelf
    return {
        "models": [
            {
                "name": m.name, "classes": len(m.snapshot.model.classes), "accuracy": m.snapshot.model.accuracy,
                "version": m.snapshot.version, "drawings": m.drawings,
            }
            for m in shelf
        ],
        "efforts": {name: says for name, says in EFFORTS.items() if _possible(name)},
    }  # fmt: skip


def _possible(effort: str) -> bool:
    try:
        check_effort(effort)
    except UserError:
        return False
    return True


@router.get("/models/{name}", summary="Everything about a model")
def model(request: Request, name: str) -> dict[str, Any]:
    served = find(request, name)
    snapshot = served.snapshot
    shown = dict(snapshot.shown)
    past, changes = shown["can_undo"], len(shown["history"])
    return {
        **shown,
        "name": name,
        "drawings": served.drawings,
        "version": snapshot.version,
        "versions": served.versions.numbers(),
        "can_undo": changes if past == changes - 1 else past,  # before the first teaching it was empty
        "prompt_use": snapshot.prompt_use(),
    }


@router.get("/models/{name}/confusion", summary="Which class is taken for which")
def confusion(request: Request, name: str) -> dict[str, Any]:
    """Measured by leaving out one image at a time.

    cells: [class, class it is taken for, number of images]. The classes are given by their position in `classes`; pairs
    that never occur are left out.
    """
    found = find(request, name).snapshot.left_out
    cells = [[a, b, n] for (a, b), n in found.confusion().items()]
    return {"classes": found.classes, "cells": cells, "tested": len(found.images)}


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
    must_know_something(served)
    return FileResponse(served.path, media_type="application/octet-stream", filename=f"{served.name}.vqp")


@router.get("/models/{name}/card", summary="Its card: what it knows, how well, and its limits")
def card(request: Request, name: str) -> Response:
    from vqprompt.product.model.hub import model_card

    served = find(request, name)
    must_know_something(served)
    return PlainTextResponse(model_card(served.snapshot.model, repo_id=None), media_type="text/markdown")


def must_know_something(served: Served) -> None:
    if not served.snapshot.model.classes:
        raise Conflict("the model has learned nothing yet; teach it first")

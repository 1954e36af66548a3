"""The parts of a running server, how they work together, and what they keep of the classes that models are taught."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from vqprompt.core.errors import UserError
from vqprompt.product.serve.batching import Batcher
from vqprompt.product.serve.changes import Body, Change, Check, Forget, Onnx, Outcome, Teach, Unlearn
from vqprompt.product.serve.errors import Conflict
from vqprompt.product.serve.images import Gallery, Upload, Uploads, private_folder
from vqprompt.product.serve.jobs import Job, Jobs
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.models import ModelFolder, ServedModel
from vqprompt.product.serve.settings import Settings


class State:
    """Made once per server; the routes work with it."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.limits = settings, settings.limits
        self.models = ModelFolder([], settings.defaults)
        self.folder: Path = private_folder()
        self.metrics = Metrics()
        self.gallery = Gallery(int(settings.limits.thumbnails))
        self.uploads = Uploads(self.folder, settings.limits)
        self.batcher = Batcher(settings.limits, self.metrics)
        self.jobs = Jobs(settings.limits, self.metrics)
        self.parsing, self.attending = asyncio.Lock(), asyncio.Lock()
        self.closing = False
        self.phone_url: str | None = None  # for phones on the same network

    def close(self) -> None:
        self.closing = True
        self.jobs.close()
        self.batcher.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def submit(self, served: ServedModel, body: Body, upload: Upload | None = None) -> Job:
        """Queue a change of a model, which uses the upload until it has ended."""
        waited = upload is not None and upload.waits
        try:
            body.check(served.snapshot)
            left_out = body.leave_out if isinstance(body, Teach) else []
            images = () if upload is None else upload.without(left_out)
            change = Change(served.path, served.defaults, body, images, self.folder / secrets.token_hex(8))
            job = Job(kind=body.kind, model=served.name, preview=getattr(body, "preview", False))
            if upload is not None:
                upload.in_use, upload.used_by = True, job.id
                if isinstance(body, Check):
                    upload.waits, upload.check = True, job.id
            return self.jobs.add(job, change, lambda outcome: self._finish(served, change, upload, outcome))
        except UserError:
            if upload is not None:
                upload.waits = waited
                self.uploads.release(upload)
            raise

    def _finish(self, served: ServedModel, change: Change, upload: Upload | None, outcome: Outcome) -> None:
        done, body = outcome.state == "done", change.body
        if done:
            self.gallery.add(served.name, outcome.thumbnails)
        if upload is not None:
            if isinstance(body, Check):
                upload.waits, upload.in_use = done, False
                doubtful = {f["image"] for f in outcome.result.get("findings", ()) if f["leave_out"]}
                upload.decide(sorted(doubtful), None, left_out=True)
            elif done and isinstance(body, Teach) and not body.preview:
                upload.waits = False
            self.uploads.release(upload)
        if done and isinstance(body, Unlearn) and body.for_good:
            self.jobs.forget_ended(served.name)  # their results name images
        erased = {body.name} if done and isinstance(body, Forget) and body.for_good else set()
        gone = self.refresh(served, erased)
        if done and isinstance(body, Onnx):
            served.drop_export()
            served.export = change.target, f"{served.name}-{served.snapshot.version}.onnx"
        if gone and isinstance(body, Check | Onnx):  # another program changed the file, so this may know too much
            served.drop_export()
            raise Conflict("the model has forgotten something meanwhile; try again")

    def refresh(self, served: ServedModel, erased: Set[str] = frozenset()) -> Set[str]:
        """Load a model's file if it has changed. What the new model does not know, the server must not know either: it
        is deleted before the new model is shown. erased: classes that were forgotten for good, if that is known.
        Returns all that are gone."""
        with served.loading:
            if (now := served.load_new()) is None:
                return frozenset()
            before = served.current.names if served.current else frozenset()
            try:
                self.gallery.keep_only(served.name, now.images)
                served.drop_export()
                if gone := (before | erased) - now.names:  # undone, or forgotten for good
                    self.jobs.forget_ended(served.name)
                    last = now.model.history[-1:]
                    if last and last[0].what == "forgot" and not last[0].name:  # for good
                        self.uploads.forget_classes(served.name, gone)
                return gone
            finally:
                served.current = now

    def tidy(self) -> None:
        """Delete uploads that nobody teaches in time, and notice what other programs did to the models."""
        self.uploads.tidy()
        self.jobs.when_idle(lambda: self.models.look_again(self.refresh))


async def _state(request: Request) -> State:
    state: State = request.app.state.serving
    return state


Serving = Annotated[State, Depends(_state)]


async def _model(state: Serving, name: str) -> ServedModel:
    return state.models.get(name)


ThisModel = Annotated[ServedModel, Depends(_model)]

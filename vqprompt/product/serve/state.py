"""The parts of a running server, how they work together, and what they keep of the classes that models are taught."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vqprompt.product.serve.batching import Batcher
from vqprompt.product.serve.changes import Body, Change, JobUpdate
from vqprompt.product.serve.gallery import Gallery
from vqprompt.product.serve.jobs import Job, Jobs
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.models import ModelDefaults, ModelFolder, ServedModel
from vqprompt.product.serve.uploads import Upload, Uploads, private_folder

if TYPE_CHECKING:
    from vqprompt.product.serve.label_studio import Annotated


def warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ExportedFile:
    file: Path
    title: str


class State:
    """Made once per server; the routes work with it."""

    def __init__(self, limits: Limits, defaults: ModelDefaults) -> None:
        self.models, self.limits = ModelFolder([], defaults), limits
        self.folder: Path = private_folder()
        self.metrics = Metrics()
        self.gallery = Gallery(int(limits.thumbnails))
        self.uploads = Uploads(self.folder, limits)
        self.batcher = Batcher(limits, self.metrics)
        self.jobs = Jobs(limits, self._idle, self._count)
        self.exports: dict[str, ExportedFile] = {}  # by model
        self.annotated: dict[str, Annotated] = {}  # tasks of Label Studio that wait to be taught, by model
        self.parsing = asyncio.Lock()
        self.closing = False
        self.phone_url: str | None = None  # for phones on the same network

    def close(self) -> None:
        self.closing = True
        self.jobs.close()
        self.batcher.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def submit(
        self,
        served: ServedModel,
        kind: str,
        body: Body,
        upload: Upload | None = None,
        left_out: Sequence[int] = (),
    ) -> Job:
        """Queue a change of a model, which uses the upload until it has ended. left_out: images of the upload."""
        body.check(served)
        images = () if upload is None else upload.without(left_out)
        change = Change(kind, served.path, served.defaults, body, images, self.folder / secrets.token_hex(8))
        job = Job(served.name, change, lambda update: self._finish(served, change, upload, update))
        with ExitStack() as until_queued:
            if upload is not None:
                upload.used_by = job.id
                upload.check = job.id if kind == "check" else upload.check
                job.held.enter_context(upload.in_use())
                until_queued.push(job.held)
            self.jobs.add(job)
            until_queued.pop_all()
        return job

    def _finish(self, served: ServedModel, change: Change, upload: Upload | None, update: JobUpdate) -> None:
        done = update.state == "done"
        if done:
            self.gallery.add(served.name, update.thumbnails)
        if upload is not None:
            if change.kind == "check" and done:  # what should not be taught, until a person decides
                upload.left_out = {f["image"] for f in update.result["findings"] if f["leave_out"]}
            elif change.kind == "check" or (done and not change.body.preview):
                upload.waits = False
        if done and change.kind == "unlearn" and change.body.for_good:
            self.jobs.forget_ended(served.name)  # their results name images
        erased = {change.body.name} if done and change.kind == "forget" and change.body.for_good else set()
        self.refresh(served, erased)
        if done and update.file is not None:
            title = f"{served.name}-{served.snapshot.version}.onnx"
            self._drop_export(served.name)
            self.exports[served.name] = ExportedFile(update.file, title)

    # ------------------------------------------------------------------ what is kept

    def refresh(self, served: ServedModel, erased: Set[str] = frozenset()) -> None:
        """Load a model's file if it has changed. What the new one does not know, the server must not know either.
        erased: classes that were forgotten for good, if that is known."""
        before = served.snapshot.names | erased if served.usable else erased
        if served.refresh():
            now = served.snapshot
            self.gallery.keep_only(served.name, now.images)
            self._drop_export(served.name)
            if gone := before - now.names:  # undone, or forgotten for good
                self.jobs.forget_ended(served.name)
                last = now.model.history[-1:]
                if last and last[0].what == "forgot" and not last[0].name:  # for good
                    self.uploads.forget_classes(served.name, gone)

    def _drop_export(self, model: str) -> None:
        before = self.exports.pop(model, None)
        if before is not None:
            before.file.unlink(missing_ok=True)

    def _idle(self) -> None:
        self.models.look_again(self.refresh)

    def _count(self, job: Job) -> None:
        self.metrics.jobs.labels(job.change.kind, job.state).inc()

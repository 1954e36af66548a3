"""The parts of a running server, and how they work together."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.product.serve.batching import Batcher
from vqprompt.product.serve.gallery import Gallery
from vqprompt.product.serve.jobs import Job, Jobs
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.metrics import Metrics
from vqprompt.product.serve.models import New, Served, Shelf
from vqprompt.product.serve.teacher import Report, Task
from vqprompt.product.serve.uploads import Upload, Uploads, private_folder


def warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


class State:
    """Made once per server; the routes work with it."""

    def __init__(self, shelf: Shelf, limits: Limits, new: New) -> None:
        self.shelf, self.limits, self.new = shelf, limits, new
        self.folder: Path = private_folder()
        self.metrics = Metrics()
        self.gallery = Gallery(int(limits.thumbnails))
        self.uploads = Uploads(self.folder, limits)
        self.batcher = Batcher(limits, self.metrics)
        self.jobs = Jobs(limits, self._idle, self._count)
        self.closing = False
        self.exports: dict[str, tuple[int, bool, Path]] = {}  # by model: version, 8 bits, file

    def close(self) -> None:
        self.closing = True
        self.jobs.close()
        self.batcher.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _idle(self) -> None:
        try:
            self.shelf.look_again(self.new, int(self.limits.versions))
        except OSError as error:
            warn(str(error))

    def _count(self, job: Job) -> None:
        self.metrics.jobs.labels(job.task.kind, job.state).inc()

    # ------------------------------------------------------------------ jobs

    def change(
        self, served: Served, kind: str, after: Callable[[Report], None] = lambda report: None, **arguments: Any
    ) -> Job:
        """A job that changes a model. after: called when it is done and the new snapshot answers."""

        def finish(report: Report) -> None:
            served.refresh()  # also after a failure: an old file is recognized and not loaded again
            after(report)

        return self.jobs.add(served.name, self._task(served, kind, arguments), finish)

    def teach(self, served: Served, upload: Upload, leave_out: list[int], effort: str, keep: bool) -> Job:
        """keep: keep the upload if it could not be taught, so that the client can try again."""
        images, labels = upload.images(leave_out)

        def finish(report: Report) -> None:
            for name, label, picture in report.thumbnails if report.state == "done" else ():
                self.gallery.add(served.name, name, label, picture)
            served.refresh()
            upload.used -= 1
            if report.state == "done" or not keep:
                self.uploads.drop(upload)

        return self._with(upload, served, "teach", finish, images=images, labels=labels, effort=effort)

    def check(self, served: Served, upload: Upload) -> Job:
        images, labels = upload.images()

        def finish(report: Report) -> None:
            upload.used -= 1
            for finding in report.result.get("findings", ()):
                finding["says"] = upload.in_words(finding["says"])

        return self._with(upload, served, "check", finish, images=images, labels=labels)

    def _with(
        self, upload: Upload, served: Served, kind: str, finish: Callable[[Report], None], **arguments: Any
    ) -> Job:
        upload.used += 1
        try:
            return self.jobs.add(served.name, self._task(served, kind, arguments), finish, upload.in_words)
        except UserError:
            upload.used -= 1
            raise

    def _task(self, served: Served, kind: str, arguments: dict[str, Any]) -> Task:
        return Task(kind, served.path, served.new, int(self.limits.versions), arguments)

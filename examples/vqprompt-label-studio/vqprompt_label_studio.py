"""An ML backend of Label Studio for `vqprompt serve`: it predicts tasks, and learns from annotations as they are made.

Connect a project to http://SERVER/label-studio/MODEL. LABEL_STUDIO_URL and LABEL_STUDIO_API_KEY say where Label Studio
is; the key is sent to that address alone, and images are read from there alone.

An annotation only marks its task. What the model is taught is read from Label Studio afterwards, as it is by then: so
the order of events does not matter, annotations that come while the model learns are taught together, and a task that
could not be read is tried again with the next event.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit
from weakref import WeakKeyDictionary
from xml.etree import ElementTree

import numpy as np
from fastapi import APIRouter, BackgroundTasks
from pydantic import BaseModel

from vqprompt.core.errors import UserError
from vqprompt.product.model.pictures import content_id
from vqprompt.product.serve.changes import Relabel, Teach
from vqprompt.product.serve.errors import Refused
from vqprompt.product.serve.jobs import Job
from vqprompt.product.serve.models import ServedModel, warn
from vqprompt.product.serve.settings import Limits
from vqprompt.product.serve.state import Serving, State, ThisModel

router = APIRouter(prefix="/label-studio/{name}", include_in_schema=False)
SECONDS = 30  # for one answer of Label Studio
ANNOTATED = ("ANNOTATION_CREATED", "ANNOTATION_UPDATED", "ANNOTATIONS_CREATED")


@router.get("/health")
def health(served: ThisModel) -> dict[str, str]:
    return {"status": "UP"}


class Numbered(BaseModel):
    """A task or a project."""

    id: int


class Task(Numbered):
    data: dict[str, Any]
    annotations: list[dict[str, Any]] = []


class Question(BaseModel):
    label_config: Any = None
    tasks: list[Task] = []


class Event(BaseModel):
    """Something that happened in Label Studio. task: the annotated one, or several."""

    action: str
    project: Numbered | None = None
    task: Numbered | list[Numbered] | None = None


@dataclass
class Waiting:
    """What is to be taught to a model: pairs of project and task. A task that is None means all of them. teaching: held
    while these are taught."""

    annotated: set[tuple[int, int | None]] = field(default_factory=set)
    teaching: threading.Lock = field(default_factory=threading.Lock)


_waiting = WeakKeyDictionary[ServedModel, Waiting]()


@router.post("/setup")
def setup(served: ThisModel, body: dict[str, Any]) -> dict[str, str]:
    Choices.parse(body.get("schema"))
    LabelStudio.connect()
    return {"model_version": _version(served)}


@router.post("/predict")
def predict(state: Serving, served: ThisModel, asked: Question) -> dict[str, Any]:
    """One prediction per task; an empty one for what is unknown, cannot be read, or may not be chosen there."""
    choices, studio, model = Choices.parse(asked.label_config), LabelStudio.connect(), served.snapshot.model
    results = []
    for task in asked.tasks:
        results.append(told := {"result": [], "score": 0.0, "model_version": _version(served)})
        if not model.classes:
            continue
        try:
            (answer,) = model.answers(studio.image(task.data.get(choices.key), state.limits))
        except (UserError, OSError) as error:
            warn(f"Label Studio: task {task.id}: {error}")
            continue
        if answer.name in choices.names:
            value = {"type": "choices", "value": {"choices": [answer.name]}}
            result = {"from_name": choices.name, "to_name": choices.image, **value}
            told |= {"result": [result], "score": answer.classes[0][1]}
    return {"results": results}


@router.post("/webhook", status_code=201)
def webhook(state: Serving, served: ThisModel, event: Event, later: BackgroundTasks) -> dict[str, str]:
    """Label Studio waits one second for the answer."""
    if event.action not in (*ANNOTATED, "START_TRAINING"):
        return {"status": "ignored"}
    if event.project is None:
        raise Refused(f"{event.action} names no project; send its id as project.id")
    for task in event.task if isinstance(event.task, list) else [event.task]:
        _waiting.setdefault(served, Waiting()).annotated.add((event.project.id, None if task is None else task.id))
    later.add_task(_teach_annotated, state, served)
    return {"status": "ok"}


def _version(served: ServedModel) -> str:
    return f"{served.name}-{served.snapshot.version}"


def _teach_annotated(state: State, served: ServedModel) -> None:
    """Returns at once if another thread is at it, which then does these as well."""
    waiting = _waiting[served]
    while waiting.annotated and not state.closing and waiting.teaching.acquire(blocking=False):
        taken, waiting.annotated = waiting.annotated, set()
        try:
            for job in _teach(state, served, taken):
                job.wait()
                if job.state == "failed":
                    warn(f"Label Studio: {job.error}")
        except (ValueError, OSError) as error:
            warn(f"Label Studio: {error}; trying again with the next annotation")
            waiting.annotated |= taken
            return
        finally:
            waiting.teaching.release()


def _teach(state: State, served: ServedModel, taken: set[tuple[int, int | None]]) -> list[Job]:
    studio, jobs, records = LabelStudio.connect(), list[Job](), served.snapshot.model.knowledge.records

    def new_images() -> Iterator[tuple[str, str, bytes]]:
        """Of tasks that were not taught before; the others move to their class."""
        for task, choices in studio.tasks(taken):
            if (label := choices.label(task.annotations)) is None:
                continue
            content = studio.image(task.data.get(choices.key), state.limits)
            image = content_id(content)
            if all(np.uint64(image) not in record.ids for record in records.values()):
                yield f"task {task.id}", label, content
            elif label not in records or np.uint64(image) not in records[label].ids:
                jobs.append(state.submit(served, Relabel(images=[f"{image:016x}"], label=label)))

    upload = state.uploads.add(served.name, new_images())
    if not upload.images:
        state.uploads.release(upload)
        return jobs
    return [*jobs, state.submit(served, Teach(upload=upload.id), upload)]


@dataclass(frozen=True)
class Choices:
    """The part of a labelling interface that names classes. names: those that may be chosen. key: of the image in a
    task's data."""

    name: str
    image: str
    key: str
    names: frozenset[str]

    @classmethod
    def parse(cls, config: Any) -> Choices:
        try:
            tree = ElementTree.fromstring(config)
        except (ElementTree.ParseError, TypeError) as error:
            raise Refused(f"the labelling interface cannot be read ({error})") from None
        images = {image.get("name", ""): image.get("value", "").lstrip("$") for image in tree.iter("Image")}
        for choices in tree.iter("Choices"):
            if (to := choices.get("toName", "")) in images:
                names = frozenset(c.get("alias", c.get("value", "")) for c in choices.iter("Choice"))
                return cls(choices.get("name", ""), to, images[to], names)
        raise Refused("the labelling interface needs <Choices> for an <Image>: one class per image is what this learns")

    def label(self, annotations: Iterable[dict[str, Any]]) -> str | None:
        """The class that the newest annotation names; None if there is none, or several."""
        kept = [a for a in annotations if not a.get("was_cancelled")]
        for annotation in sorted(kept, key=lambda a: str(a.get("updated_at")), reverse=True)[:1]:
            chosen = [r["value"]["choices"] for r in annotation["result"] if r.get("from_name") == self.name]
            if len(chosen) == 1 and len(chosen[0]) == 1:
                return str(chosen[0][0])
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another address."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(frozen=True)
class LabelStudio:
    """The other side. authorization: the header that it wants."""

    url: str
    authorization: str

    @classmethod
    def connect(cls) -> LabelStudio:
        url, key = os.environ.get("LABEL_STUDIO_URL", ""), os.environ.get("LABEL_STUDIO_API_KEY", "")
        if urlsplit(url).scheme not in ("http", "https") or not key:
            raise Refused("vqprompt serve needs LABEL_STUDIO_URL and LABEL_STUDIO_API_KEY, to read images from there")
        if key.count(".") == 2:  # a personal access token, which buys a short-lived one
            access = cls(url, "").request("/api/token/refresh/", {"refresh": key})
            return cls(url, f"Bearer {json.loads(access)['access']}")
        return cls(url, f"Token {key}")

    def request(self, path: str, body: Any = None, most: float = 100e6) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.authorization:
            headers["Authorization"] = self.authorization
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(urljoin(self.url, path), data, headers)
        with urllib.request.build_opener(_NoRedirect).open(asked, timeout=SECONDS) as answer:
            content: bytes = answer.read(int(most) + 1)
        if len(content) > most:
            raise Refused(f"{path}: has more than {most / 1e6:g} MB")
        return content

    def tasks(self, wanted: set[tuple[int, int | None]]) -> Iterator[tuple[Task, Choices]]:
        """Tasks as they are now, with their annotations."""
        for project in {number for number, _ in wanted}:
            choices = Choices.parse(json.loads(self.request(f"/api/projects/{project}/"))["label_config"])
            if (project, None) in wanted:
                listed = json.loads(self.request(f"/api/projects/{project}/export?exportType=JSON"))
            else:
                numbers = sorted(task for number, task in wanted if number == project and task is not None)
                listed = [json.loads(self.request(f"/api/tasks/{number}/")) for number in numbers]
            yield from ((Task.model_validate(task), choices) for task in listed)

    def image(self, value: Any, limits: Limits) -> bytes:
        """The image of a task: one that Label Studio has, or one that is written out in the task."""
        if not isinstance(value, str):
            raise Refused("a task has no image")
        if value.startswith("data:"):
            try:
                return base64.b64decode(value.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise Refused(f"an image in a task is not base64 ({error})") from None
        if urlsplit(urljoin(self.url, value))[:2] != urlsplit(self.url)[:2]:
            raise Refused(f"{value[:200]}: images are read from {self.url} alone; import them into Label Studio")
        return self.request(value, most=limits.image_mb * 1e6)

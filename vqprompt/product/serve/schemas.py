"""What requests and answers look like; the OpenAPI page shows these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Teach(Body):
    """Teach the images of an upload."""

    upload: str = Field(description="The id that POST /models/{name}/uploads returned.")
    leave_out: list[int] = Field(default=[], description="Numbers of images in the upload that are not to be taught.")
    effort: str = Field(default="instant", description="How much work to do; GET /models lists the efforts.")


class Undo(Body):
    steps: int = Field(default=1, ge=1, le=1000, description="How many changes to undo, the last one first.")


class Rename(Body):
    old: str
    new: str


class Forget(Body):
    name: str
    for_good: bool = Field(default=False, description="Also delete it from the history and from all older versions.")


class Return(Body):
    version: int = Field(ge=1, description="One of the model's versions.")


class Export(Body):
    int8: bool = Field(default=False, description="Weights in 8 bits: a quarter of the size.")


class JobAnswer(BaseModel):
    """A change of a model: waiting, running or ended."""

    id: str
    kind: Literal["teach", "check", "undo", "rename", "forget", "return", "onnx"]
    model: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    stage: str = Field(description="What is being done.")
    done: float
    total: float
    elapsed: float | None = Field(description="Seconds since it started.")
    remaining: float | None = Field(description="Estimated seconds until this stage is done.")
    result: dict[str, Any]
    error: str | None


class UploadAnswer(BaseModel):
    """Images that wait to be taught, and the job that checks them."""

    upload: str
    images: list[dict[str, Any]]
    job: JobAnswer


class Share(BaseModel):
    name: str
    probability: float


class Prediction(BaseModel):
    """What is in an image. name: the best class, or "unknown". familiarity: below 0 is unknown."""

    name: str
    unknown: bool
    classes: list[Share]
    familiarity: float | None
    prompts: list[dict[str, Any]] | None = Field(
        description="Prompts that the image used: block, prompt, and its share of attention. None for models without."
    )
    model: str
    version: int


class ErrorAnswer(BaseModel):
    error: str

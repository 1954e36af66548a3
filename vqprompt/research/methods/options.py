"""The options of methods: settings that several methods share, each with its default and what it means."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model, model_validator

from vqprompt.core.statistics.drift import Moving
from vqprompt.research.training.rebalancing import Rebalancing


class Options(BaseModel, extra="forbid"):
    """A method's own settings. Every field has a default and a description: `vqprompt methods NAME` shows them."""

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults_of_groups(cls, given: Any) -> Any:
        """If only some settings of a group such as `rebalancing` are given, the others keep this method's defaults."""
        if not isinstance(given, dict):
            return given
        return given | {
            name: field.default.model_dump() | given[name]
            for name, field in cls.model_fields.items()
            if isinstance(field.default, BaseModel) and isinstance(given.get(name), dict)
        }


def with_defaults(options: type[Options], defaults: dict[str, Any]) -> type[Options]:
    """The same options with other defaults. Of a group such as `rebalancing`, those that are given change."""
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        known = options.model_fields[name]
        if isinstance(known.default, BaseModel):
            default = type(known.default)(**known.default.model_dump() | default)
        fields[name] = Annotated[known.annotation, *known.metadata, Field(description=known.description)], default
    return create_model(options.__name__, __base__=options, __module__=options.__module__, **fields)


class ReadoutOptions(Options):
    """Which features the classifier gets, and its loss. The same for every method that has these options, so that
    methods can be compared with equal means."""

    class_tokens: int = Field(1, ge=1, description="number of last blocks whose class tokens make up the features")
    scaled: bool = Field(False, description="scale each class token to one length")
    mirror: bool = Field(False, description="average the features of an image and of its mirror image; not in training")
    symmetric: bool = Field(False, description="half cross-entropy, half reverse cross-entropy")


class StatisticsOptions(ReadoutOptions):
    """For methods that can keep class statistics."""

    statistics: bool = Field(False, description="rebalance the classifier from class statistics after each task")
    rebalancing: Rebalancing = Rebalancing()
    moving: Moving = Moving()
    feature_distillation: float = Field(
        0.0, ge=0, description="weight of the loss that keeps features where they were before the task"
    )


class PromptOptions(Options):
    """For methods whose prompts join the keys and values of some blocks."""

    length: int = Field(8, ge=2, multiple_of=2, description="length of a prompt (L_p): half for keys, half for values")
    blocks: list[int] = Field([0, 1, 2, 3, 4], description="attention blocks that get a prompt")
    prompt_lr_scale: float = Field(1.0, gt=0, description="rate of prompts and keys, relative to the classifier's")

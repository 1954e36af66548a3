"""How much work a teaching does, and what training adds to a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from vqprompt.core.backbones.config import ViTConfig, weight_shapes
from vqprompt.core.errors import UserError
from vqprompt.product.model.extractor import joined_blocks

if TYPE_CHECKING:
    from vqprompt.product.model.features import Features

EFFORTS = {
    "instant": "closed form on frozen features: seconds, and exact",
    "good": "prompts are trained",
    "best": "the network is tuned slowly",
    "auto": "measures first, and trains as at best if that is expected to be worth its time",
}
REMOVED = 0.2  # of the wrong answers, by training on all classes: 13 to 37 % on drawings that were not learned
WORTH, SECONDS_PER_POINT = 0.005, 600  # what a training must bring in accuracy, and may take for a hundredth of it
ENOUGH = 4  # images per class, on average; with fewer, training would only memorize them
GUARD = 0.2  # of the images is not trained on, to tell whether training pays, also if accuracy is not measured
MEASURED_WITH = 10  # images per class, or half of them: fewer say little about accuracy and about what training brings
LOOKS = 2.0  # forward passes per image with a trained network: the image and its mirror image


@dataclass(frozen=True)
class TrainingOf:
    """How an effort trains. method: which method of the learner. rate: its option that says how fast the network
    learns. lr: the loop's learning rate. passes: the work for one training image, in forward passes; one more if there
    are other classes to remember. options: of the method, where they differ from the defaults."""

    method: str
    rate: str
    lr: float
    passes: float
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 20


TRAINING_BATCH = 16  # small, so that few images still make many steps; the rates below are for it
IN_MEMORY = 8 * 257 * 384  # images × tokens × width of a step: below 1.5 GB with the embedded backbone at 224 px
TRAINING = {
    "good": TrainingOf("moving-prompts", "prompt_lr_scale", 0.01, 3.0),
    "best": TrainingOf(
        "moving-weights", "backbone_lr_scale", 0.0025, 4.0, {"rank": 16, "symmetric": True, "feature_distillation": 1.0}
    ),
}
LINEAR = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # in the order of a low-rank change's numbers
REDUCED = re.compile(r"cls_token|pos_embed|patch_embed\..*|blocks\..*\.(qkv|proj|fc1|fc2)\.weight")


@dataclass(frozen=True, eq=False)
class Trained:
    """What was trained, on top of the backbone. effort: "good" or "best". method, options: how it was trained. tensors:
    what was learned, by the names in the method's state."""

    effort: str
    method: str
    options: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def check_trained(trained: Trained, config: ViTConfig) -> None:
    """Refuse what was trained if it does not fit the backbone, or if features were made in another way than ours."""
    options = trained.options
    usual = {"class_tokens": joined_blocks(config), "scaled": True, "frozen_beside": False, "pool": 1}
    for name, value in usual.items():
        if options.get(name, value) != value:
            raise UserError(f"what was trained has the option {name}={options[name]!r} instead of {value}")
    blocks = options.get("blocks")
    expected: dict[str, tuple[int, ...]] = {}
    if trained.method == "moving-prompts":
        if not isinstance(blocks, list) or not all(block in range(config.depth) for block in blocks):
            raise UserError(f"what was trained has prompts for blocks that the backbone does not have ({blocks!r})")
        expected["pool.prompts"] = (len(blocks), 1, options.get("length", 0), config.width)
    else:
        rank, shapes = options.get("rank", 0), weight_shapes(config)
        expected = {f"vit.{name}": shape for name, shape in shapes.items() if not REDUCED.fullmatch(name)}
        for number in range(config.depth * len(LINEAR)):
            rows, columns = shapes[linear_weight(number)]
            expected |= {f"up{number}": (rows, rank), f"down{number}": (rank, columns)}
    given = {name: tensor.shape for name, tensor in trained.tensors.items()}
    if different := sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name)):
        name = different[0]
        raise UserError(
            f"what was trained does not fit the model's backbone ({name!r} is {given.get(name, 'missing')} and should "
            f"be {expected.get(name, 'missing')}); restore the file, or install a newer vqprompt"
        )


def linear_weight(number: int) -> str:
    block, layer = divmod(number, len(LINEAR))
    return f"blocks.{block}.{LINEAR[layer]}.weight"


def check_effort(effort: str, trained: Trained | None = None) -> None:
    """Refuse an effort that does not exist, lacks PyTorch, or does not fit what the model was trained with before."""
    if effort not in EFFORTS:
        raise UserError(f"effort {effort!r} is unknown; the efforts are {', '.join(EFFORTS)}")
    if effort != "instant" and find_spec("torch") is None:
        raise UserError(f"effort {effort!r} trains with PyTorch, which is missing; pip install 'vqprompt[train]'")
    if trained is not None and effort not in ("instant", "auto", trained.effort):
        raise UserError(
            f"effort {effort!r} cannot follow effort {trained.effort!r}: its training would start from the plain "
            f"network and lose what was trained before. Teach this model at {trained.effort} or instant, or make a "
            f"new one with --effort {effort}"
        )


def why_not_train(labels: Sequence[str]) -> str | None:
    """Why images of these classes cannot train anything; None if they can."""
    counts = Counter(labels)
    if len(counts) < 2:
        return "with one class there is nothing to tell apart"
    if len(labels) < ENOUGH * len(counts):
        return f"{len(labels)} images of {len(counts)} classes are too few (at least {ENOUGH} per class are needed)"
    return None


def loop_settings(effort: str, tokens: int, width: int) -> dict[str, Any]:
    """Settings of the training loop for a network. If smaller batches are needed to save memory, the learning rate
    falls with the square root of their size."""
    batch = max(1, min(TRAINING_BATCH, IN_MEMORY // (tokens * width)))
    rate = TRAINING[effort].lr * (batch / TRAINING_BATCH) ** 0.5
    return {"epochs": TRAINING[effort].epochs, "lr": rate, "batch_size": batch}


def held_out(labels: np.ndarray, ids: np.ndarray, share: float) -> np.ndarray:
    """Which pictures [n] training does not see: a share of each class, chosen by content, but not too few."""
    held = np.zeros(len(ids), bool)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        count = max(round(len(own) * (share or GUARD)), min(MEASURED_WITH, len(own) // 2))
        place = np.arange(len(own)) * count
        held[own[np.argsort(ids[own])][(place + count) // len(own) > place // len(own)]] = True
    return held


def seconds_of_training(plain: Features, effort: str, images: int, shown: int, remembers: bool) -> float:
    """An estimate. shown: how many of the images training sees. remembers: there are other classes, so features must
    stay close to where they were. All images are looked at before and after the training."""
    t, config = TRAINING[effort], plain.vit.config
    each = plain.seconds_in_batches(loop_settings(effort, config.tokens, config.width)["batch_size"])
    return float((t.epochs * shown * (t.passes + remembers) + 2 * LOOKS * images) * each)

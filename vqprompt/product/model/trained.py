"""Trains a model's network: prompts in every block (effort good), or a low-rank change of its weights (best).

Our own two methods are trained with the learner's loop, one task per teaching. The classifier is not trained: it is
solved from what is remembered, as at effort instant. Training moves features, so what is remembered of old classes must
move too. How far is estimated from the new images, whose features are computed before and after training.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Task
from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.statistics import Moving, fit_drift
from vqprompt.product.model.efforts import TRAINING, Trained, loop_settings
from vqprompt.product.model.features import BLOCKS, Features
from vqprompt.product.model.reading import NewPictures, features_of, held_out, records_with
from vqprompt.product.model.records import ClassRecord
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import find_method
from vqprompt.research.methods.moving import MovingMemory
from vqprompt.research.training.settings import Training
from vqprompt.research.training.view import View

MOVING = Moving(how="linear")
LOOKS = 2.0  # forward passes per image with a trained network: the image and its mirror image


@dataclass(frozen=True, eq=False)
class Retrained:
    """The network after a teaching. classes: all of them, the old ones moved. changed: those that got images."""

    trained: Trained
    classes: dict[str, ClassRecord]
    changed: dict[str, ClassRecord]


def retrain(
    plain: Features,
    before: Trained | None,
    effort: str,
    new: NewPictures,
    known: dict[str, ClassRecord],
    hold_out: float,
    seed: int,
    progress: Report,
) -> Retrained:
    """Train on new pictures, and add them to the records. plain: features of the backbone itself. before: what was
    trained so far."""
    order = np.lexsort((np.array(new.names, np.uint64), np.array(new.labels)))  # so that file names do not matter
    unseen = held_out(new, hold_out)
    shown = order[~unseen[order]]
    labels = np.unique(np.array(new.labels), return_inverse=True)[1]
    reports = _shares(
        progress,
        len(new.pictures) * (LOOKS if before else 1.0) * bool(known),
        TRAINING[effort].training["epochs"] * len(shown) * (TRAINING[effort].passes + bool(known)),
        len(new.pictures) * LOOKS,
    )
    old = features_of(plain if before is None else with_trained(plain, before), new, reports[0]) if known else []
    images = new.decoded.store(shown)
    trained = train(plain, before, effort, images, labels[shown], remembers=bool(known), seed=seed, progress=reports[1])
    now = features_of(with_trained(plain, trained), new, reports[2])
    if known:
        drift = fit_drift(torch.from_numpy(np.stack(old)), torch.from_numpy(np.stack(now)), MOVING)
        known = {
            name: record.moved(lambda points: drift.points(torch.from_numpy(points)).numpy())
            for name, record in known.items()
        }
    changed = records_with(now, new, known, unseen)
    return Retrained(trained, {**known, **changed}, changed)


def train(
    plain: Features, before: Trained | None, effort: str, images: Store, labels: np.ndarray, *, remembers: bool,
    seed: int, progress: Report,
) -> Trained:  # fmt: skip
    """One task of the learner. labels: [n], from 0. remembers: there are other classes, so features must stay close
    to where they were."""
    settings, config = TRAINING[effort], plain.vit.config
    tokens = min(BLOCKS, config.depth)
    options = {**MovingMemory.before, "statistics": False, "class_tokens": tokens, **settings.options}
    loop = Training(test_crop=plain.crop, **loop_settings(effort, config.tokens, config.width))
    learner = Learner(
        plain.vit, settings.method, seed=seed, device="cpu" if plain.device.type == "mps" else str(plain.device),
        compile="off", training=loop, **options,
    )  # fmt: skip
    method = learner.method
    if before is not None:
        _fill(method, before)
    learner.continue_after(1 if remembers else 0)
    shown = Images(images, np.arange(len(images)), labels)
    learner.learn(Task(0, [str(c) for c in range(int(labels.max()) + 1)], shown, shown), progress)
    tensors = {
        name: tensor.cpu().numpy()
        for name, tensor in method.state_dict().items()
        if method.saved(name) and not name.startswith(("head.", "pool.keys"))  # a single prompt needs no key
    }
    return Trained(effort, settings.method, method.options.model_dump(mode="json"), tensors)


def with_trained(plain: Features, trained: Trained) -> Features:
    """Features under a trained network: two class tokens, each scaled to the same length, averaged over an image and
    its mirror image."""
    method, vit = build(plain.vit, trained)
    tokens = trained.options["class_tokens"]

    def encode(images: torch.Tensor) -> torch.Tensor:
        features = method.features(View(vit, lambda: images))[0]
        return features.unflatten(1, (tokens, -1)).flip(1).flatten(1)  # the last block comes last, as without training

    return Features(vit, plain.crop, plain.device, encode)


def build(vit: ViT, trained: Trained) -> tuple[MovingMemory, ViT]:
    """The method with what it has learned, and the network it belongs to."""
    vit, kind = copy.deepcopy(vit), find_method(trained.method)
    method: Any = kind(vit, kind.Options(**kind.complete_options(trained.options)), 1).to(vit.cls_token.device)
    _fill(method, trained)
    return method.eval().requires_grad_(False), vit


def _fill(method: Any, trained: Trained) -> None:
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in trained.tensors.items()}
    try:
        unknown = method.load_state_dict(state, strict=False).unexpected_keys
    except RuntimeError as error:
        raise UserError(f"what was trained does not fit the model's backbone ({error}); restore the file") from None
    if unknown:
        raise UserError(f"what was trained has an unknown part, {unknown[0]!r}; install a newer vqprompt")
    method.loaded()


def _shares(progress: Report, *work: float) -> list[Report]:
    """One report per phase. Together they count up to the whole work, so the remaining time is that of all phases."""
    total, starts = sum(work), np.cumsum([0.0, *work])

    def of(phase: int) -> Report:
        def report(event: Progress) -> None:
            done = starts[phase] + work[phase] * (event.done / event.total if event.total else 0)
            progress(Progress(Stage.LEARNING, done, total))

        return report

    return [of(phase) for phase in range(len(work))]

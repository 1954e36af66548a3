"""Trains a model's network: prompts in every block (effort good), or a low-rank change of its weights (best).

Our own two methods are trained with the learner's loop, one task per teaching. The classifier is not trained: it is
solved from what is remembered, as at effort instant. Training moves features, so what is remembered of old classes must
move too. How far is estimated from the new images, whose features are computed before and after training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Task
from vqprompt.core.errors import UserError, explain
from vqprompt.core.progress import Progress, Report, Stage
from vqprompt.core.statistics.drift import Moving, fit_drift
from vqprompt.product.model.efforts import TRAINING, Trained, check_trained, loop_settings
from vqprompt.product.model.extractor import Extractor, joined_blocks
from vqprompt.product.model.features import Features, last_block_last
from vqprompt.product.model.ingest import NewPictures, features_of
from vqprompt.product.model.records import ClassRecord, to_fixed_point
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
    extractor: Callable[[Trained | None], Extractor],
    before: Trained | None,
    effort: str,
    new: NewPictures,
    known: Mapping[str, ClassRecord],
    hold_out: float,
    seed: int,
    progress: Report,
) -> Retrained:
    """Train on new pictures, and add them to the records. plain: the backbone itself. extractor: what computes
    features, also when the model is asked. before: what was trained so far."""
    assert new.decoded is not None and new.rows is not None
    names, labels = np.unique(new.labels, return_inverse=True)
    order = np.lexsort((new.ids, labels))  # so that file names do not matter
    unseen = held_out(labels, new.ids, hold_out)
    shown = order[~unseen[order]]
    reports = _shares(
        progress,
        len(new) * (LOOKS if before else 1.0) * bool(known),
        TRAINING[effort].training["epochs"] * len(shown) * (TRAINING[effort].passes + bool(known)),
        len(new) * LOOKS,
    )
    old = _features(extractor(before), new, reports[0]) if known else None
    images = new.decoded.store(new.rows[shown])
    trained = train(plain, before, effort, images, labels[shown], remembers=bool(known), seed=seed, progress=reports[1])
    now = _features(extractor(trained), new, reports[2])
    if old is not None:
        drift = fit_drift(torch.from_numpy(old), torch.from_numpy(now), MOVING)
        known = {
            name: record.moved(lambda points: drift.points(torch.from_numpy(points)).numpy())
            for name, record in known.items()
        }
    fixed, changed = to_fixed_point(now), {}
    for number, name in enumerate(names.tolist()):
        own = labels == number
        record = ClassRecord.of(new.ids[own], fixed[own], unseen[own])
        changed[name] = known[name].merged(record) if name in known else record
    return Retrained(trained, {**known, **changed}, changed)


def _features(extractor: Extractor, new: NewPictures, progress: Report) -> np.ndarray:
    """Of all new pictures [n, D]."""
    features = []
    for _, feature in features_of(new, extractor, progress):
        if isinstance(feature, Exception):
            raise feature
        features.append(feature)
    return np.stack(features)


def held_out(labels: np.ndarray, ids: np.ndarray, share: float) -> np.ndarray:
    """Which pictures [n] training does not see: a share of each class, chosen by content."""
    held = np.zeros(len(ids), bool)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        place = np.arange(len(own))
        chosen = ((place + 1) * share + 0.5).astype(int) > (place * share + 0.5).astype(int)
        held[own[np.argsort(ids[own])][chosen]] = True
    return held


def train(
    plain: Features, before: Trained | None, effort: str, images: Store, labels: np.ndarray, *, remembers: bool,
    seed: int, progress: Report,
) -> Trained:  # fmt: skip
    """One task of the learner. labels: [n], from 0. remembers: there are other classes, so features must stay close
    to where they were."""
    settings, config = TRAINING[effort], plain.vit.config
    tokens = joined_blocks(config)
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
    state = method.state_dict()
    unneeded = ("head.", "pool.keys")  # the classifier is solved for, and a single prompt needs no key
    kept = [name for name in state if method.saved(name) and not name.startswith(unneeded)]
    tensors = {name: state[name].cpu().numpy() for name in kept}
    return Trained(effort, settings.method, method.options.model_dump(mode="json"), tensors)


def with_trained(plain: Features, trained: Trained) -> Features:
    """Features under a trained network: two class tokens, each scaled to the same length, averaged over an image and
    its mirror image."""
    method, vit = build(plain.vit, trained)
    tokens = trained.options["class_tokens"]

    def encode(images: torch.Tensor) -> torch.Tensor:
        return last_block_last(method.features(View(vit, lambda: images))[0], tokens)

    return Features(vit, plain.crop, plain.device, encode, plain.fingerprint)


def build(vit: ViT, trained: Trained) -> tuple[MovingMemory, ViT]:
    """The method with what it has learned, and the network it belongs to."""
    vit, kind = copy.deepcopy(vit), find_method(trained.method)
    try:
        options = kind.Options(**{**MovingMemory.before, **trained.options})
    except ValidationError as error:
        raise UserError(explain(error, "what was trained has options that are not possible")) from None
    method: Any = kind(vit, options, 1).to(vit.cls_token.device)
    _fill(method, trained)
    return method.eval().requires_grad_(False), vit


def _fill(method: Any, trained: Trained) -> None:
    check_trained(trained, method.vit.config)
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in trained.tensors.items()}
    method.load_state_dict(state, strict=False)
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

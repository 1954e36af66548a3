"""Trains a model's network: prompts in every block (effort good), or a low-rank change of its weights (best).

Our own two methods are trained with the learner's loop, one task per teaching. The classifier is not trained: it is
solved from what is remembered, as at effort instant. Training moves features, so what is remembered of old classes must
move too. How far is estimated from the new images, whose features are computed before and after training; what the
estimate may be off by goes into the memory as well (`move_records`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
from vqprompt.product.model.calibration import Measurements
from vqprompt.product.model.efforts import LOOKS, TRAINING, Trained, check_trained, held_out, loop_settings
from vqprompt.product.model.extractor import Extractor, joined_blocks, unless_error
from vqprompt.product.model.features import Features
from vqprompt.product.model.ingest import NewPictures, features_of
from vqprompt.product.model.knowledge import Event, Knowledge
from vqprompt.product.model.records import ClassRecord, added, to_fixed_point
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import find_method
from vqprompt.research.methods.moving import MovingMemory
from vqprompt.research.migration import EARLIER_OPTIONS
from vqprompt.research.training.settings import Training
from vqprompt.research.training.view import View

MOVING = Moving(how="validated")
SHARES = (1.0, 0.5)  # of a teaching's training, the first that pays is kept


@dataclass(frozen=True, eq=False)
class Retrained:
    """The network after a teaching. records: of all classes, the old ones moved. kept: the share of the training that
    was kept; with 0 the network is as it was. expected: accuracy on held-out images without and with the training; None
    if nothing was held out."""

    trained: Trained | None
    records: dict[str, ClassRecord]
    kept: float
    expected: tuple[float, float] | None


def retrain(
    former: Knowledge, new: NewPictures, effort: str, plain: Features, extractor: Callable[[Trained | None], Extractor],
    hold_out: float, seed: int, progress: Report,
) -> Retrained:  # fmt: skip
    """Train on new pictures, and add them to the records. plain: the backbone itself. extractor: what computes
    features, also when the model is asked.

    Training is kept only as far as it pays: if held-out images of all classes are recognized worse than without it, by
    more than chance explains, half of it is kept, or nothing. Images of old classes count where the memory says they
    are now, with its doubt.
    """
    assert new.decoded is not None
    before, known, labels = former.trained, former.records, np.array(new.labels)
    names = np.unique(labels).tolist()
    order = np.lexsort((new.ids, labels))  # so that file names do not matter
    unseen = held_out(labels, new.ids, hold_out)
    shown = order[~unseen[order]]
    reports = _shares(
        progress,
        len(new) * (LOOKS if before else 1.0),
        TRAINING[effort].epochs * len(shown) * (TRAINING[effort].passes + bool(known)),
        len(new) * LOOKS,
    )
    old = _features(extractor(before), new, reports[0])
    pixels: Any = new.decoded
    rows_shown = np.array([new.decoded.places[content] for content in new.ids[shown].tolist()])
    store = Store(pixels, np.array(new.decoded.aspects), "")
    images = Images(store, rows_shown, np.searchsorted(names, labels[shown]))
    share = len(names) / len(known.keys() | set(names))
    method = train(plain, before, effort, images, share if known else None, seed=seed, progress=reports[1])
    rows = {name: np.flatnonzero(labels == name) for name in names}

    def remembered(features: np.ndarray, memory: Mapping[str, ClassRecord], held: np.ndarray) -> dict[str, ClassRecord]:
        own = {n: ClassRecord.of(new.ids[r], to_fixed_point(features[r]), held[r]) for n, r in rows.items()}
        return added(memory, own)

    without = _measured(remembered(old, known, unseen))
    for kept in SHARES:
        if kept < 1:
            if before is None:
                break  # there is no training before this one to go back to
            method.go_back(kept, build(plain.vit, before)[0])
        trained = _trained(effort, method)
        now = _features(extractor(trained), new, reports[2])
        records = remembered(now, move_records(known, old, now, labels, seed), unseen)
        measured = _measured(records)
        expected = None if without is None or measured is None else (without.accuracy, measured.accuracy)
        if pays(without, measured):
            return Retrained(trained, records, kept, expected)
    return Retrained(before, remembered(old, known, np.ones_like(unseen)), 0.0, expected)  # nothing was trained on


def _measured(records: Mapping[str, ClassRecord]) -> Measurements | None:
    """On held-out images, left out one at a time."""
    return Knowledge().changed(Event.now("learned"), records=records).measurements


def pays(without: Measurements | None, measured: Measurements | None) -> bool:
    """Whether training is worth keeping: its accuracy is not below that without it by more than chance explains."""
    if without is None or measured is None:
        return True
    return measured.accuracy >= without.accuracy - without.standard_error


def move_records(
    known: Mapping[str, ClassRecord], old: np.ndarray, now: np.ndarray, labels: np.ndarray, seed: int
) -> dict[str, ClassRecord]:
    """Classes after features moved. old, now: features of the same new images [n, D], before and after. labels: their
    classes [n].

    The map tells where an image would be on average. Each image is off by more: as far as the images of a class that
    is left out of the fit. So the remembered images are scattered about their mean by that. Their accuracy, the
    percentages, the threshold and the covariance then include the doubt, and it adds up from teaching to teaching.
    """
    if not known:
        return {}
    numbers = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    drift = fit_drift(torch.from_numpy(old), torch.from_numpy(now), MOVING, numbers)
    assert drift.scatter is not None
    variances, vectors = np.linalg.eigh(drift.scatter.numpy())
    root = vectors * np.sqrt(np.maximum(variances, 0))

    def moved(record: ClassRecord) -> ClassRecord:
        doubt = np.random.default_rng([seed, int(record.ids[0])]).standard_normal(record.kept.shape) @ root.T
        return record.moved(lambda points: drift.points(torch.from_numpy(points)).numpy(), doubt)

    return {name: moved(record) for name, record in known.items()}


def _features(extractor: Extractor, new: NewPictures, progress: Report) -> np.ndarray:
    """Of all new pictures [n, D]."""
    return np.stack([unless_error(feature) for feature in features_of(new, extractor, progress)])


def train(
    plain: Features, before: Trained | None, effort: str, images: Images, share: float | None, *,
    seed: int, progress: Report,
) -> MovingMemory:  # fmt: skip
    """One task of the learner. images: with labels from 0. share: of these classes among all; the smaller it is, the
    slower the network learns, and its features must stay close to where they were. None: there are no other classes."""
    settings, config = TRAINING[effort], plain.vit.config
    kind, tokens = find_method(settings.method), joined_blocks(config)
    rate = getattr(kind.Options(), settings.rate) * (share or 1.0)
    own = {"statistics": False, "class_tokens": tokens, settings.rate: rate}
    options = {**EARLIER_OPTIONS[settings.method], **own, **settings.options}
    loop = Training(test_crop=plain.crop, **loop_settings(effort, config.tokens, config.width))
    learner = Learner(
        plain.vit, settings.method, seed=seed, device="cpu" if plain.device.type == "mps" else str(plain.device),
        compile="off", training=loop, **options,
    )  # fmt: skip
    method = learner.method
    assert isinstance(method, MovingMemory)
    if before is not None:
        _fill(method, before)
    method.trained = before is not None
    learner.continue_after(0 if share is None else 1)
    learner.learn(Task(0, [str(c) for c in range(int(images.labels.max()) + 1)], images, images), progress)
    return method


def _trained(effort: str, method: MovingMemory) -> Trained:
    """What a model keeps of it."""
    state = method.state_dict()
    unneeded = ("head.", "pool.keys")  # the classifier is solved for, and a single prompt needs no key
    kept = [name for name in state if method.saved(name) and not name.startswith(unneeded)]
    tensors = {name: state[name].cpu().numpy().copy() for name in kept}
    return Trained(effort, TRAINING[effort].method, method.options.model_dump(mode="json"), tensors)


def with_trained(plain: Features, trained: Trained) -> Features:
    """Features under a trained network: two class tokens, each scaled to the same length, averaged over an image and
    its mirror image."""
    method, vit = build(plain.vit, trained)
    method.token_blocks = tuple(range(-method.class_tokens, 0))  # in models, the last block comes last

    def encode(images: torch.Tensor) -> torch.Tensor:
        return method.features(View(vit, lambda: images))[0]

    return Features(vit, plain.crop, plain.device, encode, plain.fingerprint)


def build(vit: ViT, trained: Trained) -> tuple[MovingMemory, ViT]:
    """The method with what it has learned, and the network it belongs to."""
    check_trained(trained, vit.config)  # before memory is taken for what the options say
    vit, kind = copy.deepcopy(vit), find_method(trained.method)
    try:
        options = kind.Options(**{**EARLIER_OPTIONS.get(trained.method, {}), **trained.options})
    except ValidationError as error:
        raise UserError(explain(error, "what was trained has options that are not possible")) from None
    method: Any = kind(vit, options, 1).to(vit.cls_token.device)
    _fill(method, trained)
    return method.eval().requires_grad_(False), vit


def _fill(method: Any, trained: Trained) -> None:
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in trained.tensors.items()}
    method.load_state_dict(state, strict=False)
    method.loaded()


def _shares(progress: Report, *work: float) -> list[Report]:
    """One report per phase. Together they count up to the whole work, so the remaining time is that of all phases."""

    def report(before: float, own: float, event: Progress) -> None:
        share = event.done / event.total if event.total else 0
        progress(Progress(Stage.LEARNING, before + own * share, sum(work)))

    return [partial(report, sum(work[:phase]), own) for phase, own in enumerate(work)]

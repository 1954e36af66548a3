"""A model's classifier, and what was measured about it: computed from what is remembered, after every change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vqprompt.core.statistics.discriminant import Discriminant
from vqprompt.product.model.calibration import OF_OLD_FILES, Background, Calibration, Weighing, solve
from vqprompt.product.model.file import Content
from vqprompt.product.model.records import ClassRecord, gram_of


def solved(content: Content, gram: np.ndarray) -> Content:
    """The content with its classifier, and what was measured about it."""
    measure = content.facts.get("measured", True)
    moved = content.facts.get("moved")
    if not content.classes:
        return replace(content, facts={"measured": measure}, solved=None, spread=None)
    names, records = list(content.classes), list(content.classes.values())
    solution = solve(records, gram)
    c = solution.calibration
    facts: dict[str, Any] = {
        "measured": measure,
        "shrinkage": solution.shrinkage,
        "temperature": c.temperature,
        "certainty": list(c.certainty),
        "nearness": list(c.nearness),
        "threshold": c.threshold if np.isfinite(c.threshold) else None,
        "background": solution.background.constant,
        "weighing": vars(c.weighing),
    }
    if moved:
        facts["moved"] = moved
    testable = (solution.tested > 0) & [record.unseen.any() for record in records]
    if measure and testable.any() and len(names) > 1:
        facts["accuracy"] = float((solution.right[testable] / solution.tested[testable]).mean())
        facts["per_class"] = {
            n: [int(r), int(t)]
            for n, r, t in zip(names, solution.right * testable, solution.tested * testable, strict=True)
        }
        facts["calibration_error"] = list(solution.calibration_error)
    spread = np.concatenate([solution.background.matrix, solution.background.vector[None]])
    return replace(content, facts=facts, solved=solution.discriminant, spread=spread)


def calibration_of(facts: dict[str, Any]) -> Calibration:
    threshold = facts["threshold"]
    return Calibration(
        facts["temperature"], tuple(facts["certainty"]), tuple(facts["nearness"]),
        -np.inf if threshold is None else threshold,
        Weighing(**facts["weighing"]) if "weighing" in facts else OF_OLD_FILES,
    )  # fmt: skip


def background_of(content: Content) -> Background:
    assert content.spread is not None
    return Background(content.spread[:-1], content.spread[-1], content.facts["background"])


def updated_gram(gram: np.ndarray, now: dict[str, ClassRecord], then: dict[str, ClassRecord]) -> np.ndarray:
    """The gram matrix of the classes `then`, from that of the classes `now`: whole numbers, so this is exact."""
    old, new = ({id(record): record for record in classes.values()} for classes in (now, then))
    gram = gram.copy()
    for key in old.keys() - new.keys():
        gram -= gram_of(old[key])
    for key in new.keys() - old.keys():
        gram += gram_of(new[key])
    return gram


def renamed(content: Content, old: str, new: str) -> Content:
    """The same content with a class under another name. Nothing is solved again, so no answer changes."""

    def name(of: str) -> str:
        return new if of == old else of

    names = [name(n) for n in content.classes]
    order = sorted(range(len(names)), key=names.__getitem__)
    records = list(content.classes.values())
    history = tuple(
        {**event, "classes": {name(n): count for n, count in event["classes"].items()}} if "classes" in event else event
        for event in content.history
    )
    facts = dict(content.facts)
    if "per_class" in facts:
        facts["per_class"] = {names[i]: facts["per_class"][list(content.classes)[i]] for i in order}
    if "moved" in facts:
        facts["moved"] = sorted(name(n) for n in facts["moved"])
    discriminant = content.solved
    if discriminant is not None:
        rows = [np.flatnonzero(discriminant.owners == i) for i in order]
        owners = np.repeat(np.arange(len(order)), [len(r) for r in rows])
        taken = np.concatenate(rows)
        discriminant = Discriminant(discriminant.weights[taken], discriminant.bias[taken], owners)
    return replace(
        content, classes={names[i]: records[i] for i in order}, history=history, facts=facts, solved=discriminant
    )

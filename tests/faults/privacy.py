"""Forgetting for good after any story: a class is taught, renamed, forgotten, undone and returned to, in random order.
Afterwards neither its names nor anything of its images is in the model's file or beside it."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np

from faults.models import BACKBONE
from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model.records import ClassRecord

NAMES = ("grey heron", "ardea cinerea", "graureiher")  # of the class that is to be forgotten
OTHERS = ("apple", "lorry", "zebra")


def try_privacy(rng: random.Random, folder: Path) -> str:
    """One story. Some of it happens between saving and loading, as in several commands."""
    made = np.random.default_rng(rng.getrandbits(32))
    path, secret, story = folder / "m.vqp", list[ClassRecord](), list[str]()
    model = Model(BACKBONE, size=28, device="cpu")
    for name in OTHERS[: rng.randint(1, 3)]:
        model.learn_records({name: _record(made, model.backbone.width)})
    for _ in range(rng.randint(2, 12)):
        now = next((name for name in NAMES if name in model.classes), None)
        step = rng.choice(("teach", "teach", "other", "rename", "rename other", "forget", "undo", "return", "save"))
        story.append(step)
        with suppress(UserError):  # a step that cannot be done now
            if step == "teach":
                secret.append(_record(made, model.backbone.width))
                model.learn_records({now or rng.choice(NAMES): secret[-1]})
            elif step == "other":
                model.learn_records({rng.choice(OTHERS): _record(made, model.backbone.width)})
            elif step == "rename" and now:
                model.rename(now, rng.choice(NAMES))
            elif step == "rename other":
                model.rename(rng.choice(OTHERS), rng.choice(OTHERS))
            elif step == "forget" and now:
                model.forget(now)
            elif step == "undo":
                model.undo(rng.randint(1, 3))
            elif step == "return":
                model.return_to(rng.choice(model.versions).number)
            elif step == "save":
                model.save(path)
                model = Model.load(path, device="cpu", backbone=BACKBONE)
    model.save(path)
    if rng.random() < 0.5:
        model = Model.load(path, device="cpu", backbone=BACKBONE)
    before = {name: model.knowledge.classes[name].total for name in model.classes if name not in NAMES}
    for name in rng.sample(NAMES, len(NAMES)):
        with suppress(UserError):  # it never had this name, or that is forgotten already
            model.forget(name, for_good=True)
    model.save(path)
    sought = [name.encode() for name in NAMES]
    sought += [part.tobytes() for record in secret for part in (record.ids[:1], record.kept[0], record.total)]
    content = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    if left := [trace[:30] for trace in sought if trace in content]:
        return f"bad: {story}: {len(left)} traces, such as {left[0]!r}"
    loaded = Model.load(path, device="cpu", backbone=BACKBONE)
    kept = {name: loaded.knowledge.classes[name].total for name in loaded.classes}
    if kept.keys() != before.keys() or not all(np.array_equal(kept[name], before[name]) for name in kept):
        return f"bad: {story}: other classes have changed"
    return "handled"


def _record(made: np.random.Generator, width: int) -> ClassRecord:
    images = int(made.integers(1, 5))
    ids = made.integers(1 << 32, 1 << 63, images, np.uint64)
    return ClassRecord.of(ids, made.integers(-3000, 3000, (images, width)).astype(np.int16))

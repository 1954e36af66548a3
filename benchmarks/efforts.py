"""What efforts good and best are worth in many small lessons, how long they take, and what a model says of itself.

    python benchmarks/efforts.py                                    # instant, good and best
    python benchmarks/efforts.py --effort good --lessons 50 --classes 1
    python benchmarks/efforts.py --data cub200.zip --size 112 --device cuda --lessons 40 --at 50 100 200
    python benchmarks/efforts.py --splits 30                        # what chance alone does to the last of these

Each lesson brings drawings of new things, 20 of each; once all 50 things are known, it brings 20 other drawings of
things that are known. With --data it brings images of an archive (train/CLASS/…, test/CLASS/…). After some lessons: the
accuracy on 20 unseen images of each class, on those of the first ten classes, and what the model says of itself: its
accuracy, how far its percentages are off, and how many images of known classes it calls unknown (it aims at 5 %).

With --splits nothing is trained: things and drawings are drawn at random, a model learns 20 drawings of each thing, and
what it says of itself is compared with what the 80 others show: with all 20 drawings left out in turn, as at effort
instant, and with 10 of them, as after a training that does not see the others.
"""

from __future__ import annotations

import argparse
import os
import time
import zipfile
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt import Model
from vqprompt.core.metrics import calibration_error, reliability
from vqprompt.product.model.knowledge import Knowledge
from vqprompt.product.model.records import STEP, ClassRecord, to_fixed_point
from vqprompt.product.model.teaching import Plan

LEARNED, ASKED = 20, 20
Pictures = dict[str, list[Any]]  # by class


def drawings() -> tuple[Pictures, Pictures]:
    """Drawings to learn and to ask about."""
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file)
        images, names = packed["images"].reshape(50, 100, 28, 28), [str(name) for name in packed["classes"]]
    return dict(zip(names, images[:, :-ASKED], strict=True)), dict(zip(names, images[:, -ASKED:], strict=True))


def archive(path: Path) -> tuple[Pictures, Pictures]:
    parts: dict[str, Pictures] = {"train": defaultdict(list), "test": defaultdict(list)}
    with zipfile.ZipFile(path) as file:
        for member in sorted(name for name in file.namelist() if not name.endswith("/")):
            *_, part, name, _ = member.split("/")
            if len(parts[part][name]) < (LEARNED if part == "train" else ASKED):
                parts[part][name].append(file.read(member))
    return parts["train"], parts["test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", action="append", choices=["instant", "good", "best"], help="all by default")
    parser.add_argument("--data", type=Path, help="an archive instead of the embedded drawings")
    parser.add_argument("--size", type=int, default=42, help="image size in px (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--lessons", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--classes", type=int, default=5, help="per lesson (default: %(default)s)")
    parser.add_argument("--splits", type=int, help="compare what models say of themselves with the truth, this often")
    parser.add_argument("--at", type=int, nargs="+", default=[10, 30, 50], help="numbers of classes to ask at")
    options = parser.parse_args()
    learned, asked = drawings() if options.data is None else archive(options.data)
    names = list(learned)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.device}, {options.size} px")
    if options.splits:
        return compare_splits(options)
    for effort in options.effort or ["instant", "good", "best"]:
        model, seconds, plans = Model(size=options.size, device=options.device), 0.0, list[Plan]()
        for lesson in range(options.lessons):
            began, first = time.monotonic(), lesson * options.classes
            again, place = divmod(first, len(names))
            taught = names[place : place + options.classes]
            shown = [(image, name) for name in taught for image in learned[name][again * LEARNED :][:LEARNED]]
            done = model.learn(
                [image for image, _ in shown], [name for _, name in shown], effort=effort, announce=plans.append
            )
            seconds += time.monotonic() - began
            for note in done.notes:
                print(f"  lesson {lesson + 1}: {note}")
            known = names[: first + options.classes]
            if (again or len(known) not in options.at) and lesson + 1 < options.lessons:
                continue
            right, shares, familiar = ask(model, {name: asked[name] for name in known})
            off = calibration_error(reliability(shares.max(1), right, 15))
            first_ten = right[: sum(len(asked[name]) for name in known[:10])].mean()
            print(
                f"{effort:8}{len(known):4} classes, lesson {lesson + 1}: {right.mean():6.1%} right, says "
                f"{model.accuracy or np.nan:.1%}; first ten {first_ten:6.1%}; percentages off by {off:5.1%}; "
                f"unknown {(familiar < 0).mean():5.1%}; "
                f"{seconds:.0f} s so far, planned {sum(plan.seconds for plan in plans):.0f} s",
                flush=True,
            )


def compare_splits(options: argparse.Namespace) -> None:
    learned, asked = drawings()
    images = np.stack([np.concatenate([learned[name], asked[name]]) for name in learned])
    features = Model(size=options.size, device=options.device).embed([*images.reshape(-1, *images.shape[2:])])
    features, rng = to_fixed_point(features).reshape(*images.shape[:2], -1), np.random.default_rng(0)
    for classes in options.at:
        for tested in (LEARNED, LEARNED // 2):
            off = []
            for _ in range(options.splits):
                chosen = [rng.permutation(own) for own in rng.permutation(features)[:classes]]
                ids, unseen = np.arange(LEARNED, dtype=np.uint64), np.arange(LEARNED) < tested
                records = {f"{c:03}": ClassRecord.of(ids, own[:LEARNED], unseen) for c, own in enumerate(chosen)}
                known = Knowledge(classes=records).solved(Knowledge())
                assert known.solution is not None and known.accuracy is not None
                others = np.concatenate([own[LEARNED:] for own in chosen]) * STEP
                right = known.solution.judge(others)[0].argmax(1).reshape(classes, -1) == np.arange(classes)[:, None]
                off.append([known.accuracy - right.mean(), known.accuracy - right[:, :ASKED].mean()])
            points = 100 * np.array(off)
            once = np.abs(points[:, 1])
            print(
                f"{classes:3} classes, {tested} drawings of each tested: says {points[:, 0].mean():+.1f} ± "
                f"{points[:, 0].std(ddof=1) / len(off) ** 0.5:.1f} points more than 80 others show; in a single split, "
                f"{ASKED} others: off by {once.mean():.1f} on average, {once.max():.1f} at most, by more than 4 points "
                f"in {(once > 4).mean():.0%} of the splits",
                flush=True,
            )


def ask(model: Model, pictures: Pictures) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which answers are right, the percentages and how familiar the pictures are."""
    shares, familiar = model.judge(model.embed([image for own in pictures.values() for image in own]))
    truth = np.repeat([model.classes.index(name) for name in pictures], [len(own) for own in pictures.values()])
    return shares.argmax(1) == truth, shares, familiar


if __name__ == "__main__":
    main()

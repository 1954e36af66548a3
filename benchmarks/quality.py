"""How good the closed form is on features: accuracy, shrinkage, believable percentages, and the unknown.

    python benchmarks/quality.py birds=cub.npz flowers=flowers.npz drawings=drawings.npz --size 112

compares a model's classifier (`instant`) with others on the same features, over streams of random classes, and shows
whether percentages and the threshold for unknown hold. Each npz has x: features [n, D], y: classes [n] and test: which
images are for testing [n]. Everything learns from training images and is tested with test images.

--parts kinds: percentages and the threshold where classes of two sets are in one model.
--parts unknown: what is refused of classes that were never taught, with and without the world. --parts cottage: a model
of seven classes of the first set is taught one image of the second; what becomes of the second set's other images.
--parts choose: weights of what makes an image familiar, compared on training images alone, a third of them held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from common import make_parser, write_json
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vqprompt import ClosedFormClassifier
from vqprompt.core.metrics import calibration_error, reliability
from vqprompt.core.statistics.discriminant import Basis, join_modes, probabilities
from vqprompt.core.statistics.leave_one_out import LeaveOneOut
from vqprompt.core.statistics.world import World, find_world
from vqprompt.product.model.calibration import (
    Solution,
    Weighing,
    calibration_error_of,
    certainty_of,
    familiarity,
    solve,
)
from vqprompt.product.model.closed_form import SHRINKAGES, Trials, groups_of
from vqprompt.product.model.records import ClassRecord, gram_of, to_fixed_point

FINGERPRINT = "64187b76e01004e6"  # of the embedded backbone
HELD_OUT = 1 / 3  # of the training images of a class, where something is chosen
WEIGHTS = {
    "nearness": (0.25, 0.5, 1.0, 2.0),
    "world": (0.0, 0.25, 0.5, 1.0),
    "steeper": (0.0, 2.0, 6.0, 10.0, 20.0, 40.0),
}


@dataclass(frozen=True, eq=False)
class Images:
    """Features of images. x: [n, D]. y: [n], their classes. test: [n], which of them are for testing."""

    x: np.ndarray
    y: np.ndarray
    test: np.ndarray

    def some(self, rows: np.ndarray) -> Images:
        return Images(self.x[rows], self.y[rows], self.test[rows])

    def and_others(self, others: Images) -> Images:
        """The classes of both."""
        y = np.concatenate([self.y, others.y + self.y.max() + 1])
        return Images(np.concatenate([self.x, others.x]), y, np.concatenate([self.test, others.test]))

    def held_out(self, seed: int = 0) -> Images:
        """The training images alone, a third of each class taken for testing."""
        training = self.some(~self.test)
        rng, test = np.random.default_rng(seed), np.zeros(len(training.y), bool)
        for c in np.unique(training.y):
            rows = rng.permutation(np.flatnonzero(training.y == c))
            test[rows[: round(HELD_OUT * len(rows))]] = True
        return replace(training, test=test)


def last_two_blocks(x: np.ndarray) -> np.ndarray:
    """Features [n, D]; of [n, blocks, D] the last two blocks side by side, as a model has them."""
    return x[:, -2:].reshape(len(x), -1) if x.ndim == 3 else x


def read_images(path: Path) -> Images:
    """An npz of x (see `last_two_blocks`), y and test."""
    data = np.load(path)
    return Images(last_two_blocks(data["x"]), data["y"], data["test"])


def taught(images: Images, classes: np.ndarray) -> tuple[dict[str, ClassRecord], np.ndarray]:
    """The training images of some classes, as a model keeps them, and their gram matrix."""
    names = np.random.default_rng(0).permutation(len(images.y)).astype(np.uint64)
    rows = [(images.y == c) & ~images.test for c in classes]
    records = {
        str(c): ClassRecord.of(names[r], to_fixed_point(images.x[r])) for c, r in zip(classes, rows, strict=True)
    }
    return records, np.sum([gram_of(r) for r in records.values()], axis=0)


def accuracy_and_calibration(images: Images) -> dict[str, float]:
    """In percent, on the test images; the shrinkage as it was estimated beside every fixed one."""
    classes = np.unique(images.y)
    named, gram = taught(images, classes)
    records = list(named.values())
    found, groups = solve(named, gram), groups_of(records, gram)
    assert found.measurements is not None
    right, tested = map(sum, zip(*found.measurements.per_class.values(), strict=True))
    basis, trials = Basis.of(groups), Trials.of(records, range(len(records)))
    truth, asked = np.searchsorted(classes, images.y[images.test]), images.x[images.test]
    accuracy = {}
    for s in SHRINKAGES:
        means = LeaveOneOut(groups, basis, trials.features, trials.groups).at(s).means
        accuracy[s] = 100 * float((basis.discriminant(means, s, groups.owners).scores(asked).argmax(1) == truth).mean())
    best = max(SHRINKAGES, key=lambda s: accuracy[s])
    scores = found.discriminant.scores(asked)
    shares = probabilities(scores, found.calibration.temperature)
    return {
        "classes": len(classes),
        "images to learn": int((~images.test).sum()),
        "images to test": len(asked),
        "accuracy": 100 * float((shares.argmax(1) == truth).mean()),
        "accuracy by leaving one out": 100 * right / tested,
        "estimated shrinkage": found.shrinkage,
        "best fixed shrinkage": best,
        "accuracy at the best fixed shrinkage": accuracy[best],
        **{f"accuracy at shrinkage {s}": accuracy[s] for s in SHRINKAGES},
        "calibration error without temperature": 100 * calibration_error_of(probabilities(scores, 1.0), truth),
        "calibration error": 100 * calibration_error_of(shares, truth),
    }


class Unknown:
    """Known and unknown images as a model that knows some classes sees them."""

    def __init__(
        self, images: Images, known: np.ndarray, strangers: np.ndarray | None = None, world: World | None = None
    ) -> None:
        """known: the classes that are taught. strangers: features of what is unknown; by default the test images of
        the other classes."""
        mine = np.isin(images.y, known)
        asked = images.x[mine & images.test]
        other = images.x[~mine & images.test] if strangers is None else strangers
        self.solved: Solution = solve(*taught(images, known), world=world)
        self.is_known = np.arange(len(asked) + len(other)) < len(asked)
        x = np.concatenate([asked, other])
        modes, t = self.solved.discriminant.scores_of_modes(x), self.solved.calibration.temperature
        scores = join_modes(modes, self.solved.discriminant.owners).astype(np.float64)
        rivals = self.solved.rivals
        self.ahead = None if rivals is None else rivals.ahead(x, self.solved.background, modes)
        self.shares = probabilities(scores, t)
        self.nearness = self.solved.background.scores(x) + 2 * scores.max(1)
        best = scores.max(1)
        self.rivals = {
            "maximum probability": self.shares.max(1),
            "energy": t * np.log(np.exp((scores - best[:, None]) / t).sum(1)) + best,
            "largest logit": best,
            "relative Mahalanobis": self.nearness,
        }

    def auroc(self, values: np.ndarray) -> float:
        return 100 * float(roc_auc_score(self.is_known, values))

    def ours(self, weighing: Weighing | None = None) -> np.ndarray:
        calibration = self.solved.calibration
        if weighing is not None:
            calibration = replace(calibration, weighing=weighing)
        return familiarity(self.shares, self.nearness, calibration, self.ahead)

    def refused(self, weighing: Weighing | None = None) -> float:
        """Of unknown images, if 95 % of the known ones are accepted, in percent."""
        ours = self.ours(weighing)
        return 100 * float((ours[~self.is_known] < np.quantile(ours[self.is_known], 0.05)).mean())

    def measured(self) -> dict[str, float]:
        """AUROC of the score and of its rivals, and what the threshold does, in percent."""
        ours, rivals = self.ours(), {name: self.auroc(values) for name, values in self.rivals.items()}
        accepted = ours >= self.solved.calibration.threshold
        return {
            "ours": self.auroc(ours),
            **rivals,
            "ahead of the best": self.auroc(ours) - max(rivals.values()),
            "certainty alone": self.auroc(certainty_of(self.shares, Weighing().certainty)),
            "known images accepted": 100 * float(accepted[self.is_known].mean()),
            "unknown images refused": 100 * float((~accepted[~self.is_known]).mean()),
            "refused at 95 % accepted": self.refused(),
        }


def half_known(images: Images, seed: int, world: World | None = None) -> Unknown:
    classes = np.unique(images.y)
    known = np.sort(np.random.default_rng(seed).permutation(classes)[: len(classes) // 2])
    return Unknown(images, known, world=world)


def average(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def choose_weighing(cases: dict[str, list[Unknown]]) -> list[dict[str, Any]]:
    """Every weighing, best first: by the share of unknown images that it refuses, over all kinds of cases alike."""
    found = []
    for weights in product(*WEIGHTS.values()):
        weighing = replace(Weighing(), **dict(zip(WEIGHTS, weights, strict=True)))
        refused = {name: float(np.mean([u.refused(weighing) for u in several])) for name, several in cases.items()}
        found.append({**vars(weighing), "average": float(np.mean(list(refused.values()))), **refused})
    return sorted(found, key=lambda row: -row["average"])


def measure(images: Images, strangers: np.ndarray | None = None) -> dict[str, Any]:
    """Everything that can be measured on one set of images."""
    told = {"quality": accuracy_and_calibration(images)}
    told["half of the classes unknown"] = average([half_known(images, seed).measured() for seed in range(3)])
    if strangers is not None:
        told["strangers unknown"] = Unknown(images, np.unique(images.y), strangers).measured()
    return told


# ---------------------------------------------------------------------------------------------- streams

STREAMS = 5
ACCURACY = ((2, 10), (10, 10), (24, 25), (10, 40), (100, 5))  # classes, and images of each to learn
TRUST = ((2, 5), (2, 20), (2, 100), (5, 5), (7, 25), (24, 25), (50, 10), (200, 5), (200, 30))
SIZES = (1, 2, 5, 20)
MIXED = ((8, SIZES), (20, SIZES), (40, SIZES))  # classes of several sizes in one model
KINDS = ((10, (20,)), (20, (20,)), (40, (5,)), *MIXED)  # classes of two sets in one model
TESTED = 30  # images per class


def stream(images: Images, classes: int, sizes: Sequence[int], seed: int) -> Images:
    """Some classes; of the training images of each, as many as its turn in `sizes` says."""
    rng, rows = np.random.default_rng(seed), []
    for place, c in enumerate(rng.permutation(np.unique(images.y))[:classes]):
        for test, most in ((False, sizes[place % len(sizes)]), (True, TESTED)):
            rows.append(rng.permutation(np.flatnonzero((images.y == c) & (images.test == test)))[:most])
    return images.some(np.concatenate(rows))


def seeds_of(classes: int, sizes: Sequence[int], streams: int) -> range:
    """Four times as many streams where classes or some of their images are few, as single results vary most there."""
    return range(4 * streams if classes < 10 or len(sizes) > 1 else streams)


def rivals(images: Images) -> dict[str, float]:
    """Accuracy on the test images, in percent."""
    x, y = images.x[~images.test].astype(np.float64), images.y[~images.test]
    asked, truth = images.x[images.test], images.y[images.test]
    classes, count = np.unique(y), len(np.unique(y))
    found = solve(*taught(images, classes)).discriminant.scores(asked).argmax(1)
    others = {
        "LDA + Ledoit-Wolf": LinearDiscriminantAnalysis("lsqr", shrinkage="auto", priors=np.full(count, 1 / count)),
        "ClosedFormClassifier": ClosedFormClassifier(),
        "logistic regression": LogisticRegression(max_iter=1000),
    }
    told = {"instant": 100 * float((classes[found] == truth).mean())}
    return told | {
        name: 100 * float((other.fit(x, y).predict(asked) == truth).mean()) for name, other in others.items()
    }


def compared(images: Images, classes: int, each: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Averages over streams. ahead: of the best other one, with the standard error of the difference."""
    rows = [rivals(stream(images, classes, (each,), seed)) for seed in seeds]
    told: dict[str, Any] = average(rows)
    best = max((name for name in told if name != "instant"), key=told.__getitem__)
    ahead = np.array([row["instant"] - row[best] for row in rows])
    return told | {"ahead": float(ahead.mean()), "standard error": float(ahead.std(ddof=1) / np.sqrt(len(ahead)))}


def trusted(
    images: Images, classes: int, sizes: Sequence[int], seeds: Sequence[int], world: World | None = None
) -> dict[str, float]:
    """Over streams: known test images accepted, and the calibration error of all their percentages, in percent."""
    certain, right, accepted = [], [], []
    for seed in seeds:
        some = stream(images, classes, sizes, seed)
        chosen = np.unique(some.y)
        seen = Unknown(some, chosen, np.zeros((0, some.x.shape[1]), np.float32), world)
        certain.append(seen.shares.max(1))
        right.append(chosen[seen.shares.argmax(1)] == some.y[some.test])
        accepted.append(float((seen.ours() >= seen.solved.calibration.threshold).mean()))
    bins = reliability(np.concatenate(certain), np.concatenate(right), 15)
    return {
        "accuracy": 100 * float(np.concatenate(right).mean()),
        "accepted": 100 * float(np.mean(accepted)),
        "standard error": 100 * float(np.std(accepted, ddof=1) / np.sqrt(len(accepted))),
        "calibration error": 100 * calibration_error(bins),
    }


class Cottage(Unknown):
    """Seven classes of photographs are taught, then one drawing as a class of its own."""

    def __init__(self, photographs: Images, drawn: Images, seed: int, world: World | None) -> None:
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(np.unique(photographs.y))[:10]
        taught_rows = np.isin(photographs.y, chosen[:7])
        cottage = int(rng.choice(np.unique(drawn.y)))
        own = rng.permutation(np.flatnonzero(drawn.y == cottage))
        others = np.concatenate(
            [rng.permutation(np.flatnonzero(drawn.y == c))[:3] for c in np.unique(drawn.y) if c != cottage]
        )
        lesson = Images(
            np.concatenate([photographs.x[taught_rows], drawn.x[own[:1]]]),
            np.append(photographs.y[taught_rows], photographs.y.max() + 1),
            np.append(photographs.test[taught_rows], False),
        )
        asked = [drawn.x[others], drawn.x[own[1:16]], photographs.x[np.isin(photographs.y, chosen[7:])]]
        super().__init__(lesson, np.unique(lesson.y), np.concatenate(asked), world)
        self.parts = np.split(np.flatnonzero(~self.is_known), np.cumsum([len(a) for a in asked])[:-1])

    def told(self, ours: np.ndarray, threshold: float) -> dict[str, float]:
        """In percent."""
        accepted = ours >= threshold
        named = accepted & (self.shares.argmax(1) == 7)
        return {
            "other drawings take its name": 100 * float(named[self.parts[0]].mean()),
            "drawings of its class do": 100 * float(named[self.parts[1]].mean()),
            "photographs of other classes refused": 100 * float((~accepted[self.parts[2]]).mean()),
            "known photographs accepted": 100 * float(accepted[self.is_known].mean()),
        }

    def measured(self) -> dict[str, float]:
        return self.told(self.ours(), self.solved.calibration.threshold)

    def refused(self, weighing: Weighing | None = None) -> float:
        """Other drawings that do not take its name, and drawings of its class that do, on average."""
        ours = self.ours(weighing)
        told = self.told(ours, float(np.quantile(ours[self.is_known], 0.05)))
        return (100 - told["other drawings take its name"] + told["drawings of its class do"]) / 2


def held_out_cases(given: dict[str, Images], seeds: Sequence[int], world: World | None) -> dict[str, list[Unknown]]:
    """Training images alone: half of the classes of each set unknown, another set unknown, the story of the cottage."""
    held = {name: [images.held_out(seed) for seed in seeds] for name, images in given.items()}
    names = list(held)
    cases: dict[str, list[Unknown]] = {
        f"half of {name}": [half_known(h, s, world) for s, h in enumerate(held[name])] for name in names
    }
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        known, strange = held[name][0], held[other][0]
        cases[f"{name}, {other} unknown"] = [Unknown(known, np.unique(known.y), strange.x[strange.test], world)]
    photographs, drawn = (held[name][0] for name in names[:2])
    cases["cottage"] = [Cottage(photographs, drawn, seed, world) for seed in range(3 * len(seeds))]
    return cases


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("features", nargs="+", help="NAME=FILE.npz")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument(
        "--parts", nargs="+", default=["accuracy", "trust", "unknown"], help="also: kinds, cottage, choose"
    )
    parser.add_argument("--size", type=int, default=224, help="image size that the features were computed at")
    parser.add_argument("--world", type=Path, help="npz of x and labels, instead of the package's world")
    arguments = parser.parse_args()
    world = find_world(FINGERPRINT, arguments.size)
    if arguments.world:
        held = np.load(arguments.world)
        world = World.of(held["x"].astype(np.float64), held["labels"])
    told: list[dict[str, Any]] = []

    def tell(**row: Any) -> None:
        told.append(row)
        said = (f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
        print(" | ".join(said), flush=True)

    given = {name: read_images(Path(path)) for name, path in (one.split("=", 1) for one in arguments.features)}
    if "choose" in arguments.parts:
        ranked = choose_weighing(held_out_cases(given, range(arguments.streams), world))
        for place, row in enumerate(ranked, 1):
            in_use = all(row[name] == value for name, value in vars(Weighing()).items())
            if place <= 5 or in_use or not (row["world"] or row["steeper"]):
                tell(place=f"{place} of {len(ranked)}", used="yes" if in_use else "no", **row)
    if "cottage" in arguments.parts:
        photographs, drawn = list(given.values())[:2]
        for compared_with in (None, world):
            rows = [Cottage(photographs, drawn, seed, compared_with).measured() for seed in range(arguments.streams)]
            tell(world="no" if compared_with is None else "yes", **average(rows))
    for (name, images), (other, others) in combinations(given.items(), 2) if "kinds" in arguments.parts else ():
        for classes, sizes in KINDS:
            found = trusted(
                images.and_others(others), classes, sizes, seeds_of(classes, sizes, arguments.streams), world
            )
            tell(images=f"{name} and {other}", classes=classes, each="/".join(map(str, sizes)), **found)
    for name, images in given.items():
        for compared_with in (None, world) if "unknown" in arguments.parts else ():
            rows = [half_known(images, seed, compared_with).measured() for seed in range(arguments.streams)]
            tell(images=name, world="no" if compared_with is None else "yes", **average(rows))
        training = np.bincount(images.y[~images.test])
        possible = int((training > 0).sum())
        for classes, each in ACCURACY:
            if "accuracy" in arguments.parts and classes <= possible and each <= np.median(training):
                found = compared(images, classes, each, range(arguments.streams))
                tell(images=name, classes=classes, each=each, **found)
        for classes, sizes in (*((c, (n,)) for c, n in TRUST), *MIXED):
            if "trust" not in arguments.parts:
                break
            if max(sizes) <= 1.1 * np.median(training) and (classes <= possible or classes == TRUST[-1][0]):
                seeds = seeds_of(classes, sizes, arguments.streams)
                found = trusted(images, min(classes, possible), sizes, seeds, world)
                tell(images=name, classes=min(classes, possible), each="/".join(map(str, sizes)), **found)
    write_json(arguments.json, told)


if __name__ == "__main__":
    main()

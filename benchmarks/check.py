"""How much `vqprompt check` finds when faults are put into a folder, and how its time and memory grow."""

from __future__ import annotations

import io
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from vqprompt import ClosedFormClassifier, Model
from vqprompt.core.statistics.discriminant import best_temperature, probabilities
from vqprompt.product.check.check import check, near_pairs
from vqprompt.product.check.copies import small_grey
from vqprompt.product.check.doubts import Doubts, find_doubts
from vqprompt.product.check.findings import Kind
from vqprompt.product.check.pixels import CLIPPED, look_at

COPIES = 50  # of each sort
KINDS = ("re-compressed", "cropped", "mirrored")
WRONG = 20  # one label in so many
STRANGE = 100  # one drawing among so many images
UNLIKELY, SUPPORT = (0.02, 0.05, 0.1, 0.2, 0.4), (0.0, 0.05, 0.1, 0.15, 0.2)
FARS = tuple(np.arange(2.5, 5.01, 0.1).round(1).tolist())
ALIKE = tuple(np.arange(0.9, 0.971, 0.005).round(3).tolist())


def recall_and_precision(found: np.ndarray, true: np.ndarray) -> dict[str, float]:
    hits = int((found & true).sum())
    return {"recall": hits / max(int(true.sum()), 1), "precision": hits / max(int(found.sum()), 1)}


def f1(found: np.ndarray, true: np.ndarray) -> float:
    return 2 * int((found & true).sum()) / max(int(found.sum()) + int(true.sum()), 1)


# ---------------------------------------------------------------------------------------------- wrong labels


def swap_labels(y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which one in twenty is another class's, and which those are."""
    rng, classes = np.random.default_rng(seed), int(y.max()) + 1
    wrong = np.zeros(len(y), bool)
    wrong[rng.choice(len(y), len(y) // WRONG, replace=False)] = True
    return np.where(wrong, (y + rng.integers(1, classes, len(y))) % classes, y), wrong


def swapped_labels(x: np.ndarray, y: np.ndarray, seeds: Sequence[int], compare: bool) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        labels, wrong = swap_labels(y, seed)
        classes = int(y.max()) + 1
        yield {"by": "check", "seed": seed} | recall_and_precision(find_doubts(x, labels, classes).mislabelled, wrong)
        if compare and seed == seeds[0]:
            plain = plain_vote(x, labels, classes)
            yield {"by": "plain vote of ten neighbours", "seed": seed} | recall_and_precision(plain, wrong)
            rule = confident_learning(x, labels, classes)
            yield {"by": "confident learning's rule", "seed": seed} | recall_and_precision(rule, wrong)


def plain_vote(x: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """Ten nearest by angle; the majority has another label, and none has this one."""
    unit = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    wrong = np.zeros(len(x), bool)
    for start in range(0, len(x), 1024):
        table = unit[start : start + 1024] @ unit.T
        table[np.arange(len(table)), np.arange(start, start + len(table))] = -1
        votes = y[np.argpartition(-table, 10, axis=1)[:, :10]]
        own = y[start : start + 1024, None]
        most = np.array([np.bincount(v, minlength=classes).max() for v in votes])
        wrong[start : start + 1024] = ~(votes == own).any(1) & (most >= 3)
    return wrong


def confident_learning(x: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """Another class is at least as likely as its own images make it on average. Five-fold, closed form."""
    folds = np.random.default_rng(0).integers(0, 5, len(x))
    scores = np.full((len(x), classes), -1e3)
    for fold in range(5):
        learned = ClosedFormClassifier().fit(x[folds != fold], y[folds != fold])
        scores[np.ix_(folds == fold, learned.classes_)] = learned._scores(x[folds == fold])
    shares = probabilities(scores, best_temperature(scores, y))
    rows = np.arange(len(x))
    own = shares[rows, y]
    typical = np.array([own[y == c].mean() for c in range(classes)])
    shares[rows, y] = 0
    return ((shares >= typical) & (shares > own[:, None])).any(1)


def choose_for_labels(folders: dict[str, list[tuple[np.ndarray, np.ndarray]]]) -> list[dict[str, float]]:
    """F1 of every pair of thresholds, best first: over all kinds of folders alike. folders: features and labels."""
    seen: dict[str, list[tuple[Doubts, np.ndarray]]] = {}
    for name, several in folders.items():
        seen[name] = []
        for seed, (x, y) in enumerate(several):
            labels, wrong = swap_labels(y, seed)
            seen[name].append((find_doubts(x, labels, int(y.max()) + 1), wrong))
    rows = []
    for unlikely, support in product(UNLIKELY, SUPPORT):
        scores = {
            name: float(np.mean([f1(d.disputed(unlikely / len(d.mixed), support), w) for d, w in several]))
            for name, several in seen.items()
        }
        rows.append(
            {"unlikely": unlikely, "support": support, "average": float(np.mean(list(scores.values()))), **scores}
        )
    return sorted(rows, key=lambda row: -row["average"])


# ---------------------------------------------------------------------------------------------- strangers


def mix_in(x: np.ndarray, y: np.ndarray, strangers: np.ndarray, seed: int) -> tuple[Doubts, np.ndarray]:
    """What is thought of images to which one in a hundred strangers was added, and which those are."""
    rng, count = np.random.default_rng(seed), max(len(x) // STRANGE, 1)
    labels = np.concatenate([y, rng.integers(0, y.max() + 1, count)])
    added = strangers[rng.choice(len(strangers), count, replace=False)]
    return find_doubts(np.concatenate([x, added]), labels, int(y.max()) + 1), np.arange(len(labels)) >= len(x)


def strangers_mixed_in(
    x: np.ndarray, y: np.ndarray, strangers: np.ndarray, seeds: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        seen, true = mix_in(x, y, strangers, seed)
        yield {"seed": seed} | recall_and_precision(seen.strange, true)


def choose_for_strangers(folders: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[dict[str, float]]:
    """F1 of every distance, best first. folders: features, labels, and features of strangers."""
    seen = {name: [mix_in(*folder, seed) for seed in range(3)] for name, folder in folders.items()}
    rows = []
    for far in FARS:
        scores = {name: float(np.mean([f1(d.distance > far, t) for d, t in pairs])) for name, pairs in seen.items()}
        rows.append({"far": far, "average": float(np.mean(list(scores.values()))), **scores})
    return sorted(rows, key=lambda row: -row["average"])


# ---------------------------------------------------------------------------------------------- copies


class Pictures:
    """Images with their features and small grey versions. images: opens one by its row."""

    def __init__(self, images: Any, x: np.ndarray) -> None:
        self.images, self.x = images, x
        with ThreadPoolExecutor() as pool:
            self.grey = np.stack(list(pool.map(lambda row: small_grey(images(row)), range(len(x)))))

    def some(self, rows: np.ndarray) -> Pictures:
        part = object.__new__(Pictures)
        part.images, part.x, part.grey = (lambda row: self.images(int(rows[row]))), self.x[rows], self.grey[rows]
        return part


def altered(image: Image.Image, kind: str, rng: np.random.Generator) -> Image.Image:
    if kind == "mirrored":
        return ImageOps.mirror(image)
    if kind == "cropped":
        side = rng.uniform(0.8, 0.95)
        left, top = rng.uniform(0, 1 - side, 2)
        box = (left * image.width, top * image.height, (left + side) * image.width, (top + side) * image.height)
        return image.crop(tuple(map(int, box)))  # type: ignore[arg-type]
    packed = io.BytesIO()
    image.resize((int(image.width * 0.7), int(image.height * 0.7))).save(packed, "JPEG", quality=40)
    return Image.open(packed).convert("RGB")


class Hidden:
    """50 exact and 50 altered copies among images, and every pair that might show one picture, with how alike it is."""

    def __init__(self, model: Model, pictures: Pictures, seed: int) -> None:
        x, n = pictures.x, len(pictures.x)
        rng = np.random.default_rng(seed)
        rows = rng.choice(n, 2 * COPIES, replace=False)
        self.kinds = ["exact"] * COPIES + [KINDS[i % 3] for i in range(COPIES)]
        self.originals = [pictures.images(int(row)) for row in rows[COPIES:]]
        self.copies = [altered(*pair, rng) for pair in zip(self.originals, self.kinds[COPIES:], strict=True)]
        features = np.concatenate([x, x[rows[:COPIES]], model.embed(self.copies)])
        small = [pictures.grey, pictures.grey[rows[:COPIES]], np.stack([small_grey(c) for c in self.copies])]
        self.true = {(int(row), n + i): kind for i, (row, kind) in enumerate(zip(rows, self.kinds, strict=True))}
        self.pairs = {(a, b): alike for a, b, alike in near_pairs(features, np.concatenate(small), min(ALIKE))}

    def found(self, alike: float, already: set[tuple[int, int]]) -> dict[str, float]:
        """already: copies that the images have by themselves. A copy of one of those is rightly a copy of both."""
        found = {pair for pair, value in self.pairs.items() if value >= alike} - already
        twins = {row for pair in already for row in pair}
        hits = found & self.true.keys()
        wrong = {pair for pair in found - hits if not set(pair) & twins}
        told = {"precision": len(hits) / max(len(hits) + len(wrong), 1)}
        for name, kinds in {"exact": ("exact",), "altered": KINDS, **{kind: (kind,) for kind in KINDS}}.items():
            told[f"recall, {name}"] = float(np.mean([pair in hits for pair, k in self.true.items() if k in kinds]))
        return told


def own_copies(pictures: Pictures, alike: float) -> set[tuple[int, int]]:
    return {(a, b) for a, b, _ in near_pairs(pictures.x, pictures.grey, alike)}


def choose_for_copies(model: Model, pictures: Pictures) -> list[dict[str, float]]:
    """F1 of every likeness, best first, over altered copies. Copies that the images have by themselves are those that
    are found at the strictest likeness."""
    already, hidden = own_copies(pictures, max(ALIKE)), [Hidden(model, pictures, seed) for seed in range(3)]
    rows = []
    for alike in ALIKE:
        told = [h.found(alike, already) for h in hidden]
        recall, precision = (float(np.mean([t[key] for t in told])) for key in ("recall, altered", "precision"))
        rows.append({"alike": alike, "average": 2 * recall * precision / (recall + precision), "recall": recall,
                     "precision": precision})  # fmt: skip
    return sorted(rows, key=lambda row: -row["average"])


def imagehash_finds(hidden: Hidden) -> dict[str, float] | None:
    """Shares of the altered copies whose perceptual hash differs by at most 8 of 64 bits; None if not installed."""
    try:
        import imagehash
    except ImportError:
        return None
    near = [imagehash.phash(a) - imagehash.phash(b) <= 8 for a, b in zip(hidden.originals, hidden.copies, strict=True)]
    kinds = hidden.kinds[COPIES:]
    return {k: float(np.mean([n for n, kind in zip(near, kinds, strict=True) if kind == k])) for k in KINDS}


# ---------------------------------------------------------------------------------------------- bad pixels


def exposed(stops: float) -> Callable[[Image.Image], Image.Image]:
    """Light is linear, pixels are not: about the power of 2.2."""
    return lambda photo: photo.point([min(round(255 * (v / 255) * 2 ** (stops / 2.2)), 255) for v in range(256)] * 3)


def page(width: int, height: int, paper: tuple[int, int, int], ink: tuple[int, int, int]) -> Image.Image:
    """Lines of text."""
    image = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(image)
    for line, top in enumerate(range(50, height - 40, 18)):
        draw.text((width // 5, top), "some lines of text that differ in their length"[: 16 + 11 * line % 31], fill=ink)
    return image


def screen(photo: Image.Image | None, paper: tuple[int, int, int], ink: tuple[int, int, int]) -> Image.Image:
    """A window with a title, a list at the left and text; perhaps with a photograph."""
    image = page(900, 600, paper, ink)
    image.paste((60, 110, 190), (0, 0, 900, 34))
    image.paste(tuple(v * 9 // 10 for v in paper), (0, 34, 160, 600))
    if photo is not None:
        image.paste(photo.resize((400, 360)), (480, 60))
    return image


LIGHT, DARK = ((246, 246, 248), (40, 40, 45)), ((30, 31, 36), (210, 210, 215))
PLANTED: dict[str, Callable[[Image.Image], Image.Image]] = {
    "black": lambda photo: Image.new("RGB", photo.size),
    "white": lambda photo: Image.new("RGB", photo.size, "white"),
    "very dark": exposed(-7),
    "over-exposed, 1.5 stops": exposed(1.5),
    "over-exposed, 2.5 stops": exposed(2.5),
    "over-exposed, 3.5 stops": exposed(3.5),
    "blurred": lambda photo: photo.filter(ImageFilter.GaussianBlur(0.05 * min(photo.size))),
    "scan": lambda _: page(600, 850, (250, 248, 240), DARK[0]),
    "scan on its side": lambda _: page(600, 850, (250, 248, 240), DARK[0]).rotate(90, expand=True),
    "crooked scan": lambda _: page(600, 850, (250, 248, 240), DARK[0]).rotate(12, expand=True, fillcolor=(90, 90, 95)),
    "screenshot": lambda _: screen(None, *LIGHT),
    "dark screenshot": lambda _: screen(None, *DARK),
    "screenshot with a photograph": lambda photo: screen(photo, *LIGHT),
    "dark screenshot with a photograph": lambda photo: screen(photo, *DARK),
    "photograph on its side": lambda photo: photo.rotate(90, expand=True),
}


def bad_pixels(
    photos: Sequence[Image.Image], labels: Sequence[str], spare: Sequence[Image.Image], size: int
) -> Iterator[dict[str, Any]]:
    """Which of these faults are found, and of how many images without a fault as much is said. One of each at a time,
    made of the spare images, and only what is said about pixels: not about labels and copies."""
    said = {Kind.BLANK, Kind.DARK, Kind.BRIGHT, Kind.BLURRED, Kind.FOREIGN, Kind.UNLIKE}
    found, rng = Counter[str](), np.random.default_rng(0)
    for photo in spare:
        bad = [make(photo) for make in PLANTED.values()]
        where = [*labels, *rng.choice(labels, len(bad)).tolist()]
        told = check([*photos, *bad], where, size=size, device="cpu").findings
        numbers = {int(f.where.rsplit(" ", 1)[-1]) for f in told if f.kind in said}
        found.update(name for place, name in enumerate(PLANTED, len(photos) + 1) if place in numbers)
        found["false alarms"] += sum(number <= len(photos) for number in numbers)
    for name in PLANTED:
        yield {"fault": name, "found": f"{found[name]} of {len(spare)}"}
    yield {"fault": "none", "found": f"{found['false alarms']} of {len(photos) * len(spare)}"}


def beyond_the_limit(photos: Sequence[Image.Image]) -> Iterator[dict[str, Any]]:
    """How many photographs are over-exposed by the limit for it, as they are and with more light."""
    for stops in (0.0, 1.5, 2.5, 3.5):
        with ThreadPoolExecutor() as pool:
            looks = list(pool.map(look_at, map(exposed(stops), photos)))
        found = sum(look.clipped > CLIPPED for look in looks)
        yield {"light": f"{stops} stops more", "over-exposed": f"{found} of {len(photos)}"}


# ---------------------------------------------------------------------------------------------- time and memory


def growth(x: np.ndarray, y: np.ndarray, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Everything after the backbone. Images that might be, as many as are asked for, are mixtures of two of a class."""
    from sklearn.neighbors import NearestNeighbors

    rng = np.random.default_rng(0)
    before: tuple[int, float, int] | None = None
    for n in sizes:
        rows = rng.integers(0, len(x), n)
        order = np.argsort(y, kind="stable")
        starts = np.searchsorted(y[order], y[rows])
        others = order[starts + (rng.random(n) * np.bincount(y)[y[rows]]).astype(int)]  # of the same class
        mixture = rng.random((n, 1)).astype(np.float32)
        features = mixture * x[rows] + (1 - mixture) * x[others]
        features += (0.5 * x.std() * rng.normal(size=features.shape)).astype(np.float32)
        grey = rng.integers(0, 256, (n, 48, 48), dtype=np.uint8)
        tracemalloc.start()
        started, clock = time.process_time(), time.monotonic()
        find_doubts(features, y[rows], int(y.max()) + 1)
        near_pairs(features, grey)
        seconds, elapsed = time.process_time() - started, time.monotonic() - clock
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        told: dict[str, Any] = {"images": n, "seconds": elapsed, "seconds of processor": seconds, "MB": peak / 1e6}
        if before is not None:
            m, t, p = before
            told |= {"time ×": seconds / t, "memory ×": peak / p, "n·log n ×": n * np.log(n) / (m * np.log(m))}
        if n <= 10000:
            started = time.process_time()
            NearestNeighbors(n_neighbors=10).fit(features).kneighbors(features)
            told["scikit-learn's neighbours, seconds of processor"] = time.process_time() - started
        before = (n, seconds, peak)
        yield told

"""How much `vqprompt check` finds, and how its time and memory grow: CUB-200 with known faults put in.

python benchmarks/check.py --images cub200.zip --features features.npz

features.npz: x [n, D] (or [n, blocks, D], of which the last two are taken), y [n], names [n] of the files in the zip,
as `Model(size=224).embed` gives them; made here, slowly, if it does not exist.
"""

from __future__ import annotations

import argparse
import io
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vqprompt import Model
from vqprompt.check.check import near_pairs
from vqprompt.check.copies import small_grey
from vqprompt.check.doubts import find_doubts
from vqprompt.data.decode import decode
from vqprompt.model.closed_form import best_temperature, probabilities

SIZE = 224
COPIES = 50  # of each sort
KINDS = ("re-compressed", "cropped", "mirrored")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--growth", type=int, nargs="*", default=[2500, 5000, 10000, 20000])
    parser.add_argument("--parts", nargs="+", default=["labels", "drawings", "copies", "growth"])
    arguments = parser.parse_args()
    model = Model(size=SIZE)
    archive = zipfile.ZipFile(arguments.images)
    if not arguments.features.exists():
        make_features(model, archive, arguments.features)
    held = np.load(arguments.features)
    x, y, names = held["x"], held["y"], held["names"]
    x = x[:, -2:].reshape(len(x), -1) if x.ndim == 3 else x
    print(f"{len(x)} images of {y.max() + 1} classes, {x.shape[1]} features, seeds {arguments.seeds}")
    if "labels" in arguments.parts:
        swapped_labels(x, y, arguments.seeds)
    if "drawings" in arguments.parts:
        drawings_mixed_in(model, x, y, arguments.seeds)
    if "copies" in arguments.parts:
        hidden_copies(model, archive, x, y, names, arguments.seeds)
    if "growth" in arguments.parts:
        growth(x, y, arguments.growth)


def make_features(model: Model, archive: zipfile.ZipFile, target: Path) -> None:
    names = sorted(n for n in archive.namelist() if n.endswith(".jpg"))
    classes = sorted({n.split("/")[-2] for n in names})
    x = np.concatenate(
        [model.embed([decode(archive.read(n), n) for n in names[i : i + 64]]) for i in range(0, len(names), 64)]
    )
    y = np.array([classes.index(n.split("/")[-2]) for n in names])
    np.savez(target, x=x, y=y, names=np.array(names))


def told(found: np.ndarray, true: np.ndarray) -> str:
    hits = int((found & true).sum())
    return f"recall {hits / true.sum():.3f}, precision {hits / max(found.sum(), 1):.3f}"


def swapped_labels(x: np.ndarray, y0: np.ndarray, seeds: list[int]) -> None:
    classes = int(y0.max()) + 1
    for seed in seeds:
        rng = np.random.default_rng(seed)
        y, bad = y0.copy(), np.zeros(len(x), bool)
        bad[rng.choice(len(x), len(x) // 20, replace=False)] = True
        y[bad] = (y0[bad] + rng.integers(1, classes, bad.sum())) % classes
        seen = find_doubts(x, y, classes)
        print(f"5 % of labels swapped, seed {seed}: {told(seen.mislabelled, bad)}")
        if seed == seeds[0]:
            print(f"  plain neighbours' vote: {told(plain_vote(x, y, classes), bad)}")
            print(f"  confident learning's rule (as in cleanlab): {told(confident_learning(x, y, classes), bad)}")


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
    from vqprompt import ClosedFormClassifier

    folds = np.random.default_rng(0).integers(0, 5, len(x))
    scores = np.full((len(x), classes), -1e3)
    for fold in range(5):
        learned = ClosedFormClassifier(priors=None).fit(x[folds != fold], y[folds != fold])
        scores[np.ix_(folds == fold, learned.classes_)] = learned._scores(x[folds == fold])
    shares = probabilities(scores, best_temperature(scores, y))
    rows = np.arange(len(x))
    own = shares[rows, y]
    typical = np.array([own[y == c].mean() for c in range(classes)])
    shares[rows, y] = 0
    return ((shares >= typical) & (shares > own[:, None])).any(1)


def drawings_mixed_in(model: Model, x: np.ndarray, y0: np.ndarray, seeds: list[int]) -> None:
    from importlib.resources import files

    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        sheets = np.load(file)["images"].reshape(-1, 28, 28)
    rng = np.random.default_rng(seeds[0])
    count = len(x) // 100
    drawn = model.embed([sheets[i] for i in rng.choice(len(sheets), count, replace=False)])
    for seed in seeds:
        rng = np.random.default_rng(seed)
        labels = np.concatenate([y0, rng.integers(0, y0.max() + 1, count)])
        seen = find_doubts(np.concatenate([x, drawn]), labels, int(y0.max()) + 1)
        print(f"1 % drawings mixed in, seed {seed}: {told(seen.strange, np.arange(len(labels)) >= len(x))}")


def changed(image: Image.Image, kind: str, rng: np.random.Generator) -> Image.Image:
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


def hidden_copies(
    model: Model, archive: zipfile.ZipFile, x: np.ndarray, y: np.ndarray, names: np.ndarray, seeds: list[int]
) -> None:
    started = time.monotonic()
    grey = np.stack([small_grey(decode(archive.read(str(n)), str(n))) for n in names])
    print(f"small grey versions of {len(names)} images: {time.monotonic() - started:.0f} s")
    already = {(a, b) for a, b, _ in near_pairs(x, grey)}
    print(f"copies that CUB-200 has by itself: {len(already)} pairs")
    for a, b in sorted(already):
        print(f"  {names[a]} | {names[b]}")
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rows = rng.choice(len(x), 2 * COPIES, replace=False)
        exact, altered = rows[:COPIES], rows[COPIES:]
        kinds = [KINDS[i % 3] for i in range(COPIES)]
        originals = [decode(archive.read(str(names[r])), str(names[r])) for r in altered]
        copies = [changed(image, kind, rng) for image, kind in zip(originals, kinds, strict=True)]
        features = np.concatenate([x, x[exact], model.embed(copies)])
        small = np.concatenate([grey, grey[exact], np.stack([small_grey(c) for c in copies])])
        true = {(int(r), len(x) + i) for i, r in enumerate(rows)}
        found = {(a, b) for a, b, _ in near_pairs(features, small)} - already
        hits = found & true
        by_kind = {
            kind: np.mean([(int(r), len(x) + COPIES + i) in hits for i, r in enumerate(altered) if kinds[i] == kind])
            for kind in KINDS
        }
        same = np.mean([(int(r), len(x) + i) in hits for i, r in enumerate(exact)])
        # a copy of an image that has a copy of its own is one, too
        told_off = {p for p in found - true if not any(set(p) & set(t) for t in already)}
        print(
            f"{COPIES} exact and {COPIES} altered copies, seed {seed}: exact recall {same:.3f}, altered recall "
            f"{np.mean([t in hits for t in true if t[1] >= len(x) + COPIES]):.3f} "
            f"({', '.join(f'{k} {v:.2f}' for k, v in by_kind.items())}), precision "
            f"{len(hits) / max(len(hits) + len(told_off), 1):.3f}"
        )
        if seed == seeds[0]:
            hashes(originals, copies, kinds)


def hashes(originals: list[Image.Image], copies: list[Image.Image], kinds: list[str]) -> None:
    try:
        import imagehash
    except ImportError:
        print("  imagehash is not installed, and not compared")
        return
    near = [imagehash.phash(a) - imagehash.phash(b) <= 8 for a, b in zip(originals, copies, strict=True)]
    shares = {k: np.mean([n for n, kind in zip(near, kinds, strict=True) if kind == k]) for k in KINDS}
    print("  imagehash (pHash, 8 bits of 64): " + ", ".join(f"{k} {v:.2f}" for k, v in shares.items()))


def growth(x: np.ndarray, y: np.ndarray, sizes: list[int]) -> None:
    from sklearn.neighbors import NearestNeighbors

    rng = np.random.default_rng(0)
    times = []
    for n in sizes:
        rows = rng.integers(0, len(x), n)
        order = np.argsort(y, kind="stable")
        starts = np.searchsorted(y[order], y[rows])
        others = order[starts + (rng.random(n) * np.bincount(y)[y[rows]]).astype(int)]  # of the same class
        mixture = rng.random((n, 1)).astype(np.float32)
        features = mixture * x[rows] + (1 - mixture) * x[others]  # images that might be, as many as are asked for
        features += (0.5 * x.std() * rng.normal(size=features.shape)).astype(np.float32)
        grey = rng.integers(0, 256, (n, 48, 48), dtype=np.uint8)
        tracemalloc.start()
        started = time.process_time()
        find_doubts(features, y[rows], int(y.max()) + 1)
        near_pairs(features, grey)
        seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        started = time.process_time()
        if n <= 10000:
            NearestNeighbors(n_neighbors=10).fit(features).kneighbors(features)
        brute = f"{time.process_time() - started:6.1f} s" if n <= 10000 else "not run"
        times.append((n, seconds, peak))
        print(f"{n:6} images: {seconds:6.1f} s of processor, {peak / 1e6:6.0f} MB; scikit-learn's search {brute}")
    for (n, t, m), (n2, t2, m2) in zip(times, times[1:], strict=False):  # noqa: RUF007
        allowed = n2 * np.log(n2) / (n * np.log(n))
        print(f"{n} → {n2}: time × {t2 / t:.2f}, memory × {m2 / m:.2f} (n·log n: × {allowed:.2f})")


if __name__ == "__main__":
    main()

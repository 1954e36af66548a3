"""What the living model costs: ratios measured in one run, so that the machine does not matter much.

    python benchmarks/teaching.py                 # everything; about five minutes on two cores
    python benchmarks/teaching.py --quick         # small images
    python benchmarks/teaching.py --before FOLDER # only `learn`, of this version and of a checkout of another one

- teaching: `learn` of 10 classes × 20 photographs at 224 px, against the bare forward passes plus start-up
- predict: one photograph with start-up, in seconds; a warm one against the bare forward pass
- classes: one more class of 20 photographs at 10 and at 1,000 classes: the whole command, and without forward passes
- memory: the most that learning large photographs takes
- quality, with --features FILE (npz of x, y, test): shrinkage, calibration, unknown
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image


def photographs(folder: Path, classes: int, count: int, side: int, start: int = 0) -> Path:
    """JPEGs with the texture of photographs: noise of all scales, and a colour for each class."""
    rng = np.random.default_rng(start)
    for c in range(start, start + classes):
        place = folder / f"class {c:03}"
        place.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            layers = [
                np.asarray(Image.fromarray(rng.integers(0, 256, (s, s, 3), dtype=np.uint8)).resize((side, side)), float)
                for s in (4, 16, 64)
            ]
            tint = np.random.default_rng(c).uniform(0, 255, 3)
            Image.fromarray(((sum(layers) / 3 + tint) / 2).astype(np.uint8)).save(place / f"{i}.jpg", quality=90)
    return folder


# A process begins with the peak memory of the one that starts it, so a small one starts what is measured.
MEASURED = """
import resource, subprocess, sys, time
started = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds and the most memory, in bytes, of a command."""
    told = subprocess.run([sys.executable, "-c", MEASURED, *command], check=True, capture_output=True, text=True).stdout
    seconds, memory = told.split()
    return float(seconds), int(memory)


BARE = """
import sys, time, torch
from concurrent.futures import ThreadPoolExecutor
from vqprompt.core.backbones.load import load_backbone
vit = load_backbone("vit-s14", int(sys.argv[1]))
batch = torch.randn(20, 3, int(sys.argv[1]), int(sys.argv[1]))
started = time.monotonic()
with torch.inference_mode():
    for _ in range(int(sys.argv[2]) // 20):
        vit(batch)
print(time.monotonic() - started)
"""


def both_versions(size: int, home: Path, before: Path) -> dict[str, float]:
    """`learn` of 200 photographs with both, in turn: seconds by the clock, and of work (user and system, all cores)."""
    from start_up import timed as timed_python

    images, medians = photographs(home / "photos", 10, 20, 400), {}
    tries: dict[str, list[tuple[float, float]]] = {"before": [], "now": []}
    for i in range(3):
        for name, checkout in (("before", before), ("now", Path(__file__).parents[1])):
            command = ["-m", "vqprompt", "learn", str(home / f"{name}{i}.vqp"), str(images), "--size", str(size)]
            tries[name].append(timed_python(command, checkout))
    for name, measured in tries.items():
        for kind, values in zip(("by the clock", "of work"), zip(*measured, strict=True), strict=True):
            medians[f"learn {name}, s {kind}"] = float(np.median(values))
    ratios = {
        f"before / now, {kind}": medians[f"learn before, s {kind}"] / medians[f"learn now, s {kind}"]
        for kind in ("by the clock", "of work")
    }
    return {**medians, **ratios}


def teaching(size: int, home: Path) -> dict[str, float]:
    """Start-up and forward passes are those of a process that does nothing else, batched as is best."""
    images = photographs(home / "photos", 10, 20, 400)
    model = home / "m.vqp"
    started = time.monotonic()
    bare = float(subprocess.run([sys.executable, "-c", BARE, str(size), "200"], check=True, capture_output=True).stdout)
    with_startup = time.monotonic() - started
    learned, memory = timed([sys.executable, "-m", "vqprompt", "learn", str(model), str(images), "--size", str(size)])
    again, _ = timed([sys.executable, "-m", "vqprompt", "learn", str(model), str(images)])
    one, _ = timed([sys.executable, "-m", "vqprompt", "predict", str(model), str(images / "class 000" / "0.jpg")])
    return {
        "bare forward passes of 200 photographs, s": bare,
        "the same with start-up, s": with_startup,
        "learn, s": learned,
        "learn / (forward passes + start-up)": learned / with_startup,
        "learn again with nothing new, s": again,
        "predict one photograph with start-up, s": one,
        "memory of learn, GB": memory / 1e9,
        "size of the model, MB": model.stat().st_size / 1e6,
    }


def warm(size: int, home: Path) -> dict[str, float]:
    import torch

    from vqprompt import Model

    model = Model.load(home / "m.vqp")
    photo = home / "photos" / "class 000" / "0.jpg"
    model.predict(photo)
    vit = model.network.vit
    blank = torch.randn(1, 3, size, size)
    bare, asked = [], []
    with torch.inference_mode():
        for _ in range(15):  # in turn, so that both meet the same machine
            started = time.perf_counter()
            vit(blank)
            bare.append(time.perf_counter() - started)
            started = time.perf_counter()
            model.predict(photo)
            asked.append(time.perf_counter() - started)
    return {
        "bare forward pass, ms": 1e3 * float(np.median(bare)),
        "warm predict, ms": 1e3 * float(np.median(asked)),
        "warm predict / forward pass": float(np.median(asked) / np.median(bare)),
    }


def one_more_class(home: Path) -> dict[str, float]:
    """The whole command, and everything but start-up and forward passes: records, solving, measuring, writing."""
    from vqprompt.product.model.model import Model
    from vqprompt.product.model.records import ClassRecord, to_fixed_point

    rng = np.random.default_rng(0)
    width = 768
    mix = rng.normal(size=(width, width)) / width**0.5

    def record(number: int) -> ClassRecord:
        center = rng.normal(size=width)
        features = center + rng.normal(size=(20, width)) @ mix
        return ClassRecord.of(np.arange(20, dtype=np.uint64) + np.uint64(100 * number), to_fixed_point(features))

    photos = photographs(home / "one more", 1, 20, 400, start=5000)
    measured: dict[str, float] = {}
    for classes in (10, 1000):
        path = home / f"{classes}.vqp"
        model = Model(size=224, device="cpu")
        model.learn_records({f"class {i:04}": record(i) for i in range(classes)})
        model.save(path)
        times = []
        for i in range(3):
            started = time.perf_counter()
            model = Model.load(path)
            model.learn_records({f"new {i}": record(2000 + i)})
            model.save()
            times.append(time.perf_counter() - started)
        measured[f"one more class at {classes}, s without forward passes"] = float(np.median(times))
        command = [sys.executable, "-m", "vqprompt", "learn", str(path), str(photos), "--as", "one more"]
        measured[f"one more class at {classes}, the whole command, s"] = timed(command)[0]
        measured[f"file at {classes}, MB"] = path.stat().st_size / 1e6
    return measured


def memory_of_large_photographs(home: Path) -> dict[str, float]:
    photographs(home / "large", 2, 6, 5000)
    _, memory = timed(
        [sys.executable, "-m", "vqprompt", "learn", str(home / "large.vqp"), str(home / "large"), "--size", "112"]
    )
    return {"memory with photographs of 25 megapixels, GB": memory / 1e9}


def quality(features: Path, strangers: Path | None = None) -> dict[str, float]:
    """On features of any data set, and of images of another kind."""
    from quality import measure, read_images

    told = measure(read_images(features), None if strangers is None else read_images(strangers).x)
    return {f"{part}: {name}": value for part, values in told.items() for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="70 px instead of 224")
    parser.add_argument("--features", type=Path, action="append", default=[], help="npz of x, y, test: measure quality")
    parser.add_argument("--strangers", type=Path, help="npz of another kind of images, none of which is known")
    parser.add_argument("--before", type=Path, help="a checkout of another version, to compare `learn` with")
    parser.add_argument("--only", choices=["teaching", "classes", "memory", "quality"], help="one part alone")
    options = parser.parse_args()
    size = 70 if options.quick else 224
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {size} px")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        parts = []
        if options.before is not None:
            parts, options.only = [lambda: both_versions(size, home, options.before)], "before"
        if options.only in (None, "teaching"):
            parts += [lambda: teaching(size, home), lambda: warm(size, home)]
        if options.only in (None, "classes"):
            parts.append(lambda: one_more_class(home))
        if options.only in (None, "memory"):
            parts.append(lambda: memory_of_large_photographs(home))
        for file in options.features:
            parts.append(lambda file=file: {"features": str(file.name), **quality(file, options.strangers)})
        for part in parts:
            for name, value in part().items():
                print(
                    f"{name:70} {value:10.3f}" if isinstance(value, float) else f"{name:70} {json.dumps(value):>10}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

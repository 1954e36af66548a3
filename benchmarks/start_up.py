"""How long one answer takes, with the start of the process, and how fast features are: PyTorch and ONNX Runtime.

    python benchmarks/start_up.py MODEL PHOTOGRAPH [--repeats 5] [--photographs FOLDER_OR_ARCHIVE]

Each start is a process of its own. Seconds are of the wall clock, and of all cores together (user + system), which
other programs on the machine disturb less; the best of several tries counts. With --photographs, the features of the
first 50 images of an archive are computed with each engine, on one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

QUESTION = """
import sys
from pathlib import Path
from vqprompt.product.model.file import read
from vqprompt.product.model.pictures import find_pictures
stored, _ = read(Path(sys.argv[1]))
backbone = stored.backbone
if sys.argv[3] == "torch":
    from vqprompt.product.model.features import open_features
    extractor, fingerprint = open_features(backbone.name, backbone.size, backbone.crop, "cpu")
else:
    from vqprompt.core.backbones.weights import read_weights
    from vqprompt.product.model.onnx_features import OnnxFeatures
    weights = read_weights(backbone.name).resized(backbone.size)
    extractor, fingerprint = OnnxFeatures(weights, backbone.crop, sys.argv[3]), weights.fingerprint()
assert fingerprint == backbone.fingerprint
picture = find_pictures([sys.argv[2]], "picture")[0][0]
scores = stored.content.solved.scores(extractor.of_one(picture)[None])
print(list(stored.content.classes)[scores.argmax()])
"""
SPEED = """
import sys, time
from pathlib import Path
from vqprompt.product.model.pictures import find_pictures
pictures = find_pictures(Path(sys.argv[1]))[0][:50]
if sys.argv[2] == "torch":
    import torch
    from vqprompt.product.model.features import open_features
    torch.set_num_threads(1)
    extractor = open_features("vit-s14", None, 0.875, "cpu")[0]
else:
    from vqprompt.core.backbones.weights import read_weights
    from vqprompt.product.model.onnx_features import OnnxFeatures
    extractor = OnnxFeatures(read_weights("vit-s14"), 0.875, sys.argv[2])
list(extractor.of(pictures[:1]))
times = []
for picture in pictures:
    started = time.process_time()
    list(extractor.of([picture]))
    times.append(time.process_time() - started)
print(f"{1 / sorted(times)[len(times) // 2]:.1f} photographs per second of one core, decoding included")
"""
ENGINES = ("torch", "fp32", "int16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("photograph", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--photographs", type=Path)
    options = parser.parse_args()
    programs = {"python alone": ["-c", "pass"]}
    programs |= {e: ["-c", QUESTION, str(options.model), str(options.photograph), e] for e in ENGINES}
    tries: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(options.repeats):  # in turn, so that the machine's other work meets all of them
        for name, arguments in programs.items():
            tries[name].append(timed(arguments))
    for name, found in tries.items():
        wall, work = (min(values) for values in zip(*found, strict=True))
        print(f"{name:12}  {wall:.2f} s by the clock, {work:.2f} s of work")
    for engine in ENGINES if options.photographs else ():
        one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SPEED, str(options.photographs), engine],
            env=one_core, capture_output=True, text=True, check=True,
        )  # fmt: skip
        print(f"{engine:12}  {done.stdout.strip()}")


def timed(arguments: list[str]) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()

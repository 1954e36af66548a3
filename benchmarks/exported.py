"""A model in PyTorch, ONNX and ONNX with 8-bit weights: the same answers? how fast? All in one run, on one core.

python benchmarks/exported.py                # 50 classes of drawings, the 1,000 test drawings
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vqprompt import Model
from vqprompt.product.export.onnx import export_onnx, open_session, prepared

TRAIN, TEST = 80, 20  # drawings of each class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--train", type=int, default=20, help="drawings of each class to learn")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="of timing, taken in turns; the fastest counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file)
        sheets, names = packed["images"].reshape(50, 100, 28, 28), [str(n) for n in packed["classes"]]
    model = Model(size=arguments.size, device="cpu")
    learned = [(sheets[c, i], names[c]) for c in range(50) for i in range(arguments.train)]
    model.learn([image for image, _ in learned], [name for _, name in learned])
    images = [sheets[c, i] for c in range(50) for i in range(TRAIN, TRAIN + TEST)]
    labels = np.array([model.classes.index(names[c]) for c in range(50) for _ in range(TEST)])
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            "ONNX float32": export_onnx(model, Path(folder) / "plain.onnx"),
            "ONNX int8": export_onnx(model, Path(folder) / "int8.onnx", int8=True),
        }
        sessions = {name: open_session(path, threads=1) for name, path in paths.items()}
        sizes = {name: path.stat().st_size / 1e6 for name, path in paths.items()}
    shares, familiar = model.judge(model.embed(images))
    given = prepared(list(images), model.network.side)
    print(f"{len(images)} test drawings, {len(model.classes)} classes, {arguments.size} px")
    print(f"PyTorch: accuracy {(shares.argmax(1) == labels).mean():.1%}")
    for name, session in sessions.items():
        got, score = run(session, given, 50)
        print(
            f"{name}: accuracy {(got.argmax(1) == labels).mean():.1%}, same top class "
            f"{(got.argmax(1) == shares.argmax(1)).sum()} of {len(images)}, largest difference of a probability "
            f"{np.abs(got - shares).max():.1e}, same verdict on unknown {((score < 0) == (familiar < 0)).sum()}, "
            f"file {sizes[name]:.1f} MB"
        )
    few = {name: value[:40] for name, value in given.items()}
    timed: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, work in {
            "PyTorch": lambda: torch_forward(model, few, arguments.batch),
            **{name: (lambda s=s: run(s, few, arguments.batch)) for name, s in sessions.items()},
        }.items():
            started = time.perf_counter()
            work()
            timed.setdefault(name, []).append((time.perf_counter() - started) / 40)
    for name, seconds in timed.items():
        fastest = min(seconds)
        print(f"{name}: {1000 * fastest:.1f} ms per image, {min(timed['PyTorch']) / fastest:.2f} times PyTorch's speed")


def run(session: Any, given: dict[str, np.ndarray], batch: int) -> tuple[np.ndarray, np.ndarray]:
    parts = [
        session.run(["probabilities", "familiarity"], {k: v[i : i + batch] for k, v in given.items()})
        for i in range(0, len(given["aspect"]), batch)
    ]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def torch_forward(model: Model, given: dict[str, np.ndarray], batch: int) -> None:
    features = model.network
    for i in range(0, len(given["aspect"]), batch):
        pixels = given["image"][i : i + batch].transpose(0, 3, 1, 2)
        model.judge(features._forward(pixels, given["aspect"][i : i + batch].tolist()))


if __name__ == "__main__":
    main()

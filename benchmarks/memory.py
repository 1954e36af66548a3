"""Does memory grow with the number of images?

    python benchmarks/memory.py --json results/memory-cpu.json

Small JPEGs in tar shards, a ViT of the width of ViT-S with two blocks: features are large, and computed quickly. Every
measurement is a process of its own; its peak memory is what the system says. `learn` is closed-form learning of a
model. `run` is a run of the method `linear` with its preset `closed-form`. `prompts` is a run of `vq-prompt` with
queries that are computed once (`augment=flip`). VQPROMPT_CACHE_GB is so low that most images are decoded
again when they are needed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_json
from PIL import Image

from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.runtime.device import hardware

CLASSES, SIDE, PER_SHARD = 10, 32, 2_000
CACHE_GB = "0.1"
MEMORY = ("learn", "run", "prompts")


def write_shards(folder: Path, count: int) -> None:
    """Noisy textures, one per class, as JPEG: 0.8 kB each."""
    rng = np.random.default_rng(0)
    textures = rng.integers(40, 216, (CLASSES, 4, 4, 3))
    folder.mkdir()
    for start in range(0, count, PER_SHARD):
        with tarfile.open(folder / f"shard-{start // PER_SHARD:06}.tar", "w") as archive:
            for i in range(start, min(start + PER_SHARD, count)):
                pixels = (textures[i % CLASSES] + rng.integers(-40, 41, (4, 4, 3))).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "JPEG")
                for suffix, content in ((".jpg", file.getvalue()), (".cls", str(i % CLASSES).encode())):
                    info = tarfile.TarInfo(f"{i:08}{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


def learn(shards: str, weights: str, _: str) -> None:
    from vqprompt.product.model.model import Model

    model = Model(weights, device="cpu")
    model.learn(shards)


def run(shards: str, weights: str, out: str, method: str = "linear", preset: str = "closed-form", **more: Any) -> None:
    from vqprompt.research.results.config import resolve
    from vqprompt.research.runs import runner

    settings = {"data": shards, "method": method, "backbone": weights, "size": 28, "tasks": 5, "device": "cpu", **more}
    runner.run(resolve(settings, preset=preset), Path(out) / method, report=False)


def prompts(shards: str, weights: str, out: str) -> None:
    run(shards, weights, out, "vq-prompt", "closed-form", epochs=1, augment="flip", blocks=[0, 1], length=2)


def measured(what: str, *arguments: str) -> dict[str, float]:
    """A measurement in a process of its own."""
    environment = {**os.environ, "VQPROMPT_CACHE_GB": CACHE_GB, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--do", what, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_table(rows: list[dict[str, Any]], what: str, unit: str) -> None:
    counts = list(dict.fromkeys(row["images"] for row in rows))
    print(f"{unit:<24}" + "".join(f"{count:>12,} images" for count in counts))
    for name in dict.fromkeys(row["what"] for row in rows):
        found = {row["images"]: row[what] for row in rows if row["what"] == name}
        print(f"{name:<24}" + "".join(f"{found[count]:>19,.0f}" for count in counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000], help="images")
    parser.add_argument("--only", nargs="+", choices=MEMORY, default=MEMORY, help="of the measurements of memory")
    parser.add_argument("--width", type=int, default=384, help="of the ViT")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--do", nargs=4, metavar="WHAT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.do:
        what, *arguments = args.do
        started = time.perf_counter()
        {"learn": learn, "run": run, "prompts": prompts}[what](*arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": time.perf_counter() - started, "peak_mb": peak}))
        return
    settings = {"width": args.width, "blocks": 2, "classes": CLASSES, "cache_gb": float(CACHE_GB)}
    found: dict[str, Any] = {"hardware": hardware(torch.device("cpu")), **settings, "rows": []}
    print(found["hardware"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VQPROMPT_HOME"] = str(folder / "home")
        weights = folder / "tiny.safetensors"
        torch.manual_seed(0)
        save_backbone(ViT(ViTConfig(width=args.width, depth=2, heads=2, patch=14, image_size=28)), weights)
        for count in args.counts:
            shards = folder / f"{count} images"
            write_shards(shards, count)
            for what in args.only:
                row = {
                    "what": what,
                    "images": count,
                    **measured(what, str(shards), str(weights), str(folder / f"{count}")),
                }
                row["images_per_s"] = count / row["seconds"]
                found["rows"].append(row)
                print(
                    ", ".join(f"{k} {v:,.0f}" if isinstance(v, float | int) else str(v) for k, v in row.items()),
                    flush=True,
                )
                write_json(args.json, found)  # after each measurement: the whole takes a while
    print_table(found["rows"], "peak_mb", "peak memory (MB)")


if __name__ == "__main__":
    main()

"""Memory and speed of `vqprompt predict` on photographs of 24 megapixels, and what checking the cache costs.

python benchmarks/photographs.py --count 1000
python benchmarks/photographs.py --cache
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, DISTINCT = 6000, 4000, 4
CHILD = "import sys; from vqprompt.commands.app import main; sys.argv[0] = 'vqprompt'; main()"


def photographs(folder: Path, count: int) -> None:
    """A few different JPEGs, and links to them."""
    rng = np.random.default_rng(0)
    for i in range(min(DISTINCT, count)):
        coarse = rng.integers(0, 256, (HEIGHT // 20, WIDTH // 20, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        image.save(folder / f"{i:04d}.jpg", quality=90)
    for i in range(DISTINCT, count):
        os.link(folder / f"{i % DISTINCT:04d}.jpg", folder / f"{i:04d}.jpg")


def measure_predict(count: int, size: int) -> dict[str, float]:
    """In a child process, so that its peak is its own: the whole command, with Python, torch and the ViT."""
    from vqprompt import Learner, Stream
    from vqprompt.research.datasets import open_dataset
    from vqprompt.research.training.settings import Training

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "photographs").mkdir()
        photographs(folder / "photographs", count)
        learner = Learner("vit-s14", "linear", size=size, training=Training(epochs=1), device="cpu")
        stream = Stream(open_dataset("quickdraw50", size), [2, 2], train_per_class=4, test_per_class=1)
        learner.learn(next(iter(stream)))
        learner.save(folder / "model")
        command = [sys.executable, "-c", CHILD, "predict", str(folder / "model"), str(folder / "photographs"),
                   "--device", "cpu"]  # fmt: skip
        began = time.perf_counter()
        with open(os.devnull, "w") as nowhere:
            subprocess.run(command, check=True, stdout=nowhere)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        megabytes = (folder / "photographs" / "0000.jpg").stat().st_size / 1e6
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    return {"photographs": count, "size": size, "peak_mb": peak, "seconds": seconds, "images_per_s": count / seconds,
            "processor_seconds": processor, "mb_per_file": megabytes}  # fmt: skip


def measure_cache(count: int, side: int) -> dict[str, float]:
    """Opening a store from the cache, with and without its check. The file is in the system's memory."""
    from vqprompt.core import cache

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "store.npy"
        cache.save_array(path, np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8))

        def opened(checked: bool) -> float:
            cache._verified.clear()
            began = time.perf_counter()
            if checked:
                array = cache.load_array(path, mapped=True)
            else:
                array = np.load(path, mmap_mode="c")
            int(array.sum(dtype=np.int64))  # read every pixel, as an epoch does
            return time.perf_counter() - began

        opened(False)
        with_check, without = (min(opened(checked) for _ in range(3)) for checked in (True, False))
    return {"images": count, "side": side, "images_per_s_checked": count / with_check,
            "images_per_s_unchecked": count / without,
            "check_images_per_s": count / (with_check - without)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="photographs (default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="of the images that the ViT takes (default: %(default)s)")
    parser.add_argument("--cache", action="store_true", help="measure the check of the cache instead")
    given = parser.parse_args()
    found = measure_cache(2000, 256) if given.cache else measure_predict(given.count, given.size)
    print(json.dumps({key: round(value, 1) for key, value in found.items()}))


if __name__ == "__main__":
    main()

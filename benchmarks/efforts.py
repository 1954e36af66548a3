"""What efforts good and best are worth, and how long they take: drawings of 16 things, taught in two steps.

    python benchmarks/efforts.py                  # about ten minutes per effort on two free cores
    python benchmarks/efforts.py --effort good

Ten classes first, six more later, 20 drawings of each; asked about 20 others of each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import numpy as np

from vqprompt import Model

STEPS, LEARNED, ASKED = ((0, 10), (10, 16)), 20, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", action="append", choices=["instant", "good", "best"], help="all by default")
    parser.add_argument("--size", type=int, default=56, help="image size in px (default: %(default)s)")
    options = parser.parse_args()
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file)
        drawings, names = packed["images"].reshape(50, 100, 28, 28), [str(name) for name in packed["classes"]]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.size} px")
    for effort in options.effort or ["instant", "good", "best"]:
        model = Model(size=options.size, device="cpu")
        for first, last in STEPS:
            began, busy = time.monotonic(), time.process_time()
            taught = range(first, last)
            images = [image for c in taught for image in drawings[c, :LEARNED]]
            model.learn(images, [names[c] for c in taught for _ in range(LEARNED)], effort=effort)
            seconds, busy = time.monotonic() - began, time.process_time() - busy
            known = range(last)
            answers = model.predict([image for c in known for image in drawings[c, 100 - ASKED :]], unknown=False)
            right = np.mean([a == names[c] for a, c in zip(answers, np.repeat(known, ASKED), strict=True)])
            with tempfile.TemporaryDirectory() as folder:
                size = model.save(Path(folder) / "m.vqp").stat().st_size / 1e6
            print(
                f"{effort:8} {last:3} classes: {right:6.1%} right (estimated {model.accuracy:.1%}), {seconds:6.0f} s "
                f"({busy:.0f} s of processor time), file {size:.1f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()

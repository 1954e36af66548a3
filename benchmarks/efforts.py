"""What efforts good and best are worth in many small lessons, how long they take, and what a model says of itself.

    python benchmarks/efforts.py                                    # instant, good and best
    python benchmarks/efforts.py --effort good --lessons 40 --classes 1

Each lesson brings drawings of new things, 20 of each. After some of them: the accuracy on 20 other drawings of each, on
those of the first ten things, and what the model says of itself: its accuracy, how far its percentages are off, and how
many drawings of known things it calls unknown (it aims at 5 %).
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.resources import files

import numpy as np

from vqprompt import Model
from vqprompt.core.metrics import calibration_error, reliability
from vqprompt.product.model.teaching import Plan

LEARNED, ASKED = 20, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", action="append", choices=["instant", "good", "best"], help="all by default")
    parser.add_argument("--size", type=int, default=42, help="image size in px (default: %(default)s)")
    parser.add_argument("--lessons", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--classes", type=int, default=5, help="new things per lesson (default: %(default)s)")
    parser.add_argument("--at", type=int, nargs="+", default=[10, 30, 50], help="numbers of classes to ask at")
    options = parser.parse_args()
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        packed = np.load(file)
        drawings, names = packed["images"].reshape(50, 100, 28, 28), [str(name) for name in packed["classes"]]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.size} px")
    for effort in options.effort or ["instant", "good", "best"]:
        model, seconds, plans = Model(size=options.size, device="cpu"), 0.0, list[Plan]()
        for lesson in range(options.lessons):
            began, taught = time.monotonic(), range(lesson * options.classes, (lesson + 1) * options.classes)
            images = [image for c in taught for image in drawings[c, :LEARNED]]
            done = model.learn(
                images, [names[c] for c in taught for _ in range(LEARNED)], effort=effort,
                announce=plans.append,
            )  # fmt: skip
            seconds += time.monotonic() - began
            for note in done.notes:
                print(f"  lesson {lesson + 1}: {note}")
            if taught[-1] + 1 not in options.at and lesson + 1 < options.lessons:
                continue
            known = range(taught[-1] + 1)
            shares, familiar = model.judge(model.embed([image for c in known for image in drawings[c, -ASKED:]]))
            truth = np.repeat([model.classes.index(names[c]) for c in known], ASKED)
            right = shares.argmax(1) == truth
            off = calibration_error(reliability(shares.max(1), right, 15))
            print(
                f"{effort:8}{len(known):3} classes: {right.mean():6.1%} right, says {model.accuracy or np.nan:.1%}; "
                f"first ten {right[: 10 * ASKED].mean():6.1%}; percentages off by {off:5.1%}; "
                f"unknown {(familiar < 0).mean():5.1%}; "
                f"{seconds:.0f} s so far, planned {sum(plan.seconds for plan in plans):.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

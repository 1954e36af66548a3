"""How long one answer takes, with the start of the process: with ONNX Runtime as usual, and with PyTorch.

    python benchmarks/start_up.py MODEL PHOTOGRAPH [--repeats 3] [--before FOLDER]

--before: a checkout of another version, which answers too. It must be able to read the model.

Each answer is a process of its own, taken in turns. Seconds are of the wall clock, and of all cores together (user +
system), which other programs on the machine disturb less. The median counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

IN_TORCH = """
import sys
from vqprompt import Model
from vqprompt.product.model.pictures import find_pictures
model = Model.load(sys.argv[1], device="cpu")
shares, _ = model.judge(model.network.of_one(find_pictures([sys.argv[2]], "any")[0][0])[None])
print(model.classes[shares[0].argmax()])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("photograph", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    asked = [str(options.model), str(options.photograph)]
    here, command = Path(__file__).parents[1], ["-m", "vqprompt", "predict", *asked, "--device", "cpu"]
    programs = {
        "python alone": (["-c", "pass"], here),
        "PyTorch": (["-c", IN_TORCH, *asked], here),
        "ONNX Runtime": (command, here),
        **({} if options.before is None else {"before": (command, options.before)}),
    }
    tries: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, (arguments, checkout) in programs.items():
            tries[name].append(timed(arguments, checkout))
    for name, measured in tries.items():
        wall, work = (statistics.median(values) for values in zip(*measured, strict=True))
        print(f"{name:12}  {wall:.2f} s by the clock, {work:.2f} s of work")


def timed(arguments: list[str], checkout: Path) -> tuple[float, float]:
    """Seconds of Python with the vqprompt of a checkout: by the clock, and of work on all cores."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, *arguments], check=True, env=environment, **quiet)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()

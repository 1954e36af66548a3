"""How time and memory grow: with classes seen, training images, tasks, the prompt pool and the image size.

    python benchmarks/scaling.py --device cpu
    python benchmarks/scaling.py --device cuda --json results/scaling-h200.json

One axis grows at a time, everything else is held. What is timed is the product itself (`Learner.learn`, `scores`,
`accuracies`, `rebalance`) on random images in memory, with a small ViT on a CPU and ViT-S/14 on CUDA. For every row:
the points, what a unit costs, and the exponent: the slope of a straight line through the points in log-log, nothing
subtracted; beside it the slope between the last two points alone, where fixed costs weigh least. 1 is linear.

`many_classes` goes to 10,000 classes: what follows the backbone, on random features. `many_tasks` goes to 1,000 tasks,
with a tiny ViT.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import make_parser, noise_stream, seconds_of, stored_side, write_json

from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.data.stream import Stream, Task
from vqprompt.core.runtime.device import hardware
from vqprompt.core.statistics.gaussians import make_statistics
from vqprompt.product.model.calibration import solve
from vqprompt.product.model.records import ClassRecord, gram_of, to_fixed_point
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.base import Head
from vqprompt.research.methods.recipes import PRESETS
from vqprompt.research.training.rebalancing import Rebalancing, rebalance
from vqprompt.research.training.settings import Training

CLOSED_FORM = PRESETS["linear"]["closed-form"]
AXES = ("classes", "images", "tasks", "pool", "image_size", "many_classes", "many_tasks")
FITTED, LAST = 1.15, 1.3  # exponents clearly above 1: of the line through all points, of the last two alone


@dataclass(frozen=True)
class Plan:
    """What a machine can do in a minute or two. Rebalancing: pseudo-features per step as by default, 128 × 4."""

    vit: ViTConfig
    batch: int
    rebalancing: Rebalancing
    rounds: int
    warmup: int  # untimed rounds: they compile, where there is a compiler
    classes: Sequence[int]  # seen before the task that is timed
    new_task: tuple[int, int]  # its classes, images per class
    images: Sequence[int]
    tasks: Sequence[int]
    whole: tuple[int, int, int]  # what the tasks divide: classes, images per class and test images per class
    pools: Sequence[int]
    sizes: Sequence[int]
    some: int  # images where their number does not matter
    many_classes: Sequence[int] = (625, 1250, 2500, 5000, 10_000)
    many_tasks: Sequence[int] = (125, 250, 500, 1000)  # as many classes as the last one are divided among them


PLANS = {
    "cpu": Plan(
        ViTConfig(width=192, depth=6, heads=3, patch=14, image_size=56), 16, Rebalancing(ratio=32, epochs=1), 3, 0,
        classes=[25, 50, 100, 200, 400], new_task=(8, 4), images=[32, 64, 128, 256], tasks=[2, 4, 8, 16],
        whole=(32, 8, 2), pools=[10, 20, 40, 80, 160], sizes=[56, 84, 112, 168, 224], some=32,
    ),
    "cuda": Plan(
        ViTConfig(), 128, Rebalancing(), 3, 1,
        classes=[100, 200, 400, 800, 1600], new_task=(16, 32), images=[512, 1024, 2048, 4096, 8192],
        tasks=[2, 4, 8, 16, 32], whole=(64, 64, 16), pools=[10, 20, 40, 80, 160], sizes=[112, 168, 224, 336, 448],
        some=1024, many_tasks=[250, 1000],
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- measuring


class Peak:
    """The most memory that is taken inside the block beyond what was there: by tensors on CUDA, else by the process."""

    bytes = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, and is counted when it is taken again
            Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark
            self.before = _process("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        on_gpu = self.device.type == "cuda"
        self.bytes = (torch.cuda.max_memory_allocated(self.device) if on_gpu else _process("VmHWM")) - self.before


def _process(what: str) -> float:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(what))


def others_share(since: tuple[float, float] | None = None) -> Any:
    """How much of the processors other programs took since a former call; without one, where things stand."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    now = sum(ticks) / os.sysconf("SC_CLK_TCK"), (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    if since is None:
        return now[0], now[1] - time.process_time()
    return max(0.0, now[1] - time.process_time() - since[1]) / max(now[0] - since[0], 1e-9)


def kept(learner: Learner) -> int:
    """Bytes that stay for the classes learned: statistics and the rows of the classifier."""
    tensors = learner.method.state_dict().items()
    return sum(t.nbytes for name, t in tensors if name.startswith(("statistics.", "head.")))


def slope(points: Sequence[float], values: Sequence[float]) -> float | None:
    if min(values) <= 0:
        return None
    return round(float(np.polyfit(np.log(points), np.log(values), 1)[0]), 3) + 0.0  # and no -0.0


@dataclass
class Axis:
    """One table: what grows, what is held, and a row of values for each thing that was measured."""

    name: str
    unit: str
    units: str
    points: list[int]
    held: str
    rows: dict[str, list[float]]

    def summary(self) -> dict[str, Any]:
        found = {}
        for name, values in self.rows.items():
            fitted, last = slope(self.points, values), slope(self.points[-2:], values[-2:])
            found[name] = {
                "values": values,
                "per_unit": [v / p for v, p in zip(values, self.points, strict=True)],
                "exponent": fitted,
                "exponent_of_the_last_two": last,
                "faster_than_linear": bool(fitted and last and (fitted > FITTED or last > LAST)),
            }
        return {"name": self.name, "unit": self.unit, "points": self.points, "held": self.held, "rows": found}

    def show(self) -> None:
        print(f"\n{self.name} (held: {self.held})")
        print(f"  {self.units:<28}" + "".join(f"{p:>9}" for p in self.points) + "  exponent  last two")
        for name, row in self.summary()["rows"].items():
            shown = as_bytes if name.endswith("bytes") else as_seconds
            exponents = (row["exponent"], row["exponent_of_the_last_two"])
            ends = "".join(f"{'–' if e is None else f'{e:.2f}':>10}" for e in exponents)
            flag = "  ← faster than linear" if row["faster_than_linear"] else ""
            label = name.removesuffix("_bytes").replace("_", " ")
            print(f"  {label:<28}" + "".join(f"{shown(v):>9}" for v in row["values"]) + ends + flag)
            print(f"    {'per ' + self.unit:<26}" + "".join(f"{shown(v):>9}" for v in row["per_unit"]))


def as_seconds(value: float) -> str:
    for size, unit in ((1, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def as_bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


# ---------------------------------------------------------------------------------------------- what is measured


class Bench:
    def __init__(self, plan: Plan, device: torch.device, folder: Path, cpu_time: bool = False) -> None:
        self.plan, self.device, self.folder, self.cpu_time = plan, device, folder, cpu_time
        self.rng = np.random.default_rng(0)

    def vit(self, size: int | None = None) -> ViT:
        torch.manual_seed(0)
        return ViT(self.plan.vit).resize(size or self.plan.vit.image_size)

    def learner(self, size: int | None = None, **options: Any) -> Learner:
        settings = Training(epochs=1, batch_size=self.plan.batch)
        return Learner(self.vit(size), training=settings, device=str(self.device),
                       **{"rebalancing": self.plan.rebalancing, **options})  # fmt: skip

    def stream(self, tasks: Sequence[int], train: Sequence[int], test: int = 1, size: int | None = None) -> Stream:
        """Random images. tasks: classes per task; train: per task, training images per class; test: per class."""
        return noise_stream(tasks, train, test, stored_side(size or self.plan.vit.image_size), self.rng)

    def grow(
        self, points: Sequence[int], measure: Callable[[int], dict[str, float]], rounds: int | None = None
    ) -> dict[str, list[float]]:
        """Medians over rounds. Every round visits all points, so that a disturbance does not hit only one of them."""
        for _ in range(self.plan.warmup):
            for point in points[: None if rounds is None else 1]:
                measure(point)
        visits = [[measure(point) for point in points] for _ in range(rounds or self.plan.rounds)]
        return {
            name: [statistics.median(v[i][name] for v in visits) for i in range(len(points))] for name in visits[0][0]
        }

    def seconds(self, call: Callable[[], Any]) -> float:
        if not self.cpu_time:
            return seconds_of(call, self.device)
        started = time.process_time()
        call()
        return time.process_time() - started

    def learning(self, learner: Learner, task: Task) -> dict[str, float]:
        with Peak(self.device) as peak:
            seconds = self.seconds(lambda: learner.learn(task))
        return {"learning": seconds, "taken_while_learning_bytes": peak.bytes}

    def one_image(self, learner: Learner) -> float:
        side = learner.vit.config.image_size
        image = self.rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        return statistics.median([self.seconds(lambda: learner.predict_proba([image])) for _ in range(6)][1:])

    # ------------------------------------------------------------------ the axes

    def classes(self) -> Axis:
        plan, (new, each) = self.plan, self.plan.new_task
        closed = plan.rebalancing.model_copy(update={"how": "closed-form"})
        prepared = {}  # so many classes learned, and one more task open
        for classes in plan.classes:
            tasks = iter(self.stream([classes, new], [1, each]))
            learner = self.learner()
            learner.learn(next(tasks))
            learner.save(self.folder / str(classes))
            prepared[classes] = next(tasks)

        def measure(classes: int) -> dict[str, float]:
            learner = Learner.load(self.folder / str(classes), str(self.device), backbone=self.vit())
            found = self.learning(learner, prepared[classes])
            head, remembered = learner.method.head, learner.method.statistics
            return {
                "learning one more task": found["learning"],
                "of that, rebalancing": self.seconds(
                    lambda: rebalance(head, remembered, classes, plan.batch, plan.rebalancing, 0)
                ),
                "rebalancing, closed form": self.seconds(
                    lambda: rebalance(head, remembered, classes, plan.batch, closed, 0)
                ),
                "scores of one image": self.one_image(learner),
                "kept_bytes": kept(learner),
                "taken_while_learning_bytes": found["taken_while_learning_bytes"],
            }

        held = (
            f"one more task of {new} classes and {new * each} images; {plan.rebalancing.ratio * plan.batch} "
            f"pseudo-features per step, rebalancing epochs: {plan.rebalancing.epochs}"
        )
        return Axis("Classes seen", "class", "classes", list(plan.classes), held, self.grow(plan.classes, measure))

    def images(self) -> Axis:
        streams = {count: self.stream([8], [count // 8], count // 8) for count in self.plan.images}

        def measure(count: int) -> dict[str, float]:
            learner, task = self.learner(), next(iter(streams[count]))
            found = self.learning(learner, task)
            testing = {"testing with as many": self.seconds(lambda: learner.accuracies([task]))}
            return {"learning": found["learning"], **testing, "kept_bytes": kept(learner), **found}

        held = "8 classes, one task, one epoch"
        return Axis("Training images", "image", "images", list(streams), held, self.grow(self.plan.images, measure))

    def tasks(self) -> Axis:
        classes, train, test = self.plan.whole
        streams = {n: self.stream([classes // n] * n, [train] * n, test) for n in self.plan.tasks}

        def measure(count: int) -> dict[str, float]:
            learner, stream, learning, testing = self.learner(), streams[count], 0.0, 0.0
            with Peak(self.device) as peak:
                for task in stream:
                    learning += self.seconds(partial(learner.learn, task))
                    testing += self.seconds(partial(learner.accuracies, stream.seen(task.number)))
            return {
                "learning all tasks": learning,
                "testing after every task": testing,
                "kept_bytes": kept(learner),
                "known_queries_bytes": sum(t.nbytes for t in learner.known_queries.kept.values()),
                "taken_in_the_run_bytes": peak.bytes,
            }

        held = f"{classes} classes, {classes * train} training and {classes * test} test images"
        return Axis("Tasks", "task", "tasks", list(streams), held, self.grow(self.plan.tasks, measure))

    def many_classes(self) -> Axis:
        """What follows the backbone: statistics, classifier, and the closed form of `vqprompt learn`. One round."""
        plan, width, each, new = self.plan, self.plan.vit.width, 4, 10
        settings = plan.rebalancing.model_copy(update={"ratio": 4, "epochs": 1})
        closed = settings.model_copy(update={"how": "closed-form", "covariance": "shared"})
        queries = torch.randn(256, width, device=self.device)

        def measure(classes: int) -> dict[str, float]:
            labels = torch.arange(classes, device=self.device).repeat_interleave(each)
            features = torch.randn(len(labels), width, device=self.device)
            diagonal, shared = (make_statistics(width, kind).to(self.device) for kind in ("diagonal", "shared"))
            found = {
                "means and variances": self.seconds(lambda: diagonal.add(features, labels)),
                "means, shared covariance": self.seconds(lambda: shared.add(features, labels)),
            }
            head = Head(width).to(self.device)
            head.grow(classes - new)
            found["head, ten classes more"] = self.seconds(lambda: head.grow(classes))
            found["head, scores of 256"] = statistics.median(self.seconds(lambda: head(queries)) for _ in range(5))
            found["closed form"] = self.seconds(lambda: rebalance(head, shared, classes - new, plan.batch, closed, 0))
            with Peak(self.device) as peak:
                found["rebalancing, one epoch"] = self.seconds(
                    lambda: rebalance(head, diagonal, classes - new, plan.batch, settings, 0)
                )
            fixed = to_fixed_point(features.cpu().numpy()).reshape(classes, each, width)
            names = np.arange(classes * each, dtype=np.uint64).reshape(classes, each)
            records = {str(c): ClassRecord.of(names[c], fixed[c]) for c in range(classes)}
            gram = sum(map(gram_of, records.values()), np.zeros((width, width)))
            found["a model's solve (CPU)"] = self.seconds(lambda: solve(records, gram))
            found["kept_bytes"] = sum(t.nbytes for t in (*diagonal.buffers(), *head.parameters()))
            return {**found, "kept_by_a_model_bytes": sum(r.nbytes for r in records.values()),
                    "taken_while_rebalancing_bytes": peak.bytes}  # fmt: skip

        held = (
            f"features of {width} dimensions, {each} per class; {settings.ratio * plan.batch} pseudo-features "
            f"per step, at most {settings.steps} steps"
        )
        points, rounds = list(plan.many_classes), 1
        return Axis("Many classes", "class", "classes", points, held, self.grow(points, measure, rounds))

    def many_tasks(self) -> Axis:
        """As `tasks`, with a ViT so small that tasks themselves are what costs. One round."""
        size, points = 28, list(self.plan.many_tasks)
        config = ViTConfig(width=48, depth=2, heads=2, patch=14, image_size=size)
        few = Rebalancing(ratio=1, epochs=1, steps=10)
        methods = {"VQ-Prompt": {"rebalancing": few, "blocks": [0, 1]}, "Linear, closed form": CLOSED_FORM}
        rows: dict[str, list[float]] = {}
        for tasks in points:
            stream = self.stream([points[-1] // tasks] * tasks, [2] * tasks, 1, size)
            for title, options in methods.items():
                torch.manual_seed(0)
                method = "linear" if options is CLOSED_FORM else "vq-prompt"
                learner = Learner(ViT(config), method, training=Training(epochs=1, batch_size=16), tasks=tasks,
                                  device=str(self.device), compile="off", **options)  # fmt: skip
                learning, testing, testable = 0.0, 0.0, max(1, tasks // 10)
                with Peak(self.device) as peak:
                    for task in stream:
                        learning += self.seconds(partial(learner.learn, task))
                        if (task.number + 1) % testable == 0:  # ten times in all
                            testing += self.seconds(partial(learner.accuracies, stream.seen(task.number)))
                rows.setdefault(f"{title}: learning", []).append(learning)
                rows.setdefault(f"{title}: ten tests", []).append(testing)
                rows.setdefault(f"{title}: kept_bytes", []).append(kept(learner))
                rows.setdefault(f"{title}: taken_bytes", []).append(peak.bytes)
        held = f"{points[-1]} classes, two training images and one test image of each; at most {few.steps} steps"
        return Axis("Many tasks", "task", "tasks", points, held, rows)

    def pool(self) -> Axis:
        task = next(iter(self.stream([8], [self.plan.some // 8])))

        def measure(size: int) -> dict[str, float]:
            learner = self.learner(pool=size)
            found = self.learning(learner, task)
            return {"learning": found["learning"], "scores of one image": self.one_image(learner),
                    "pool_bytes": sum(p.nbytes for p in learner.method.prompting_parameters()), **found}  # fmt: skip

        held = f"{self.plan.some} images of 8 classes, one epoch"
        points = list(self.plan.pools)
        return Axis("Pool size N", "prompt", "prompts", points, held, self.grow(points, measure))

    def image_size(self) -> Axis:
        streams = {size: self.stream([8], [self.plan.some // 8], size=size) for size in self.plan.sizes}

        def measure(size: int) -> dict[str, float]:
            learner = self.learner(size)
            found = self.learning(learner, next(iter(streams[size])))
            return {"learning": found["learning"], "scores of one image": self.one_image(learner), **found}

        patches = [(size // self.plan.vit.patch) ** 2 for size in streams]
        held = f"{self.plan.some} images of 8 classes, one epoch"
        name = f"Image size {', '.join(map(str, streams))} px"
        return Axis(name, "patch", "patches", patches, held, self.grow(self.plan.sizes, measure))


def bytes_per_class(width: int) -> dict[str, int]:
    """What is kept per class, however many images it had: measured on statistics of random features."""
    found = {}
    for covariance in ("diagonal", "full", "shared"):
        remembered = make_statistics(width, covariance)
        remembered.add(torch.randn(4, width), torch.tensor([0, 0, 1, 1]))
        per_class = [remembered.means, remembered.shares, *([] if covariance == "shared" else [remembered.spread])]
        found[covariance] = sum(rows[0].nbytes for rows in per_class)
    return {**found, "classifier row": 4 * (width + 1), "shared, once": remembered.spread.nbytes}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="only these (default: all)")
    hint = "count the seconds that the processor worked for this process, where other programs run"
    parser.add_argument("--cpu-time", action="store_true", help=hint)
    args = parser.parse_args()
    if args.cpu_time and args.device != "cpu":
        parser.error("--cpu-time is for --device cpu")
    device, started, before = torch.device(args.device), time.perf_counter(), others_share()
    plan = PLANS[device.type]
    v = plan.vit
    print(hardware(device))
    print(f"ViT of width {v.width}, depth {v.depth}, patch {v.patch}, {v.image_size} px unless stated otherwise; "
          f"batch {plan.batch}; median of {plan.rounds}")  # fmt: skip
    found: dict[str, Any] = {"hardware": hardware(device), "vit": v.__dict__, "batch": plan.batch,
                             "cpu_time": args.cpu_time, "axes": {}}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(plan, device, Path(folder), args.cpu_time)
        bench.learner().learn(next(iter(bench.stream([8], [plan.some // 8]))))  # libraries load and settle
        for name in args.axes:
            axis = getattr(bench, name)()
            axis.show()
            found["axes"][name] = axis.summary()
    found["bytes_per_class"] = {width: bytes_per_class(width) for width in sorted({v.width, 384, 768})}
    print("\nBytes kept per class; their number does not depend on the number of images")
    print(f"  {'width':<8}" + "".join(f"{name:>16}" for name in found["bytes_per_class"][384]))
    for width, row in found["bytes_per_class"].items():
        print(f"  {width:<8}" + "".join(f"{value:>16,}" for value in row.values()))
    found["seconds"] = time.perf_counter() - started
    found["other_programs_share"] = others = others_share(before)
    print(f"\n{math.ceil(found['seconds'])} s; other programs took {others:.0%} of the CPUs at the same time")
    write_json(args.json, found)


if __name__ == "__main__":
    main()

"""What test_ranks.py compares: every method on a small stream. Alone, or in each of several processes:

torchrun --nproc-per-node 2 tests/two_ranks.py FILE
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from conftest import make_dataset, make_learner, make_vit, tensors_of
from torch import Tensor

from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.data.images import Images
from vqprompt.core.data.stream import Stream
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.distributed import join
from vqprompt.core.statistics.gaussians import KINDS
from vqprompt.core.statistics.sums import ClassSums
from vqprompt.research.learner import queries
from vqprompt.research.learner.state import saved_names
from vqprompt.research.methods import METHODS
from vqprompt.research.methods.recipes import FACTS
from vqprompt.research.methods.task import TaskFeatures
from vqprompt.research.results.config import resolve
from vqprompt.research.runs import runner
from vqprompt.research.training.loop import Epoch
from vqprompt.research.training.settings import Training

SETTINGS = {"epochs": 1, "batch_size": 7, "test_crop": 0.0}  # shares of 3 and 4; the last batch has a single image
CLOSED_FORM = FACTS["Linear"]["presets"]["closed-form"]
TASKS = [["class 0", "class 1"], ["class 2", "class 3"]]
REPLAY = {"epochs": 2, "ratio": 1, "samples": 0}
CHEAP = {"length": 2, "blocks": [2, 3], "exemplars": 9, "projection": 40, "map_steps": 20, "rebalancing": REPLAY,
         "identity_rebalancing": REPLAY}  # fmt: skip
OF_THE_WHOLE_BATCH = {"key_loss": "batch", "spread": {"balance": 0.1}}  # losses that are no means over images


class Learned(NamedTuple):
    """What a method knows after the first task, its losses in it, and its accuracy after both tasks."""

    tensors: dict[str, Tensor]
    losses: dict[str, list[float]]
    accuracies: list[float]


def small_stream() -> Stream:
    return Stream(make_dataset(classes=4, train=11, test=20), TASKS)


def learn(method: str, own: dict | None = None, **more: object) -> Learned:
    """own: options instead of cheap ones. more: settings of the loop."""
    known = METHODS[method].Options.model_fields
    options = own or {key: value for key, value in (CHEAP | OF_THE_WHOLE_BATCH).items() if key in known}
    training = Training(**{**METHODS[method].training_defaults, **SETTINGS, **more})
    learner, stream = make_learner(method, training=training, **options), small_stream()
    if METHODS[method].joint:
        stream = Stream(stream.dataset, [[name for task in TASKS for name in task]])
    epochs, tensors = list[Epoch](), list[dict[str, Tensor]]()
    for task in stream:
        epochs += learner.epochs(task)
        names = saved_names(learner.method)
        tensors.append({name: t for name, t in tensors_of(learner).items() if name in names})
    losses = epochs[0].losses if epochs else {}  # some methods train nothing
    return Learned(tensors[0], losses, learner.accuracies(stream.seen(len(stream) - 1)))


def frozen_features() -> Tensor:
    """Features of two tasks' images, in float64."""
    learner, stream = make_learner("linear", training=Training(**SETTINGS)), small_stream()
    return learner.features(Images.concatenate([task.test for task in stream.seen(1)])).double()


def class_sums() -> dict[str, Tensor]:
    """n, Σx and Σxxᵀ of the classes, as statistics of every kind have them before they are rounded."""
    learner, stream = make_learner("linear", training=Training(**SETTINGS)), small_stream()
    images = Images.concatenate([task.test for task in stream.seen(1)])
    labels = torch.cat([task.test.labels + 2 * task.number for task in stream.seen(1)])
    found = {}
    for kind in KINDS:
        features = TaskFeatures(learner.evaluator.features(images), labels)
        sums = features.add_up(ClassSums(kind, torch.arange(4), learner.vit.config.width))
        found |= {f"{kind} {name}": getattr(sums, name) for name in ("counts", "totals", "squares")}
        found[f"{kind} turns"] = torch.tensor(sum(1 for _ in features.computed.own()))
    return found


def run_in(folder: Path) -> None:
    """A whole run, in a folder of each process's own, as on machines without a common disk."""
    weights = folder.with_suffix(".safetensors")
    save_backbone(make_vit(), weights)
    sizes = {"size": 28, "tasks": [2, 2], "epochs": 1, "train_per_class": 4, "test_per_class": 3}
    runner.run(resolve({"data": "quickdraw50", "backbone": str(weights), "batch_size": 4, **sizes}), folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = join()
    run_in(Path(sys.argv[1]).with_name(f"run of {ranks.rank}"))
    found: dict[str, object] = {"features": frozen_features(), "sums": class_sums()}
    found |= {method: tuple(learn(method)) for method in METHODS}
    try:
        ranks.refuse_differences(color=["red", "blue"][ranks.rank])
    except UserError as error:
        found["refused"] = str(error)
    found["closed form"] = tuple(learn("linear", CLOSED_FORM))
    queries.IN_MEMORY_OTHERWISE = 0
    found["queries in files"] = tuple(learn("coda-p", augment="flip"))
    if ranks.first:
        torch.save(found, sys.argv[1])
    ranks.leave()
    assert ranks.lifeline is not None and not any(thread.is_alive() for thread in ranks.lifeline.threads)
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").glob("*")]  # no folder: not on Linux
    assert not any("gloo" in name for name in names), "a thread of PyTorch's would abort Python's end once in a while"

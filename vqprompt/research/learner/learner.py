"""The learner: a backbone, a method and the classes learned so far. Learn a task, test, predict, save, load.

learner = Learner(backbone="vit-s14", method="vq-prompt", size=70)
for task in Stream(open_dataset("quickdraw50", size=70), tasks=10, seed=1):
    learner.learn(task)
learner.predict(["drawing.png"])
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.data.images import Images
from vqprompt.core.data.stream import Task
from vqprompt.core.errors import CheckpointError, UserError
from vqprompt.core.progress import Report, ignore
from vqprompt.core.runtime.device import Runtime, derive_seed, rounding, seeded
from vqprompt.core.runtime.distributed import ALONE
from vqprompt.research.learner.build import Built, build_method, rebuild_method
from vqprompt.research.learner.evaluator import Evaluator, Predictions
from vqprompt.research.learner.predictor import Picture, Predictor
from vqprompt.research.learner.queries import QueryCache
from vqprompt.research.learner.state import LearnerRecord, OpenTask, SavedState, saved_names, write_state
from vqprompt.research.methods import find_method
from vqprompt.research.methods.base import Method
from vqprompt.research.methods.task import TaskData, TaskInfo
from vqprompt.research.training.batches import TaskBatches
from vqprompt.research.training.loop import Epoch, TrainingLoop
from vqprompt.research.training.settings import Training


class Learner:
    """
    backbone: a name (`vqprompt backbones`), a weights file, or a ViT. method: a name (`vqprompt methods`).
    size: image size in px, the backbone's own by default. tasks: how many are planned, for methods that divide a pool.
    training: settings of the loop. device: "auto", "cpu", "cuda", … precision: "auto", "fp32", "bf16".
    compile: "auto" (on CUDA), "on", "off". deterministic: on CUDA, use only kernels that give the same bits every time.
    options: the method's own settings.
    """

    def __init__(
        self,
        backbone: str | Path | ViT = "vit-s14",
        method: str = "vq-prompt",
        *,
        size: int | None = None,
        tasks: int = 10,
        seed: int = 0,
        training: Training | None = None,
        device: str = "auto",
        precision: str = "auto",
        compile: str = "auto",
        deterministic: bool = True,
        **options: Any,
    ) -> None:
        runtime = Runtime.pick(device, precision, compile, deterministic)
        settings = training or Training(**find_method(method).training_defaults)
        built = build_method(backbone, method, options, size, tasks, seed, runtime, settings.normalize)
        self._assemble(built, method, seed, settings, runtime)

    def _assemble(self, built: Built, name: str, seed: int, settings: Training, runtime: Runtime) -> None:
        self.method, self.backbone, self.built = built.method, built.backbone, built
        self.method_name, self.seed, self.settings, self.runtime = name, seed, settings, runtime
        self.evaluator = Evaluator(self.method, runtime, settings.test_crop)
        here = rounding(runtime.device, runtime.ranks.count)  # what another machine cached may differ in the last bits
        depends_on = (built.fingerprint, settings.test_crop, runtime.deterministic, here)
        self.known_queries = QueryCache(self.evaluator.compute_known, self.method, self.device, depends_on)
        self.evaluator.known = self.known_queries
        self.shared_queries: Path | None = None  # a folder in which runs share queries of augmented views
        self.classes: list[str] = []
        self.history: list[TaskInfo] = []
        self.images_seen, self.seconds_training = 0, 0.0
        self.open_task: OpenTask | None = None  # it stays here if learning is interrupted

    @property
    def vit(self) -> ViT:
        return self.method.vit

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    # ------------------------------------------------------------------ learn

    def learn(self, task: Task, progress: Report = ignore) -> None:
        """Learn a task's classes from its training images. Afterwards the images are not needed any more."""
        for _ in self.epochs(task, progress):
            pass

    def epochs(self, task: Task, progress: Report = ignore) -> Iterator[Epoch]:
        """The same, epoch by epoch. Between two of them, the learner can be saved in the middle of the task. The task
        is learned when there are no more epochs."""
        info = self._check(task)
        seed, resumed = derive_seed(self.seed, "task", info.number), self.open_task
        self.open_task = opened = OpenTask(info, task.classes)
        self.known_queries.start_task(task.train)
        data = self._open_task(task, info, seed, resumed)
        opened.features_before = data.features_before
        loop = self._make_loop(data, seed, progress)
        if loop is not None:
            if resumed is not None and resumed.loop is not None:
                loop.resume(resumed.loop)
            self.method.train()
            for epoch in loop:
                self._refuse_if_diverged(info, epoch)
                self.method.end_epoch(epoch.number)
                opened.loop = loop.state()
                yield epoch
                opened.loop = None
            self.images_seen += loop.images_seen
            self.seconds_training += loop.seconds
        with self.evaluator.reporting(progress):
            self._close_task(task, data)

    def continue_after(self, tasks: int) -> None:
        """Count this many earlier tasks, which the method learned elsewhere. This learner does not know their classes.
        Call it before the first task."""
        self.history = [TaskInfo(number, 0, 0) for number in range(tasks)]

    def _check(self, task: Task) -> TaskInfo:
        """Refuse what cannot be learned, before anything changes."""
        self._refuse_if_interrupted()
        task.train.check()
        present = self._positions(task)[task.train.labels.unique()].sort().values.tolist()
        returning = tuple(place for place in present if place < len(self.classes))
        able, kept = self.method.classes_return, self.method.statistics
        if returning and not (able and (kept is None or kept.centroids == 1)):
            name, but = self.classes[returning[0]], ", but can with rebalancing.centroids=1" if able else ""
            raise UserError(f"the class {name!r} was learned before; {self.method_name} cannot learn it again{but}")
        if self.method.joint and self.history:
            raise UserError(
                f"{self.method_name} learns all classes at once and has learned {len(self.classes)} already; "
                "give it one task with all classes: Stream(dataset, tasks=1)"
            )
        if self.open_task is not None and self.open_task.classes != task.classes:
            raise CheckpointError(
                f"the checkpoint was learning {self.open_task.classes}, not {task.classes}; resume with the same data"
            )
        info = TaskInfo(len(self.history), len(self.classes), len({*task.classes} - {*self.classes}), returning)
        self.method.check_task(info)
        return info

    def _open_task(self, task: Task, info: TaskInfo, seed: int, resumed: OpenTask | None) -> TaskData:
        """Start the task, or continue one that is half learned."""
        before = None if resumed is None else resumed.features_before
        if resumed is None:
            if self.method.needs_features_before:  # now: the statistics of old classes are of features before training
                before = self.evaluator.features(task.train).whole()
            with seeded(derive_seed(seed, "start")):
                self.method.start_task(info)
            self.method.to(self.device)
        labels = self._positions(task)[task.train.labels].to(self.device)
        finish_seed = derive_seed(seed, "finish")
        data = TaskData(info, task.train, labels, self.evaluator, self.settings.batch_size, finish_seed)
        data.features_before = None if before is None else before.to(self.device)
        if self.settings.statistics_views == "augmented":
            data.augmented = partial(self.evaluator.augmented_features, task.train, self.settings, finish_seed)
        if resumed is None:
            self.method.prepare_training(data)
        self._agree()
        return data

    def _agree(self) -> None:
        """Give all processes the values of the first: they compute the same, but machines may round differently."""
        if self.runtime.ranks.count > 1:
            names = saved_names(self.method)
            self.runtime.ranks.copy_first(t for name, t in self.method.state_dict().items() if name in names)

    def _make_loop(self, data: TaskData, seed: int, progress: Report) -> TrainingLoop | None:
        """None if the method has nothing to train."""
        images, labels = self.method.training_images(data)
        groups, queries = self.method.parameter_groups(), None
        if not groups:
            return None
        if self.method.uses_query:
            shared = self.shared_queries if self.runtime.ranks.count == 1 else None
            queries = self.known_queries.for_training(images, self.settings, seed, shared)
        batches = TaskBatches(images, labels, self.settings, seed, self.device, queries, self.runtime.ranks)
        asks = self.method.uses_query and queries is None and not self.method.tunes_backbone
        return TrainingLoop(
            self.method.losses, groups, self.vit, batches, self.runtime, data.task.number, progress, queries=asks
        )

    def _close_task(self, task: Task, data: TaskData) -> None:
        self.method.eval()
        self.method.finish_task(data)
        self.method.end_task()
        self._agree()
        self.history.append(data.task)
        self.classes += [name for name in task.classes if name not in self.classes]
        self.open_task = None

    def _positions(self, task: Task) -> Tensor:
        """Where the classes of a task are in the head [c]: new ones come after those learned so far."""
        position = {name: place for place, name in enumerate(dict.fromkeys([*self.classes, *task.classes]))}
        return torch.tensor([position[name] for name in task.classes])

    def _refuse_if_interrupted(self) -> None:
        if self.open_task is not None and self.open_task.loop is None:
            names = ", ".join(self.open_task.classes[:3])
            raise UserError(
                f"learning {names} … was interrupted, and a half-learned task can be neither "
                "repeated nor saved; continue with Learner.load from the last save, or with a new learner"
            )

    def _refuse_if_diverged(self, task: TaskInfo, epoch: Epoch) -> None:
        for name, steps in epoch.losses.items():
            if not all(map(math.isfinite, steps)):
                raise UserError(
                    f"task {task.number + 1}, epoch {epoch.number + 1}: the {name} loss is not a finite number any "
                    f"more; use a learning rate below lr={self.settings.lr:g}"
                )

    # ------------------------------------------------------------------ test and predict

    def test(self, tasks: Sequence[Task], progress: Report = ignore) -> Predictions:
        """Predictions for each task's test images, among all classes learned so far."""
        truth = torch.cat([self._positions(t)[t.test.labels] for t in tasks])
        sizes = [len(t.test) for t in tasks]
        known = self.evaluator.known_rows(*(t.test for t in tasks))  # they are kept per task
        task_of = torch.arange(len(tasks)).repeat_interleave(torch.tensor(sizes))
        candidates = torch.zeros(len(tasks), self.method.head.out_features, dtype=torch.bool)
        candidates[task_of, truth] = True
        with self.evaluator.reporting(progress):
            images = Images.concatenate([t.test for t in tasks])
            answers = self.evaluator.guesses(images, known, candidates, task_of)
        guesses, probability, within = (answer.cpu() for answer in answers)
        return Predictions(truth, guesses, probability, within, sizes)

    def accuracies(self, tasks: Sequence[Task], progress: Report = ignore) -> list[float]:
        """Percent right on each task's test images, among all classes learned so far."""
        return self.test(tasks, progress).accuracies()

    def features(self, images: Images, task: int | None = None) -> Tensor:
        """Features [n, D] of un-augmented images. task: the number of their task, if they are its training images."""
        return self.evaluator.features(images, task).whole()

    def logits(self, images: Images) -> Tensor:
        """Scores [n, classes] for every class learned so far."""
        return self.evaluator.logits(images)

    def queries(self, images: Images) -> Tensor:
        """Class-token features without prompts [n, D]."""
        return self.evaluator.queries(images).whole()

    def prompt_use(self, images: Images) -> list[list[int]] | None:
        """How many images choose each prompt, block by block; None if the method chooses none."""
        size = self.method.choosable
        if not (self.method.uses_query and size):
            return None
        chosen = self.evaluator.queries(images).then(lambda queries: cast(Tensor, self.method.choices(queries)))
        blocks = chosen.whole().cpu().unbind(1)
        return [torch.bincount(block.flatten(), minlength=size).tolist() for block in blocks]

    def predictor(self) -> Predictor:
        """A snapshot of what has been learned up to now. Other threads can use it while this learner continues."""
        return self._predictor(self.method.frozen_copy())

    def _predictor(self, method: Method) -> Predictor:
        evaluator = Evaluator(method, replace(self.runtime, ranks=ALONE), self.settings.test_crop)
        return Predictor(evaluator, self.classes, self.settings.stored)

    def predict_proba(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """Probabilities [n, classes] for image files, Pillow images or uint8 arrays [H, W, 3]."""
        return self._predictor(self.method).predict_proba(pictures)

    def predict(self, pictures: Picture | Sequence[Picture]) -> list[str]:
        """The most likely class of each picture."""
        return self._predictor(self.method).predict(pictures)

    # ------------------------------------------------------------------ save and load

    def save(self, folder: str | Path, run: dict[str, Any] | None = None) -> None:
        """Write everything learned. A frozen backbone is named, not copied. run: what a run wants to find again."""
        self._refuse_if_interrupted()
        if run is None and (Path(folder) / "config.json").exists():
            raise UserError(f"{folder}: holds a run, which could not be resumed afterwards; save to another folder")
        record = LearnerRecord(
            backbone=self.backbone, weights=self.built.weights, fingerprint=self.built.fingerprint,
            method=self.method_name, options=self.method.options.model_dump(), size=self.vit.config.image_size,
            planned_tasks=self.method.planned_tasks, seed=self.seed, training=self.settings, classes=self.classes,
            tasks=self.history, images_seen=self.images_seen, seconds_training=self.seconds_training,
            saved=time.strftime("%Y-%m-%dT%H:%M:%S%z"), unfinished=None, run=run,
        )  # fmt: skip
        write_state(Path(folder), record, self.method, self.open_task)

    @classmethod
    def load(
        cls, folder: str | Path, device: str = "auto", precision: str = "auto", compile: str = "auto",
        deterministic: bool = True, backbone: str | Path | ViT | None = None,
    ) -> Learner:  # fmt: skip
        """What `save` wrote. backbone: where the weights are now, if they have moved."""
        return cls.from_state(
            SavedState.read(Path(folder)), Runtime.pick(device, precision, compile, deterministic), backbone
        )

    @classmethod
    def from_state(cls, state: SavedState, runtime: Runtime, backbone: str | Path | ViT | None = None) -> Learner:
        built, saved = rebuild_method(state, runtime, backbone), state.record
        learner = cls.__new__(cls)
        learner._assemble(built, saved.method, saved.seed, saved.training, runtime)
        learner.classes, learner.history = list(saved.classes), list(saved.tasks)
        learner.images_seen, learner.seconds_training = saved.images_seen, saved.seconds_training
        learner.open_task = state.open_task
        return learner

"""The learner: a backbone, a method and the classes learned so far. Learn a task, predict, save, load.

learner = Learner(backbone="vit-s14", method="vq-prompt", size=70)
for task in Stream(open_dataset("quickdraw50", size=70), tasks=10, seed=1):
    learner.learn(task)
learner.predict(["drawing.png"])
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from vqprompt.backbones.load import backbone_path, fingerprint, load_backbone
from vqprompt.backbones.registry import BACKBONES
from vqprompt.backbones.vit import ViT
from vqprompt.data.decode import open_image, to_pixels
from vqprompt.data.images import Images
from vqprompt.data.store import Store
from vqprompt.data.stream import Task
from vqprompt.errors import CheckpointError, UserError, explain
from vqprompt.files import cache_folder, save_array
from vqprompt.learner.checkpoint import load_tensors, read_checkpoint, write_checkpoint
from vqprompt.methods import find_method
from vqprompt.methods.base import Method
from vqprompt.methods.task import Finish, TaskInfo
from vqprompt.progress import Stage
from vqprompt.runtime import derive_seed, pick_device, pick_precision, same_bits, seeded
from vqprompt.training.batches import clean_images, draw, epoch_views
from vqprompt.training.loop import fit
from vqprompt.training.settings import Training
from vqprompt.training.view import View

Advance = Callable[[int, Stage], None]
"""Called with images just dealt with and what is being done."""


SPARE_DISK = 20 << 30  # bytes that kept queries leave free
SAVED = (
    "backbone", "fingerprint", "method", "options", "size", "planned_tasks", "seed", "training", "classes", "tasks",
    "images_seen", "seconds_training", "unfinished",
)  # fmt: skip


def no_progress(count: int, stage: Stage) -> None: ...


class Learner:
    """
    backbone: a name (`vqprompt backbones`), a weights file, or a ViT. method: a name (`vqprompt methods`).
    size: image size in px, the backbone's own by default. tasks: how many are planned, for methods that divide a pool.
    training: settings of the loop. device: "auto", "cpu", "cuda", … precision: "auto", "fp32", "bf16".
    compile: "auto" (on CUDA), "on", "off". deterministic: on CUDA, only kernels that repeat themselves.
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
        self.device, self.deterministic = pick_device(device), deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants before it repeats itself
        method_class = find_method(method)
        self.settings = training or Training(**method_class.training_defaults)
        self.seed, self.method_name = seed, method
        self.backbone = "custom" if isinstance(backbone, ViT) else backbone_path(backbone)
        try:
            checked = method_class.Options(**options)
        except ValidationError as error:
            raise UserError(explain(error, f"the options of {method}")) from None
        if isinstance(backbone, ViT):  # a copy: what is learned here is nobody else's business
            vit = copy.deepcopy(backbone).resize(size or backbone.config.image_size)
        else:
            vit = load_backbone(backbone, size)
        self.fingerprint = fingerprint(vit)
        bf16 = pick_precision(precision, self.device) == torch.bfloat16
        # a frozen backbone is simply stored in bf16; one that learns keeps fp32 weights and casts as it goes
        self.autocast = bf16 and method_class.tunes_backbone
        vit = vit.to(self.device, torch.bfloat16 if bf16 and not method_class.tunes_backbone else torch.float32)
        vit.requires_grad_(method_class.tunes_backbone)
        if compile == "on" or (compile == "auto" and self.device.type == "cuda"):
            torch._dynamo.config.suppress_errors = compile == "auto"  # no compiler: run as written
            vit.compile_blocks(any_length=method_class.prompts_stay)
        with seeded(derive_seed(seed, "method")):
            self.method: Method = method_class(vit, checked, tasks).to(self.device)
        self.classes: list[str] = []
        self.history: list[TaskInfo] = []
        self._queries: dict[str, Tensor] = {}
        self._passing: list[str] = []  # those of them that go when the next task comes
        self._unfinished: tuple[TaskInfo, list[str], int, dict[str, Any]] | None = None
        self._half_learned: list[str] | None = None  # classes; set while `learn` is at them, but for its checkpoints
        self.images_seen, self.seconds_training = 0, 0.0
        self.shared_queries: Path | None = None  # a folder in which runs keep queries of augmented views for each other

    @property
    def vit(self) -> ViT:
        return self.method.vit

    # ------------------------------------------------------------------ learn

    def learn(
        self,
        task: Task,
        progress: Advance = no_progress,
        on_epoch: Callable[[int, dict[str, list[float]]], None] = lambda epoch, losses: None,
        checkpoint: Callable[[], None] | None = None,
    ) -> None:
        """Learn a task's classes from its training images; afterwards they are not needed any more.

        on_epoch: called with the losses of the epoch's steps, term by term. checkpoint: called after an epoch, when
        `self` can be saved in the middle of the task.
        """
        self._refuse_if_interrupted()
        twice = sorted(set(task.classes) & set(self.classes))
        if twice:
            raise UserError(f"the class {twice[0]!r} was learned before; tasks must have classes of their own")
        images, seed = task.train, derive_seed(self.seed, "task", len(self.history))
        resume = None
        for key in self._passing:  # queries of the last task's images: nothing asks for them again
            self._queries.pop(key, None)
        self._passing = [self._query_key(images, mirrored) for mirrored in (False, True)]
        if self._unfinished is None:
            info = TaskInfo(len(self.history), len(self.classes), len(task.classes))
            self._half_learned = task.classes
            with seeded(derive_seed(seed, "start")):
                self.method.start_task(info)
            self.method.to(self.device)
        else:
            info, names, epoch, optimizer = self._unfinished
            if names != task.classes:
                raise CheckpointError(
                    f"the checkpoint was learning {names}, not {task.classes}; resume with the same data"
                )
            self._half_learned, resume = task.classes, (epoch, optimizer)
        labels = (images.labels + info.old_classes).to(self.device)
        if resume is None:
            self.method.prepare_training(lambda: (self.queries(images), labels))
        shown, shown_labels = self.method.training_images(images, labels)

        def after_epoch(epoch: int, losses: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
            values = torch.stack(list(losses.values())).tolist()  # read at once: the device waits once an epoch
            told = dict(zip(losses, values, strict=True))
            if lost := [name for name, steps in told.items() if not all(map(math.isfinite, steps))]:
                raise UserError(
                    f"task {info.number + 1}, epoch {epoch + 1}: the {lost[0]} loss is not a finite number any more; "
                    f"learn more slowly than lr={self.settings.lr:g}"
                )
            on_epoch(epoch, told)
            if checkpoint is not None and epoch + 1 < self.settings.epochs:
                self._unfinished, self._half_learned = (info, task.classes, epoch + 1, optimizer.state_dict()), None
                checkpoint()
                self._half_learned = task.classes

        queries = self._training_queries(shown)
        self.method.train()  # not before: taking queries puts it into evaluation
        if groups := self.method.parameter_groups():
            with same_bits(self.device, self.deterministic):
                seen, seconds = fit(
                    self.method.losses,
                    groups,
                    self.vit,
                    shown,
                    shown_labels,
                    self.settings,
                    seed,
                    self.device,
                    task=info.number,
                    queries=queries,
                    epoch_queries=self._epoch_queries(shown, seed),
                    autocast=self.autocast,
                    on_batch=lambda count: progress(count, Stage.LEARNING),
                    on_epoch=after_epoch,
                    resume=resume,
                )
            self.images_seen, self.seconds_training = self.images_seen + seen, self.seconds_training + seconds
        self.method.eval()
        self.method.finish_task(
            Finish(
                info,
                features=lambda: (self.extract(images, progress, info.number), labels),
                queries=lambda: (self.queries(images), labels),
                images=images,
                logits=lambda shown: self.logits(shown, progress),
                batch_size=self.settings.batch_size,
                seed=derive_seed(seed, "finish"),
            )
        )
        self.method.end_task()
        self._unfinished = self._half_learned = None
        self.history.append(info)
        self.classes += task.classes

    def _refuse_if_interrupted(self) -> None:
        if self._half_learned is not None:
            raise UserError(
                f"learning {', '.join(self._half_learned[:3])} … was interrupted, and a half-learned task can be "
                "neither repeated nor saved; go on with Learner.load from what was saved last, or with a new learner"
            )

    # ------------------------------------------------------------------ look

    @torch.no_grad()
    def _over(
        self, images: Images, compute: Callable[[View], Tensor], progress: Advance, stage: Stage, task: int | None = None,
        known: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`compute` over clean views of all images, in order, in batches of one size. task: where it is known; known:
        queries, from who has them."""
        self.method.eval()
        size = 256 if self.device.type == "cuda" else 64
        if known is None and self.method.uses_query and compute is not _query_of:
            known = self.queries(images)
        order = torch.arange(len(images))
        if self.device.type == "cuda":  # compiled code wants few shapes: fill up with the last image, to a power of two
            size = min(size, 1 << (len(order) - 1).bit_length())
            order = torch.cat([order, order[-1:].expand(-len(order) % size)])
        results, aspect = [], images.aspect
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)
        with same_bits(self.device, self.deterministic), autocast:
            for index, pixels in images.batches(order.split(size), self.device):
                query = None if known is None else known[index.to(self.device)]
                clean = clean_images(self.vit, pixels, aspect[index], self.settings.test_crop)
                results.append(compute(View(self.vit, clean, query, task=task)))
                progress(len(index), stage)
        return torch.cat(results)[: len(images)]

    def extract(self, images: Images, progress: Advance = no_progress, task: int | None = None) -> Tensor:
        """Clean features [n, D] with what has been learned so far. task: theirs, if they are its training images."""
        return self._over(images, lambda view: self.method.features(view)[0].float(), progress, Stage.STATISTICS, task)

    def logits(self, images: Images, progress: Advance = no_progress) -> Tensor:
        """Scores [n, classes] for every class learned so far."""
        return self._over(images, lambda view: self.method.logits(view).float(), progress, Stage.TESTING)

    def queries(self, images: Images, mirrored: bool = False) -> Tensor:
        """Class-token features without prompts [n, D]. The frozen backbone gives the same ones for ever, so they are
        kept: in memory, and on disk for images that have a name there."""
        images.check()  # known queries do not open a closed task
        if self.method.tunes_backbone:
            raise RuntimeError("the queries of a backbone that learns do not stay the same")
        key = self._query_key(images, mirrored)
        if key not in self._queries:
            name = hashlib.sha256(key.encode()).hexdigest()[:24]
            file = cache_folder() / "queries" / f"{name}.npy" if images.named else None
            if file is not None and file.exists():
                self._queries[key] = torch.from_numpy(np.load(file)).to(self.device)
            else:
                found = self._over(images, _mirrored_query_of if mirrored else _query_of, no_progress, Stage.TESTING)
                if file is not None:
                    save_array(file, found.cpu().numpy())
                self._queries[key] = found
        return self._queries[key]

    def _query_key(self, images: Images, mirrored: bool) -> str:
        return json.dumps([self.fingerprint, images.key, self.vit.config.image_size, self.settings.test_crop, mirrored,
                           str(self.vit.dtype), self.device.type, self.deterministic])  # fmt: skip

    def _training_queries(self, images: Images) -> list[Tensor] | None:
        """Queries known before training: of un-augmented images, and of mirrored ones where there are flips."""
        if not self.method.uses_query or self.settings.augment == "crop":
            return None
        return [self.queries(images)] + (
            [self.queries(images, mirrored=True)] if self.settings.augment == "flip" else []
        )

    def _epoch_queries(self, images: Images, seed: int) -> Callable[[int, Sequence[Tensor]], Sequence[Tensor]] | None:
        """Queries of an epoch's augmented views: a third of a step's work, and the same for every method, since views
        are drawn from the seed alone. So runs that follow each other share them."""
        folder, s = self.shared_queries, self.settings
        if folder is None or not self.method.uses_query or s.augment != "crop" or not images.named:
            return None

        @torch.no_grad()
        def of_epoch(epoch: int, batches: Sequence[Tensor]) -> Sequence[Tensor]:
            key = json.dumps([self._query_key(images, False), s.batch_size, s.epochs, seed, epoch])
            file = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
            try:
                found = torch.from_numpy(np.load(file)).to(self.device)
            except OSError:  # nobody was here before
                views = epoch_views(images, batches, s, seed, epoch, self.device)
                found = torch.cat([self.vit(draw(inputs, self.vit)).float() for _, inputs in views])
                with suppress(OSError):  # the disk is full, or somebody cleared the folder: then they are not shared
                    folder.mkdir(parents=True, exist_ok=True)
                    if shutil.disk_usage(folder).free > SPARE_DISK:
                        save_array(file, found.cpu().numpy())
            return found.split([len(batch) for batch in batches])

        return of_epoch

    def accuracies(self, tasks: Sequence[Task], progress: Advance = no_progress) -> list[float]:
        """Percent right on each task's test images, among all classes learned so far."""
        position = {name: i for i, name in enumerate(self.classes)}
        truth = torch.cat([torch.tensor([position[name] for name in t.classes])[t.test.labels] for t in tasks])
        # queries task by task, as they were kept; and of scores, [images, classes], no more than a batch at a time
        known = torch.cat([self.queries(t.test) for t in tasks]) if self.method.uses_query else None
        tests = Images.concatenate([t.test for t in tasks])
        guesses = self._over(
            tests, lambda view: self.method.logits(view).argmax(1), progress, Stage.TESTING, known=known
        )
        right = guesses.cpu() == truth
        return [100 * int(part.sum()) / len(part) for part in right.split([len(t.test) for t in tasks])]

    def prompt_use(self, task: Task) -> list[list[int]] | None:
        """How many of a task's training images choose each prompt, block by block; None if the method chooses none."""
        if not self.method.uses_query:
            return None
        chosen = self.method.choices(self.queries(task.train))
        if chosen is None:
            return None
        size = self.method.choosable
        return [torch.bincount(column.flatten().cpu(), minlength=size).tolist() for column in chosen.unbind(1)]

    # ------------------------------------------------------------------ predict

    def scores(self, images: Sequence[str | Path | Image.Image | np.ndarray]) -> Tensor:
        """Probabilities [n, classes] for image files, Pillow images or uint8 arrays [H, W, 3]."""
        if not self.classes:
            raise UserError("nothing has been learned yet; learn a task first")
        side = round(self.vit.config.image_size * 8 / 7)
        opened = [open_image(image) for image in images]
        if not opened:
            return torch.zeros(0, len(self.classes))
        pixels = np.stack([to_pixels(image, side) for image in opened])
        store = Store(pixels, np.array([i.width / i.height for i in opened]), fingerprint="")
        known, self._queries = self._queries, {}  # nameless pixels: what is computed for them is not kept
        try:
            scores = self.logits(Images(store, np.arange(len(opened)), np.zeros(len(opened))))
            return scores[:, : len(self.classes)].softmax(dim=1).cpu()  # in mid-task there are rows for classes to come
        finally:
            self._queries = known

    def predict(self, images: Sequence[str | Path | Image.Image | np.ndarray]) -> list[str]:
        """The most likely class of each image."""
        return [self.classes[i] for i in self.scores(images).argmax(dim=1).tolist()]

    # ------------------------------------------------------------------ save and load

    def save(self, folder: str | Path, **extra: Any) -> None:
        """Write everything learned; a frozen backbone is named, not copied. `extra` goes into the JSON beside it."""
        self._refuse_if_interrupted()
        if "run" not in extra and (Path(folder) / "config.json").exists():
            raise UserError(f"{folder}: holds a run, which could not be resumed any more; save to another folder")
        tensors = {name: t for name, t in self.method.state_dict().items() if name in self._saved_names()}
        info: dict[str, Any] = {
            "backbone": self.backbone,
            "fingerprint": self.fingerprint,
            "method": self.method_name,
            "options": self.method.options.model_dump(),
            "size": self.vit.config.image_size,
            "planned_tasks": self.method.planned_tasks,
            "seed": self.seed,
            "training": self.settings.model_dump(),
            "classes": self.classes,
            "tasks": [[t.number, t.old_classes, t.new_classes] for t in self.history],
            "images_seen": self.images_seen,
            "seconds_training": self.seconds_training,
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "unfinished": None,
        }
        tensors = {f"method.{name}": t for name, t in tensors.items()}
        if self._unfinished is not None:
            task, names, epoch, optimizer = self._unfinished
            scalars: dict[str, Any] = {}
            for parameter, values in optimizer["state"].items():
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{parameter}.{name}"] = value
                    else:
                        scalars[f"{parameter}.{name}"] = value
            info["unfinished"] = {
                "task": [task.number, task.old_classes, task.new_classes],
                "classes": names,
                "epoch": epoch,
                "groups": [
                    {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
                    for group in optimizer["param_groups"]
                ],
                "scalars": scalars,
            }
        write_checkpoint(Path(folder), tensors, {**info, **extra})

    @classmethod
    def load(cls, folder: str | Path, device: str = "auto", precision: str = "auto", compile: str = "auto",
             deterministic: bool = True, backbone: str | Path | ViT | None = None) -> Learner:  # fmt: skip
        """What `save` wrote. backbone: where the weights are now, if not where they were."""
        folder = Path(folder)
        tensors, info = read_checkpoint(folder)
        if missing := [key for key in SAVED if key not in info]:
            raise CheckpointError(f"{folder}: the checkpoint lacks {', '.join(missing)}; restore it or start over")
        if backbone is None and info["backbone"] not in BACKBONES and not Path(info["backbone"]).is_file():
            raise CheckpointError(
                f"{folder}: learned with the weights {info['backbone']}, which are not there; say where they are: "
                "backbone=… of Learner.load, --backbone of vqprompt predict"
            )
        learner = cls(
            backbone or info["backbone"], info["method"], size=info["size"], tasks=info["planned_tasks"],
            seed=info["seed"], training=Training(**info["training"]), device=device, precision=precision,
            compile=compile, deterministic=deterministic, **info["options"],
        )  # fmt: skip
        if learner.fingerprint != info["fingerprint"]:
            raise CheckpointError(
                f"{folder}: learned with other weights of {info['backbone']!r} than these; give the original backbone"
            )
        unfinished = info["unfinished"]
        for numbers in info["tasks"]:
            learner.method.start_task(TaskInfo(*numbers))  # grows what grows; values follow
            learner.method.end_task()
        if unfinished:
            learner.method.start_task(TaskInfo(*unfinished["task"]))
        learner.method.to(learner.device)
        own = {n.removeprefix("method."): t for n, t in tensors.items() if n.startswith("method.")}
        load_tensors(learner.method, own, learner._saved_names(), str(folder))
        learner.classes, learner.history = list(info["classes"]), [TaskInfo(*t) for t in info["tasks"]]
        learner.images_seen, learner.seconds_training = info["images_seen"], info["seconds_training"]
        if unfinished:
            state: dict[int, dict[str, Any]] = {}
            for name, value in tensors.items():
                if name.startswith("optimizer."):
                    _, parameter, leaf = name.split(".")
                    state.setdefault(int(parameter), {})[leaf] = value
            for name, value in unfinished["scalars"].items():
                parameter, leaf = name.split(".")
                state.setdefault(int(parameter), {})[leaf] = value
            optimizer = {"state": state, "param_groups": unfinished["groups"]}
            learner._unfinished = (
                TaskInfo(*unfinished["task"]), unfinished["classes"], unfinished["epoch"], optimizer,
            )  # fmt: skip
        learner.method.eval()
        return learner

    def _saved_names(self) -> set[str]:
        """Tensors that belong to what was learned; a frozen backbone's do not."""
        names = self.method.state_dict().keys()
        return {n for n in names if self.method.tunes_backbone or not n.startswith("vit.")}


def _query_of(view: View) -> Tensor:
    return view.query


def _mirrored_query_of(view: View) -> Tensor:
    return view.vit(view.images.flip(-1)).float()

"""One run: a stream is learned task by task and tested after each. It can be resumed from its folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from pydantic import Field

from vqprompt.core import metrics as m
from vqprompt.core.data.stream import Stream, Task
from vqprompt.core.errors import CheckpointError, UserError, number_from_environment
from vqprompt.core.files import lock_folder, read_regular, write_atomically
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.core.runtime.device import Runtime, hardware, rounding
from vqprompt.core.runtime.distributed import joined
from vqprompt.research.datasets import open_dataset
from vqprompt.research.learner.checkpoint import INFO, tidy
from vqprompt.research.learner.learner import Learner
from vqprompt.research.learner.state import SavedState
from vqprompt.research.results.config import RESUMABLE_SETTINGS, RunConfig
from vqprompt.research.results.result import SCHEMA_VERSION, EpochLosses, Progressed, PromptUse, RunResult
from vqprompt.research.runs.class_results import class_results
from vqprompt.research.runs.costs import count_flops, forget_peak, memory_used
from vqprompt.research.runs.refusals import TASKS, refuse_conflicts, refuse_what_cannot_fit
from vqprompt.research.runs.tracking import Tracking

# at least between two saves in the middle of a task
CHECKPOINT_SECONDS = number_from_environment("VQPROMPT_CHECKPOINT_SECONDS", 60, zero=True)
TRAINING_PASSES = 2.0  # work of one training image, in test images; for the remaining time


def run(
    config: RunConfig,
    out: Path,
    resume: bool = False,
    progress: Report = ignore,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    report: bool = True,
    shared_queries: Path | None = None,
    track: Sequence[str] = (),
    at_once: int = 1,
) -> RunResult:
    """Do a run in the folder `out`; returns its result, which is also in `out/metrics.json`.

    In several processes (distributed.py) each of them calls this; the first one writes.

    report: write `out/report.html`. shared_queries: a folder in which runs on the same images share queries
    (learner/queries.py). track: names of `tracking.TRACKERS`. at_once: how many runs share the hardware; it is noted in
    the result, because speeds depend on it.
    """
    refuse_what_cannot_fit(config)
    first = joined().first
    if first:
        refuse_conflicts(out, config, resume)
    with lock_folder(out) if first else nullcontext():
        current = Run(config, out, progress, checkpoint_seconds, shared_queries, track, at_once)
        current.open(resume)
        result = current.learn_all()
        if report and first:
            from vqprompt.research.report.pages import write_report  # slow to import, and needed only here

            write_report(out)
        current.tracking.finish(result)
        return result


class RunState(Progressed):
    """What a run remembers in its checkpoint besides the learner."""

    what = "state"
    accuracy: list[list[float]] = []  # after each task, on the tasks so far
    prompt_use: list[list[list[int]] | None] = []  # after each task, of its training images
    test_prompt_use: list[list[list[dict[int, int]]]] = []  # after the last task, of the test images of each
    steps: int = 0
    seconds_in_task: float = 0.0  # of the open task, up to the last save
    trainable: int = 0  # the most parameters that any task trained
    images: list[str] = Field([], description="digests of each task's images")


class Run:
    """The steps of a run, in order: `open`, then for each task `learn`, `test`, `save_task` and `write_result`."""

    learner: Learner
    stream: Stream

    def __init__(
        self, config: RunConfig, out: Path, progress: Report, checkpoint_seconds: float, shared_queries: Path | None,
        track: Sequence[str], at_once: int,
    ) -> None:  # fmt: skip
        self.config, self.out, self.progress, self.at_once = config, out, progress, at_once
        self.checkpoint_seconds, self.shared_queries = checkpoint_seconds, shared_queries
        self.ranks = joined()
        self.tracking = Tracking(track if self.ranks.first else (), out)
        self.state = RunState()
        self.started = self.saved = self.task_started = time.perf_counter()
        self.seconds_before = 0.0  # spent before this process

    # ------------------------------------------------------------------ open

    def open(self, resume: bool) -> None:
        """The learner, new or as it was saved, and the stream of tasks."""
        c, saved = self.config, self.ranks.from_first(lambda: self._read_saved(resume))
        with self.ranks.one_per_machine_first():  # it downloads and decodes what the others then find
            if saved is None:
                self._create(c.tasks if isinstance(c.tasks, int) else len(c.tasks))
            else:
                self._restore(saved)
            dataset = open_dataset(c.data, c.size, c.seed, self.progress, c.stored, c.kind.name == "domains")
        images = (c.seed, c.validation, c.train_per_class, c.test_per_class, c.train_choice)
        self.stream = Stream(dataset, c.tasks, *images, c.stream, self.learner.method.joint, c.first_tasks)
        planned = self.stream.planned  # some kinds of stream decide on the number of tasks themselves
        if saved is None and c.stream != "disjoint" and planned != self.learner.method.planned_tasks:
            self._create(planned)
        self.learner.shared_queries = self.shared_queries
        self._refuse_other_images()
        self._refuse_ranks_that_cannot_share()
        if self.ranks.first:
            if c.kind.name == "file":
                write_atomically(self.out / TASKS, read_regular(Path(c.kind.file)))
            write_atomically(self.out / "config.json", c.model_dump_json(indent=1))
        self.seconds_before = self.state.seconds or 0.0

    def _create(self, tasks: int) -> None:
        c = self.config
        where = {key: getattr(c, key) for key in RESUMABLE_SETTINGS}
        self.learner = Learner(
            c.backbone, c.method, size=c.size, seed=c.seed, training=c.training, tasks=tasks, **where, **c.options
        )

    def _read_saved(self, resume: bool) -> SavedState | None:
        if not resume or not (self.out / INFO).exists():
            return None
        saved = SavedState.read(self.out)
        tidy(self.out)
        if saved.record.run is None:
            raise CheckpointError(f"{self.out}: a learner was saved over this run's; restore it or give another folder")
        return saved

    def _restore(self, saved: SavedState) -> None:
        runtime = Runtime.pick(**{key: getattr(self.config, key) for key in RESUMABLE_SETTINGS})
        self.learner = Learner.from_state(saved, runtime, self.config.backbone)
        self.state = RunState.parse(saved.record.run, str(self.out / INFO))

    def _refuse_other_images(self) -> None:
        """A resumed run must have the classes and images that it began with."""
        learned = len(self.learner.history)
        tasks, begun = self.stream.tasks[:learned], learned + (self.learner.open_task is not None)
        if self.learner.classes != list(dict.fromkeys(name for task in tasks for name in task.classes)):
            raise UserError(
                f"--resume {self.out}: {self.config.data} has other classes now than when the run began; put them back"
            )
        images = [task.train.digest() + task.test.digest() for task in self.stream.tasks]
        for number, (then, now) in enumerate(zip(self.state.images[:begun], images, strict=False), start=1):
            streamed = then.startswith("files:")
            if streamed != now.startswith("files:"):
                raise UserError(
                    f"--resume {self.out}: images were {'streamed' if streamed else 'decoded all at once'} when it "
                    "began, so they cannot be compared with those of now; set VQPROMPT_CACHE_GB as it was then"
                )
            if then != now:  # an image that was learned from might now be tested with
                raise UserError(
                    f"--resume {self.out}: {self.config.data} has other images for task {number} now than when the run "
                    "began; put them back, or start again in another folder"
                )
        self.state.images = images

    def _refuse_ranks_that_cannot_share(self) -> None:
        """Before any work: more processes than images, or processes that would compute something else."""
        count, smallest = self.ranks.count, min(self.stream.tasks, key=lambda task: len(task.train))
        if count > len(smallest.train):
            raise UserError(
                f"{count} processes cannot share the {len(smallest.train)} training images of task "
                f"{smallest.number + 1}; start at most {len(smallest.train)}"
            )
        if count > self.config.batch_size:
            raise UserError(
                f"{count} processes cannot share batches of {self.config.batch_size} images; start at most "
                f"{self.config.batch_size}, or give a larger --batch-size"
            )
        self.ranks.refuse_differences(
            weights_of_the_backbone=self.learner.built.weights,
            images=hashlib.sha256("".join(self.state.images).encode()).hexdigest()[:16],
            device=self.learner.device.type,
        )

    # ------------------------------------------------------------------ learn

    def learn_all(self) -> RunResult:
        forget_peak(self.learner.device)
        self.run_progress = RunProgress(self.stream, self.learner, self.config.epochs, self.progress)
        self.tracking.begin(self.config.model_dump(mode="json"))
        here = rounding(self.learner.device, self.ranks.count)
        if len(self.learner.history) < len(self.stream) and here not in self.state.rounding:
            self.state.rounding.append(here)
        result = None
        with self.tracking:
            for task in self.stream.start_at(len(self.learner.history)):
                self.learn(task)
                self.test(task)
                self.save_task(task)
                result = self.write_result()
            return result or self.write_result()  # when a finished run is resumed

    def learn(self, task: Task) -> None:
        self.task_started = time.perf_counter() - self.state.seconds_in_task
        self.run_progress.begin(task)
        state = self.state
        for epoch in self.learner.epochs(task, self.run_progress.report):
            means = {name: sum(values) / len(values) for name, values in epoch.losses.items()}
            state.losses.append(EpochLosses(task=task.stage, epoch=epoch.number, losses=means))
            self.tracking.losses(state.steps, epoch.losses)
            state.steps += max(map(len, epoch.losses.values()))
            if task.number < 2 and epoch.number == 0:  # the first task has no teacher, for example; the second has
                state.training_flops = max(state.training_flops, count_flops(self.learner, training=True))
            if self.ranks.first and time.perf_counter() - self.saved >= self.checkpoint_seconds:
                state.seconds_in_task = time.perf_counter() - self.task_started
                self._save()

    def test(self, task: Task) -> None:
        seen = self.stream.seen(task.number)
        predictions = self.learner.test(seen, self.run_progress.report)
        if self.stream.kind.piece:
            shown = sum(len(earlier.train) for earlier in self.stream.tasks[: task.number + 1])
            self.state.curve.append((shown, 100 * int(predictions.right.sum()) / max(len(predictions.right), 1)))
        if not task.ends:
            return
        self.state.accuracy.append(predictions.accuracies())
        self.state.within_task.append(fmean(predictions.accuracies(within=True)))
        self.state.prompt_use.append(self.learner.prompt_use(task.train))
        if task is self.stream.tasks[-1]:  # only then: with many small tasks, it would take longer than learning them
            if self.ranks.first:
                class_results(seen, self.learner.classes, predictions).write(self.out)
            uses = [self.learner.prompt_use(learned.test) or [] for learned in seen]
            chosen = [[{n: count for n, count in enumerate(block) if count} for block in use] for use in uses]
            self.state.test_prompt_use = [chosen]

    def save_task(self, task: Task) -> None:
        state = self.state
        state.seconds_in_task = time.perf_counter() - self.task_started
        state.trainable = max(state.trainable, self.learner.method.parameter_counts()["trainable"])
        state.peak_memory = max(state.peak_memory, memory_used(self.learner.device))
        if task.ends:
            state.task_seconds.append(state.seconds_in_task)
            state.seconds_in_task = 0.0
            self.tracking.accuracies(state.accuracy[-1])  # before the task is saved as done, so a kill here repeats it
        self._save()

    def write_result(self) -> RunResult:
        result = self.result()
        if self.ranks.first:
            result.write(self.out)
        return result

    def _save(self) -> None:
        self.state.seconds = self.seconds_before + time.perf_counter() - self.started
        if self.ranks.first:
            self.learner.save(self.out, run=self.state.model_dump(mode="json"))
        self.saved = time.perf_counter()

    # ------------------------------------------------------------------ result

    def result(self) -> RunResult:
        config, state, method = self.config, self.state, self.learner.method
        stages, learned = self.stream.stages, len(state.accuracy)
        # the state has one list per column (after task j, on tasks 0..j); the matrix has one row per task
        every = range(len(stages))
        accuracy = [[state.accuracy[j][i] if i <= j < learned else None for j in every] for i in every]
        square = [row[:learned] for row in accuracy[:learned]]
        done, averages, counts = learned == len(stages), m.average_accuracies(square), method.parameter_counts()
        counts["trainable"] = max(counts["trainable"], state.trainable)
        speed = self.learner.images_seen / self.learner.seconds_training if self.learner.images_seen else None
        together = f", {self.ranks.count} processes" if self.ranks.count > 1 else ""
        shared = f", {self.at_once} runs at once" if self.at_once > 1 else ""
        return RunResult(
            schema_version=SCHEMA_VERSION,
            **{name: getattr(config, name) for name in ("method", "data", "stream", "backbone", "seed", "validation")},
            **{name: getattr(state, name) for name in Progressed.model_fields},
            title=method.title,
            tasks=[[task.classes[label] for label in task.test.labels.unique()] for task in stages],
            done=done,
            faa=averages[-1] if done else None,
            caa=fmean(averages) if done else None,
            forgetting=m.forgetting(square) if done else None,
            average_accuracy=averages,
            forgetting_per_task=m.forgetting_per_task(square),
            accuracy=accuracy,
            images_per_second=speed,
            parameters=counts,
            exemplars=method.exemplar_count(),
            kept_bytes=method.kept_bytes(),
            test_flops=count_flops(self.learner) if done else None,
            prompt_use=self._prompt_use(),
            notes=self._notes(),
            hardware=hardware(self.learner.device) + together + shared,
            processes=self.ranks.count,
        )

    def _prompt_use(self) -> PromptUse | None:
        uses = [use for use in self.state.prompt_use if use]
        if not uses:
            return None
        blocks = getattr(self.learner.method.options, "blocks", list(range(len(uses[0]))))
        return PromptUse(blocks=blocks, counts=uses, test=self.state.test_prompt_use)

    def _notes(self) -> list[str]:
        dataset, notes = self.stream.dataset, list(self.stream.dataset.notes)
        if unused := {*dataset.classes}.difference(*(task.classes for task in self.stream.tasks)):
            notes.append(f"{len(unused)} of {len(dataset.classes)} classes are in no task")
        notes += self.learner.method.notes()
        if len(self.state.rounding) > 1:
            notes.append(
                "resumed on another processor, number of threads or processes, or version of PyTorch than it began on: "
                "equal to an uninterrupted run up to rounding, not to the bit"
            )
        return notes


class RunProgress:
    """The progress of a run, from that of its stages. It is counted in test images, so that the remaining time can be
    estimated."""

    def __init__(self, stream: Stream, learner: Learner, epochs: int, progress: Report) -> None:
        self.progress, self.stream = progress, stream
        passes = epochs * TRAINING_PASSES
        self.learning = [len(t.train) * passes * learner.method.trains_in(t.number) for t in stream.tasks]
        tests = [sum(len(seen.test) for seen in stream.seen(task.number)) for task in stream.tasks]
        costs = zip(self.learning, stream.tasks, tests, strict=True)
        self.starts = [0.0, *accumulate(learning + len(task.train) + tested for learning, task, tested in costs)]
        self.done, self.task = self.starts[len(learner.history)], stream.tasks[0]

    def begin(self, task: Task) -> None:
        self.task, self.done = task, self.starts[task.number]

    def report(self, event: Progress) -> None:
        """A stage's own progress, as progress of the whole run."""
        number, learning, images = self.task.number, self.learning[self.task.number], len(self.task.train)
        before, cost = {Stage.LEARNING: (0.0, learning), Stage.STATISTICS: (learning, images)}.get(
            event.stage, (learning + images, event.total)
        )
        done = self.starts[number] + before + cost * event.done / max(event.total, 1)
        self.done = min(max(done, self.done), self.starts[number + 1])
        self.progress(Progress(event.stage, self.done, self.starts[-1], number, len(self.stream)))

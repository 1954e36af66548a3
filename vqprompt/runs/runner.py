"""One run: a stream learned task by task, tested after each, in a folder from which it can be resumed and looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from vqprompt import metrics as m
from vqprompt.data.stream import Stream, Task
from vqprompt.datasets import open_dataset, parse_data
from vqprompt.errors import CheckpointError, UserError
from vqprompt.files import held, write_atomically
from vqprompt.learner.checkpoint import INFO, read_checkpoint
from vqprompt.learner.learner import Learner
from vqprompt.progress import Progress, Report, Stage, ignore
from vqprompt.result import SCHEMA_VERSION, ParameterCounts, PromptUse, RunResult
from vqprompt.runs.config import RESUMABLE_SETTINGS, RunConfig, completed, flatten, read_saved_config
from vqprompt.runs.limits import refuse_what_cannot_fit
from vqprompt.runs.tracking import Tracking
from vqprompt.runtime import hardware

CHECKPOINT_SECONDS = float(os.environ.get("VQPROMPT_CHECKPOINT_SECONDS", "60"))  # mid-task, save at most this often
TRAINING_PASSES = 2.0  # what a training image costs, in test images, for the ETA


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

    shared_queries: a folder where runs on the same images keep what they all compute (see `Learner._epoch_queries`).
    track: who else is told how it goes, by their names in `tracking.TRACKERS`. at_once: how many runs share the
    hardware, for whoever reads the speed.
    """
    started = time.perf_counter()
    refuse_what_cannot_fit(config)
    _refuse_conflicts(out, config, resume)
    with held(out):
        tracking, begun = Tracking(track, out), 0  # tasks
        where = {key: getattr(config, key) for key in RESUMABLE_SETTINGS}
        state: dict[str, Any] = {"accuracy": [], "losses": [], "prompt_use": [], "task_seconds": [], "steps": 0,
                                 "seconds": 0.0, "seconds_in_task": 0.0, "trainable": 0, "images": []}  # fmt: skip
        if resume and (out / INFO).exists():
            learner = Learner.load(out, backbone=config.backbone, **where)
            saved = read_checkpoint(out)[1]
            if "run" not in saved:
                raise CheckpointError(f"{out}: a learner was saved over this run's; restore it or give another folder")
            state |= saved["run"]
            begun += len(learner.history) + (saved["unfinished"] is not None)
        else:
            learner = Learner(
                config.backbone, config.method, size=config.size, seed=config.seed, training=config.training,
                tasks=_count(config), **where, **config.options,
            )  # fmt: skip
        learner.shared_queries = shared_queries
        dataset = open_dataset(config.data, config.size, config.seed, progress)
        images = (config.seed, config.validation, config.train_per_class, config.test_per_class)
        stream = Stream(dataset, config.tasks, *images)
        if learner.method.joint:  # the same classes, in one task
            stream = Stream(dataset, [[name for task in stream.tasks for name in task.classes]], *images)
        if learner.classes != [name for task in stream.tasks[: len(learner.history)] for name in task.classes]:
            raise UserError(
                f"--resume {out}: {config.data} has other classes now than when the run began; put them back"
            )
        images_now = [task.train.digest() + task.test.digest() for task in stream.tasks]
        for number, (then, now) in enumerate(zip(state["images"][:begun], images_now, strict=False), start=1):
            if then != now:  # what was learned from might now be tested with
                raise UserError(
                    f"--resume {out}: {config.data} has other images for task {number} now than when the run began; "
                    "put them back, or start anew in another folder"
                )
        state["images"] = images_now
        write_atomically(out / "config.json", config.model_dump_json(indent=1))
        before = state["seconds"]
        work = Work(stream, learner, config, progress)
        saved_at = task_started = time.perf_counter()

        def seconds() -> float:
            return before + time.perf_counter() - started

        def save() -> None:
            nonlocal saved_at
            state["seconds"] = seconds()
            learner.save(out, run=state)
            saved_at = time.perf_counter()

        def checkpoint() -> None:
            if time.perf_counter() - saved_at >= checkpoint_seconds:
                state["seconds_in_task"] = time.perf_counter() - task_started
                save()

        def write_metrics() -> RunResult:
            found = _metrics(config, stream, learner, state, at_once)
            found.write(out)
            return found

        tracking.begin(config.model_dump(mode="json"))
        with tracking:
            for task in stream.start_at(len(learner.history)):
                task_started = time.perf_counter() - state["seconds_in_task"]
                number = task.number
                work.begin(task)

                def on_epoch(epoch: int, losses: dict[str, list[float]], number: int = number) -> None:
                    means = {name: sum(values) / len(values) for name, values in losses.items()}
                    state["losses"].append({"task": number, "epoch": epoch, "losses": means})
                    tracking.losses(state["steps"], losses)
                    state["steps"] += max(map(len, losses.values()))

                learner.learn(task, work.step, on_epoch, checkpoint)
                state["accuracy"].append(learner.accuracies(stream.seen(number), work.step))
                state["prompt_use"].append(learner.prompt_use(task))
                state["task_seconds"].append(time.perf_counter() - task_started)
                state["seconds_in_task"] = 0.0
                state["trainable"] = max(state["trainable"], learner.method.parameter_counts()["trainable"])
                tracking.accuracies(state["accuracy"][-1])  # before the task is saved as done: told again if need be
                save()
                write_metrics()
            found = write_metrics()  # once more: who resumes a finished run wants them too
            if report:
                from vqprompt.report.pages import write_report  # figures are slow to import and needed only here

                write_report(out)
            tracking.finish(found)
        return found


class Work:
    """Adds up what a run has to do, so that the time left can be told."""

    def __init__(self, stream: Stream, learner: Learner, config: RunConfig, report: Report) -> None:
        self.report, self.stream, self.epochs = report, stream, config.epochs
        tested = accumulate(len(task.test) for task in stream.tasks)  # after each task, all tasks so far
        self.per_task = [self._cost(task, images) for task, images in zip(stream.tasks, tested, strict=True)]
        self.total, self.done, self.task = sum(self.per_task), 0.0, 0
        self.expected = sum(self.per_task[: len(learner.history)])

    def _cost(self, task: Task, tested: int) -> float:
        return len(task.train) * (self.epochs * TRAINING_PASSES + 1) + tested

    def begin(self, task: Task) -> None:
        self.task = task.number
        self.done = self.expected
        self.expected += self.per_task[task.number]

    def step(self, count: int, stage: Stage) -> None:
        self.done = min(self.done + count * (TRAINING_PASSES if stage is Stage.LEARNING else 1), self.expected)
        self.report(Progress(stage, self.done, self.total, self.task, len(self.stream)))


def _count(config: RunConfig) -> int:
    return config.tasks if isinstance(config.tasks, int) else len(config.tasks)


def check_out(out: Path) -> None:
    if file := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None):
        raise UserError(f"--out {out}: {file} is a file; give a folder")


def _refuse_conflicts(out: Path, config: RunConfig, resume: bool) -> None:
    """Refuse before any work what could lose something: another run's folder, or resuming with other settings."""
    check_out(out)
    existing = out / "config.json"
    if existing.exists():
        if not resume:
            raise UserError(f"--out {out}: already holds a run; add --resume to go on with it, or give another folder")
        old = completed(read_saved_config(out))
        then, now = flatten(old), flatten(config.model_dump(mode="json"))
        # where things lie is free to change: that they are the same things is checked later
        moved = {"backbone"} if Path(config.backbone).is_file() else set()
        moved |= {"data"} if parse_data(old["data"])[0] == parse_data(config.data)[0] else set()
        free = {*RESUMABLE_SETTINGS, *moved}
        changed = sorted(k for k in now.keys() | then.keys() if k not in free and then.get(k) != now.get(k))
        if changed:
            pairs = ", ".join(
                f"{k.removeprefix('options.')}={then.get(k, 'unknown')} then, {now.get(k, 'unknown')} now"
                for k in changed[:4]
            )
            raise UserError(f"--resume {out}: the run was started with other settings ({pairs}); give the same ones")
    elif (out / INFO).exists():
        raise UserError(f"--out {out}: holds a learner that is not a run's; give another folder")


def _metrics(config: RunConfig, stream: Stream, learner: Learner, state: dict[str, Any], at_once: int) -> RunResult:
    total, learned = len(stream), len(state["accuracy"])
    # state has a list a column (after task j, on tasks 0..j); the matrix has a row a task
    accuracy = [[state["accuracy"][j][i] if i <= j < learned else None for j in range(total)] for i in range(total)]
    square = [row[:learned] for row in accuracy[:learned]]
    uses = [use for use in state["prompt_use"] if use]
    counts = learner.method.parameter_counts()
    there, used = len(stream.dataset.classes), sum(len(task.classes) for task in stream.tasks)
    left_out = [f"{there - used} of {there} classes are in no task"] if used < there else []
    blocks = getattr(learner.method.options, "blocks", list(range(len(uses[0]) if uses else 0)))
    return RunResult(
        schema_version=SCHEMA_VERSION,
        method=config.method,
        title=learner.method.title,
        data=config.data,
        backbone=config.backbone,
        seed=config.seed,
        tasks=[task.classes for task in stream.tasks],
        done=learned == total,
        faa=m.final_average_accuracy(square) if learned == total else None,
        caa=m.cumulative_average_accuracy(square) if learned == total else None,
        forgetting=m.forgetting(square) if learned == total else None,
        average_accuracy=m.average_accuracies(square),
        forgetting_per_task=m.forgetting_per_task(square),
        accuracy=accuracy,
        seconds=state["seconds"],
        task_seconds=state["task_seconds"],
        images_per_second=learner.images_seen / learner.seconds_training if learner.images_seen else None,
        parameters=ParameterCounts(**{**counts, "trainable": max(counts["trainable"], state["trainable"])}),
        bytes_per_class=learner.method.bytes_per_class(),
        exemplars=learner.method.exemplar_count(),
        prompt_use=PromptUse(blocks=blocks, counts=uses) if uses else None,
        losses=state["losses"],
        validation=config.validation,
        notes=[*stream.dataset.notes, *left_out],
        hardware=hardware(learner.device) + (f", {at_once} runs at once" if at_once > 1 else ""),
    )

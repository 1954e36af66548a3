"""Every method there is, on real drawings, by what holds for all of them: nothing here knows which method it is.

A method is covered by being registered in METHODS. What defines each one is tested in test_methods_*.py.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import make_learner, make_vit, same_tensors, tensors_of
from pydantic import BaseModel, ValidationError

from vqprompt import Learner, Stream, open_dataset
from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.backbones.vit import ViTConfig
from vqprompt.core.data.images import Images
from vqprompt.core.errors import PastImagesError
from vqprompt.core.progress import Progress, Stage
from vqprompt.research.learner.checkpoint import read_checkpoint
from vqprompt.research.methods import METHODS
from vqprompt.research.methods.recipes import PAPER_DATA, find_recipe, recipe_settings
from vqprompt.research.migration import upgrade_config
from vqprompt.research.report.pages import write_report
from vqprompt.research.results.config import RunConfig, resolve
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner as runs
from vqprompt.research.training.settings import Training

TASKS = [["cat", "star"], ["pizza", "ladder"], ["fish", "umbrella"]]
CLASSES = [name for task in TASKS for name in task]
TRAIN, TEST, SIZE, EXEMPLARS = 6, 3, 42, 9
SETTINGS = {"tasks": TASKS, "train_per_class": TRAIN, "test_per_class": TEST, "size": SIZE, "epochs": 1,
            "batch_size": 12, "seed": 3, "device": "cpu", "compile": "off"}  # fmt: skip
QUICK_REPLAY = {"epochs": 2, "ratio": 1, "samples": 0}
CHEAP = {"length": 2, "blocks": [2, 3], "exemplars": EXEMPLARS, "projection": 40, "rank": 2, "map_steps": 20,
         "rebalancing": QUICK_REPLAY, "identity_rebalancing": QUICK_REPLAY}  # fmt: skip
REHEARSAL = {"bic"}
REPORTED = {"vq-prompt", "moving-weights", "bic", "joint"}  # with prompts, notes, images, one task; figures take long
TRAINED_TASKS = {"simplecil": 0, "aper": 1, "ranpac": 1, "fecam": 0}  # other methods train in every task


def cheap(name: str) -> dict:
    """Of a method's options those that take long, cut down."""
    return {key: value for key, value in CHEAP.items() if key in METHODS[name].Options.model_fields}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """As wide as ViT-S, so that threads share its work, but not as deep."""
    path = tmp_path_factory.mktemp("weights") / "four-blocks.safetensors"
    save_backbone(make_vit(ViTConfig(width=384, depth=4, heads=6, patch=14, image_size=SIZE)), path)
    return path


@dataclass
class Ran:
    config: RunConfig
    folder: Path  # of a run that was left alone
    result: RunResult
    learner: Learner  # alive, as the run left it
    stream: Stream
    killed: Path  # what was on the disk when the last task had begun
    refused: int  # reads of another task's training images that the stream refused while a task was learned
    work: float  # of the whole run, in test images, as its progress said from beginning to end
    trained: set[int]  # tasks in which something was trained

    @property
    def tasks(self) -> int:
        return len(self.stream)  # one for a method that learns all classes at once


@pytest.fixture(scope="module", params=METHODS)
def ran(request, weights, tmp_path_factory) -> Ran:
    """One run. At each step of the training every task's images are asked for; as the last task begins, the folder is
    copied, which is what a kill would leave there."""
    name, folder = request.param, tmp_path_factory.mktemp("run")
    config = resolve({**SETTINGS, "backbone": str(weights), "method": name, **cheap(name)})
    made: dict = {"refused": 0, "trained": set(), "work": set()}
    killed = folder / "killed"

    def progress(event: Progress) -> None:
        if event.task is not None:
            made["work"].add(event.total)
        if event.stage is not Stage.LEARNING:
            return
        stream = made["stream"]
        made["trained"].add(event.task)
        assert made["learner"].method.training
        for task in stream.tasks:
            if task.number == event.task:
                task.train.read(torch.arange(1), torch.device("cpu"))
                continue
            with pytest.raises(PastImagesError):
                task.train.read(torch.arange(1), torch.device("cpu"))
            made["refused"] += 1
        if event.task == len(stream) - 1 and not killed.exists():
            shutil.copytree(folder / "whole", killed)

    def recorded(name, original):
        def make(*args, **kwargs):
            made[name] = original(*args, **kwargs)
            return made[name]

        return make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "Learner", recorded("learner", Learner))
        patch.setattr(runs, "Stream", recorded("stream", Stream))
        result = runs.run(config, folder / "whole", progress=progress, report=False)
    (work,) = made["work"]
    kept = made["learner"], made["stream"], killed, made["refused"], work, made["trained"]
    yield Ran(config, folder / "whole", result, *kept)
    shutil.rmtree(folder)  # a tuned backbone takes room


def test_metrics(ran):
    n, result = ran.tasks, ran.result
    assert result.done and [name for task in result.tasks for name in task] == CLASSES
    assert all(math.isfinite(getattr(result, key)) for key in ("faa", "caa", "forgetting", "seconds"))
    for i, row in enumerate(result.accuracy):
        assert len(row) == n and row[:i] == [None] * i, "no task is tested before it is learned"
        assert all(0 <= value <= 100 for value in row[i:])
    assert result.faa == pytest.approx(sum(row[-1] for row in result.accuracy) / n)
    assert len(result.average_accuracy) == len(result.task_seconds) == n
    trained = TRAINED_TASKS.get(result.method, n)
    assert len(result.losses) == trained, "one epoch per task"
    assert all(math.isfinite(v) for entry in result.losses for v in entry.losses.values())
    assert (result.parameters.trainable > 0) == bool(trained) and bool(result.images_per_second) == bool(trained)
    if result.method in REPORTED:
        page = write_report(ran.folder).read_text(encoding="utf-8")
        assert ran.learner.method.title in page and all(name in page for name in CLASSES)


def test_the_remaining_time_counts_the_tasks_that_train_and_no_others(ran):
    tasks = ran.stream.tasks
    trained = sum(len(tasks[number].train) * ran.config.epochs for number in ran.trained)
    tested = sum(len(seen.test) for task in tasks for seen in ran.stream.seen(task.number))
    assert ran.work == runs.TRAINING_PASSES * trained + sum(len(task.train) for task in tasks) + tested


def test_prompt_use(ran):
    """Whoever chooses among prompts says which; every training image counts, as often as it chooses."""
    method, use = ran.learner.method, ran.result.prompt_use
    chosen = method.choices(torch.randn(2, method.vit.config.width))
    if chosen is None:
        assert use is None
        return
    assert len(use.blocks) == chosen.shape[1] and len(use.counts) == ran.tasks
    for task, blocks in zip(ran.stream.tasks, use.counts, strict=True):
        assert [len(counts) for counts in blocks] == [method.choosable] * len(use.blocks)
        assert {sum(counts) for counts in blocks} == {len(task.train) * chosen[0, 0].numel()}
    (last,) = use.test  # of the test images of all tasks, after the last one
    assert len(last) == ran.tasks and RunResult.read(ran.folder).prompt_use == use
    for task, blocks in zip(ran.stream.tasks, last, strict=True):
        assert {sum(counts.values()) for counts in blocks} == {len(task.test) * chosen[0, 0].numel()}


@pytest.mark.bits
def test_resumed_it_ends_the_same_to_the_last_bit(ran):
    resumed = runs.run(ran.config, ran.killed, resume=True, report=False)
    for key in ("accuracy", "losses", "prompt_use", "parameters", "kept_bytes", "exemplars"):
        assert getattr(resumed, key) == getattr(ran.result, key), key
    one, other = read_checkpoint(ran.folder), read_checkpoint(ran.killed)
    assert same_tensors(one[0], other[0])
    assert one[1]["classes"] == other[1]["classes"] == CLASSES


@pytest.mark.bits
def test_loaded_it_says_the_same(ran):
    loaded = Learner.load(ran.folder, device="cpu", compile="off")
    tests = Images.concatenate([task.test for task in ran.stream.tasks])
    logits = ran.learner.logits(tests)
    assert logits.shape == (len(tests), len(loaded.classes)) and logits.isfinite().all()
    assert torch.equal(loaded.logits(tests), logits)
    drawings = list(tests.read(torch.arange(4), torch.device("cpu"))[:, 0].numpy())
    assert loaded.predict(drawings) == ran.learner.predict(drawings)


def test_images_are_kept_by_who_says_so_alone(ran):
    kept = ran.result.exemplars
    assert bool(kept) == (ran.result.method in REHEARSAL)
    assert kept <= EXEMPLARS
    pixels = [t for t in read_checkpoint(ran.folder)[0].values() if t.dtype == torch.uint8]
    assert sum(len(t) for t in pixels) == kept, "nothing else in the checkpoint is made of pixels"
    assert ran.result.kept_bytes == sum(t.nbytes for t in read_checkpoint(ran.folder)[0].values()) >= 28 * 28 * kept


def test_other_tasks_images_are_refused_while_one_is_learned(ran):
    batches = math.ceil(len(ran.stream.tasks[0].train) / SETTINGS["batch_size"])
    assert ran.refused >= TRAINED_TASKS.get(ran.result.method, ran.tasks) * batches * (ran.tasks - 1)
    for task in ran.stream.tasks:  # and all of them, once it is over
        with pytest.raises(PastImagesError):
            task.train.check()


@pytest.mark.parametrize("name", METHODS)
def test_options(name):
    options = METHODS[name].Options
    assert len(METHODS[name].summary) <= 65, "`vqprompt methods` has one line of 100 columns for each"
    defaults = resolve({"method": name})
    known = {**defaults.model_dump(), **defaults.options}
    for key, (low, high) in METHODS[name].search_space.items():
        bounds = options.model_fields[key].metadata if key in options.model_fields else ()
        limits = [getattr(bound, end, None) for bound in bounds for end in ("ge", "le")]
        published = {recipe_settings(find_recipe(name, data)).get(key, known[key]) for data in PAPER_DATA}
        assert all(low < value < high or value in limits for value in published | {known[key]}), f"{key}: at an edge"
        assert resolve({"method": name, key: low}) and resolve({"method": name, key: high})
    for key, field in options.model_fields.items():
        if isinstance(field.default, BaseModel):
            group = type(field.default).model_fields
            assert all(member.description for member in group.values()), f"a setting of {key} is shown without a word"
            change = {next(name for name, member in group.items() if member.annotation is float): 0.123}
            given = options(**{key: change})
            assert getattr(given, key) == field.default.model_copy(update=change), "the rest stays as it was"
        else:
            assert field.description, f"{key} is shown to users without a word"


@pytest.mark.bits
@pytest.mark.parametrize("name", METHODS)
def test_killed_between_two_epochs(name, tmp_path):
    """In the middle of each task, one more than were planned, with optimizer, teacher and all; and what it knows then,
    and learns next, is the same too. A tiny ViT, drawings of 28 px."""
    training = Training(**{**METHODS[name].training_defaults, "epochs": 2, "batch_size": 6, "augment": "flip"})
    drawings = open_dataset("quickdraw50", size=28)
    stream = Stream(drawings, [CLASSES] if METHODS[name].joint else TASKS, 3, 0.0, TRAIN, TEST)
    whole, resumed = make_learner(name, training=training, tasks=2, **cheap(name)), None
    for task in stream:
        folder = tmp_path / str(task.number)
        for epoch in whole.epochs(task):
            if epoch.number == 0:
                whole.save(folder)
        if not folder.exists():  # it trains nothing in this task, so there are no epochs
            assert task.number >= TRAINED_TASKS[name]
            continue
        if resumed is not None and task.number == len(TASKS) - 1:
            resumed.learn(task)
            assert same_tensors(tensors_of(whole), tensors_of(resumed)), "resumed in the task before"
        resumed = Learner.load(folder, device="cpu", compile="off", backbone=make_vit())
        resumed.learn(task)
        assert same_tensors(tensors_of(whole), tensors_of(resumed)) and resumed.images_seen == whole.images_seen
        assert whole.accuracies(stream.seen(task.number)) == resumed.accuracies(stream.seen(task.number))


@pytest.mark.parametrize("saved", [{"rebalancing": 3}, {"rebalancing": None}])
def test_damaged_options_of_an_older_run_are_left_for_validation(saved):
    """They are refused there in words; completing them must not fail first."""
    config = resolve({"method": "hide-prompt"}).model_dump(mode="json") | {"options": saved}
    upgraded = upgrade_config(config)
    assert upgraded["options"]["rebalancing"] == saved["rebalancing"]
    with pytest.raises(ValidationError):
        METHODS["hide-prompt"].Options.model_validate(upgraded["options"])

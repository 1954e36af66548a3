"""The one loop: what it shows to a method, at what rate, and that seeds decide everything."""

import itertools
import math
from contextlib import nullcontext
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, make_dataset, make_learner, make_stream, make_vit, same_tensors, tensors_of
from hypothesis import example, given
from hypothesis import strategies as st

from vqprompt.core.data.stream import Stream
from vqprompt.core.errors import CheckpointError, UserError
from vqprompt.core.progress import Stage
from vqprompt.core.runtime.device import derive_seed
from vqprompt.research.learner import queries as queries_module
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training import batches as batches_module
from vqprompt.research.training import cuda_graph
from vqprompt.research.training import loop as training_module
from vqprompt.research.training.batches import TaskBatches, draw, epoch_batches
from vqprompt.research.training.cuda_graph import GraphedStep
from vqprompt.research.training.loop import TrainingLoop
from vqprompt.research.training.optim import cosine_decay
from vqprompt.research.training.settings import Training


class TestBatches:
    @given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 5), st.integers(0, 9))
    @example(33, 32, 1, 0)
    @example(33, 32, 2, 0)
    @example(31, 32, 3, 0)
    @example(68, 15, 4, 0)
    def test_every_image_is_seen_and_batches_are_of_one_size(self, count, size, epochs, seed):
        schedule = list(epoch_batches(count, size, epochs, seed))
        assert len(schedule) == epochs
        shown = torch.bincount(torch.cat([index for batches in schedule for index in batches]), minlength=count)
        assert len(shown) == count and shown.min() >= 1
        assert shown.max() <= epochs and shown.min() >= epochs // 2, "nothing is left out twice running"
        sizes = {len(index) for batches in schedule for index in batches}
        if count < size:
            assert sizes == {count}
        elif epochs > 1:
            assert sizes == {size}
            dropped = [count - sum(map(len, batches)) for batches in schedule]
            if count >= 4 * size:
                assert all(0 <= d < size for d in dropped), "less than a batch is left out of an epoch"
            else:
                assert sum(dropped) < size, "only the very last rest is left out"
        else:
            assert int(shown.sum()) == count

    @pytest.mark.parametrize(("images", "size"), [(6000, 128), (600, 64), (480, 64), (150, 16), (60, 8), (3, 1)])
    def test_batches_follow_the_images_of_a_task_if_wanted(self, images, size):
        assert Training(batches_per_epoch=8).batch_for(images) == size and Training().batch_for(images) == 128
        task, settings = make_stream().tasks[0], QUICK.model_copy(update={"batches_per_epoch": 4})
        batches = TaskBatches(task.train, task.train.labels, settings, 0, torch.device("cpu"))
        assert {size for sizes in batches.sizes for size in sizes} == {settings.batch_for(len(task.train))}

    def test_orders_differ_between_epochs_and_seeds(self):
        a, b, again = (list(epoch_batches(64, 64, 2, seed)) for seed in (1, 2, 1))
        assert not torch.equal(a[0][0], a[1][0]) and not torch.equal(a[0][0], b[0][0])
        assert torch.equal(a[1][0], again[1][0])


class TestRate:
    def test_a_cosine_from_the_peak_to_the_least(self):
        assert cosine_decay(0.1, 0.02, 0, 100) == pytest.approx(0.1)
        assert cosine_decay(0.1, 0.02, 50, 100) == pytest.approx(0.06)
        assert cosine_decay(0.1, 0.02, 100, 100) == pytest.approx(0.02)
        assert cosine_decay(0.1, 0.02, 25, 100) == pytest.approx(0.02 + 0.08 * (1 + math.cos(math.pi / 4)) / 2)
        assert cosine_decay(0.1, 0.0, 0, 1) == 0.1, "a single step"

    def test_the_loop_uses_it_with_each_group_s_scale(self, monkeypatch):
        rates = []
        step = torch.optim.AdamW.step

        def spy(optimizer, *given):
            rates.append([group["lr"] for group in optimizer.param_groups])
            assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
            return step(optimizer, *given)

        monkeypatch.setattr(torch.optim.AdamW, "step", spy)
        learner = make_learner("vq-prompt-s", training=QUICK.model_copy(update={"epochs": 3}))
        learner.learn(next(iter(make_stream())))  # 16 images: 2 batches of 8 per epoch
        expected = [cosine_decay(0.01, 1e-6, step, 5) for step in range(6)]
        assert [head for head, _ in rates] == pytest.approx(expected)
        assert [prompts for _, prompts in rates] == pytest.approx([5 * rate for rate in expected])


def test_derived_seeds_differ_by_purpose():
    seeds = {
        derive_seed(1, "a"),
        derive_seed(1, "b"),
        derive_seed(2, "a"),
        derive_seed("1", "a"),
        derive_seed(1, "a", 0),
    }
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "a") == derive_seed(1, "a")


def learn_all(learner: Learner, seed: int = 1, **stream) -> Learner:
    for task in make_stream(seed=seed, **stream):
        learner.learn(task)
    return learner


@pytest.mark.bits
class TestSeeds:
    @pytest.mark.parametrize("method", ["vq-prompt", "ft"])
    def test_same_seed_same_bits(self, method):
        training = QUICK.model_copy(update={"augment": "crop"})
        found = []
        for noise in (1, 2):
            torch.manual_seed(noise)  # the caller's own randomness must not matter
            found.append(tensors_of(learn_all(make_learner(method, seed=4, training=training))))
        assert same_tensors(*found)

    def test_another_seed_another_result(self):
        a, b = (tensors_of(learn_all(make_learner("vq-prompt", seed=seed))) for seed in (4, 5))
        assert not torch.equal(a["pool.prompts"], b["pool.prompts"])
        assert not torch.equal(a["head.weight"], b["head.weight"])

    def test_learning_leaves_the_caller_s_randomness_alone(self):
        vit = make_vit()
        torch.manual_seed(9)
        expected = torch.rand(3)
        torch.manual_seed(9)
        learn_all(Learner(vit, "vq-prompt", training=QUICK))
        assert torch.equal(torch.rand(3), expected)


class TestLearning:
    def test_a_task_is_learned(self):
        learner = make_learner("vq-prompt", training=QUICK.model_copy(update={"epochs": 15}))
        stream = make_stream(tasks=1)
        losses = []
        for task in stream:
            losses += [mean(epoch.losses["task"]) for epoch in learner.epochs(task)]
        assert losses[-1] < losses[0] / 2
        assert learner.accuracies(stream.tasks)[0] > 80  # chance: 17

    def test_a_frozen_backbone_stays_as_it_was(self):
        learner = learn_all(make_learner("vq-prompt"))
        assert same_tensors(dict(learner.vit.state_dict()), dict(make_vit().state_dict()))

    def test_accuracies_are_those_of_the_logits(self):
        learner, stream = learn_all(make_learner("vq-prompt")), make_stream()
        by_hand = []
        for task in stream.tasks:
            guesses = [learner.classes[i] for i in learner.logits(task.test).argmax(1)]
            truth = [task.classes[i] for i in task.test.labels]
            by_hand.append(100 * sum(a == b for a, b in zip(guesses, truth, strict=True)) / len(truth))
        assert learner.accuracies(stream.tasks) == pytest.approx(by_hand)

    @pytest.mark.parametrize(("augment", "drawn"), [("crop", 0), ("flip", 1)])
    def test_every_epoch_draws_its_own_crops_and_flips(self, monkeypatch, augment, drawn):
        plain, seen = batches_module.draw_augmentation, []
        spy = lambda *given: (seen.append(found := plain(*given)), found)[1]  # noqa: E731
        monkeypatch.setattr(batches_module, "draw_augmentation", spy)
        learner = make_learner("linear", training=Training(epochs=4, batch_size=16, augment=augment))
        learner.learn(next(iter(make_stream())))  # 16 images: one batch per epoch
        assert len(seen) == 4
        assert not any(torch.equal(a[drawn], b[drawn]) for a, b in itertools.combinations(seen, 2))

    def test_progress_and_losses_are_reported(self):
        seen = []
        learner = make_learner("vq-prompt")
        task = next(iter(make_stream()))
        epochs = list(learner.epochs(task, seen.append))
        learning = [event for event in seen if event.stage is Stage.LEARNING]
        assert [event.done for event in learning] == [8, 16, 24, 32], "8 images per step, 2 epochs of 16"
        assert {event.total for event in learning} == {2 * len(task.train)} == {learner.images_seen}
        assert [epoch.number for epoch in epochs] == [0, 1]
        assert all(set(epoch.losses) == {"task", "vq", "commitment"} for epoch in epochs)
        assert [len(values) for epoch in epochs for values in epoch.losses.values()] == [2] * 6, "2 steps per epoch"
        assert len({value for epoch in epochs for value in epoch.losses["task"]}) == 4, "every step has its own"

    def test_losses_are_kept_when_the_next_step_writes_over_them(self, monkeypatch):
        """As a replayed graph does on CUDA: the same tensors are handed out at every step."""

        class Overwriting(GraphedStep):
            def __call__(self, inputs):
                losses = self.step(inputs)
                self.losses = self.losses or {name: value.clone() for name, value in losses.items()}
                return {name: kept.copy_(losses[name]) for name, kept in self.losses.items()}

        found = []
        for recorded in (GraphedStep, Overwriting):
            monkeypatch.setattr(training_module, "GraphedStep", recorded)
            found.append([epoch.losses for epoch in make_learner("vq-prompt").epochs(next(iter(make_stream())))])
        assert found[0] == found[1]

    def test_steps_are_recorded_on_the_gpu_that_computes_them(self, monkeypatch):
        """With several GPUs, that of a run need not be PyTorch's current one. A recording there would be empty."""
        waits = []

        class Stream:
            def __init__(self, device="the current one"):
                self.device = device

            def wait_stream(self, other):
                waits.append((self.device, other.device))

        for name, fake in (("Stream", Stream), ("current_stream", Stream), ("stream", lambda _: nullcontext())):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(cuda_graph, "_streams", {})
        second = torch.device("cuda:1")
        GraphedStep(lambda inputs: {}, second)({})
        assert waits == [(second, second)] * 2

    @pytest.mark.bits
    def test_queries_of_the_next_batch_beside_a_step_change_nothing(self, monkeypatch):
        """As on CUDA, but for the streams: nothing is computed at the same time here."""

        class Recorded(GraphedStep):
            def __init__(self, step, device, enabled=True):
                super().__init__(step, device, enabled)
                self.enabled = enabled

            def __call__(self, inputs):
                return self.step(inputs)

        stream, begin, begun = SimpleNamespace(wait_stream=lambda other: None), training_module.Ahead.begin, []
        for name, fake in (("current_stream", lambda _: stream), ("stream", lambda _: nullcontext())):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(training_module, "side_stream", lambda *_: stream)
        monkeypatch.setattr(training_module, "MANY_STEPS", 6)
        monkeypatch.setattr(training_module.Ahead, "begin", lambda *given: (begun.append(1), begin(*given)))
        training, found = QUICK.model_copy(update={"augment": "crop", "epochs": 3}), []
        for recorded in (GraphedStep, Recorded):
            monkeypatch.setattr(training_module, "GraphedStep", recorded)
            learner = make_learner("vq-prompt", training=training)
            found.append([epoch.losses for epoch in learner.epochs(next(iter(make_stream())))])
        assert found[0] == found[1] and len(begun) == 6, "3 epochs of 2 steps"

    def test_a_class_is_learned_once_by_a_method_that_cannot_learn_it_again(self):
        learner = make_learner("lwf")
        for task in make_stream():
            learner.learn(task)
            with pytest.raises(UserError, match="was learned before"):
                learner.learn(task)
            break


@pytest.mark.bits
class TestKnownQueries:
    """Queries of un-augmented and of mirrored images are computed once; they must be what would be computed anew."""

    @pytest.mark.parametrize("augment", ["none", "flip"])
    @pytest.mark.parametrize("test_crop", [0.0, 0.875])
    def test_same_losses_as_recomputed(self, augment, test_crop):
        training = Training(epochs=2, batch_size=8, lr=1e-3, augment=augment, test_crop=test_crop)
        task = next(iter(make_stream()))
        found = []
        for known in (True, False):
            learner = make_learner("vq-prompt-s", training=training)
            queries = learner.known_queries.for_training(task.train, training, 3)
            assert len(learner.known_queries.kept) == (2 if augment == "flip" else 1), "mirrored ones where needed"
            torch.manual_seed(1)
            learner.method.start_task(TaskInfo(0, 0, len(task.classes)))
            batches = TaskBatches(
                task.train, task.train.labels, training, 3, learner.device, queries if known else None
            )
            method = learner.method
            loop = TrainingLoop(method.losses, method.parameter_groups(), learner.vit, batches, learner.runtime)
            found.append([epoch.losses for epoch in loop])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_mirrored_queries_differ_from_plain_ones(self):
        learner = make_learner("linear")
        task = next(iter(make_stream()))
        assert not torch.allclose(
            learner.queries(task.train), learner.known_queries.of(task.train, mirrored=True), atol=1e-2
        )

    def test_crops_have_no_known_queries(self):
        learner = make_learner("vq-prompt", training=QUICK.model_copy(update={"augment": "crop"}))
        images = next(iter(make_stream())).train
        assert learner.known_queries.for_training(images, learner.settings, 3) is None

    @pytest.mark.parametrize("method", ["vq-prompt", "linear"])
    def test_shared_among_runs_they_change_nothing(self, tmp_path, monkeypatch, method):
        """Alone, first of several, and after others: the same bits; and who comes after computes none of its own."""
        dataset = make_dataset()
        dataset.store.fingerprint = "toy"
        drawn = []
        monkeypatch.setattr(queries_module, "draw", lambda *inputs: drawn.append(1) or draw(*inputs))
        learned = []
        for shared in (None, tmp_path, tmp_path):
            learner = make_learner(method, training=QUICK.model_copy(update={"augment": "crop"}))
            learner.shared_queries = shared
            drawn.clear()
            for task in Stream(dataset, 3, 1):
                learner.learn(task)
            learned.append((tensors_of(learner), len(drawn)))
        (alone, none), (first, own), (after, others) = learned
        assert same_tensors(alone, first) and same_tensors(alone, after)
        assert (none, others) == (0, 0) and own == 3 * 2 * 2, "tasks × epochs × batches"

    def test_queries_are_shared_by_the_same_views_alone(self, tmp_path):
        dataset = make_dataset()
        dataset.store.fingerprint = "toy"
        for seed, changes in ((0, {}), (1, {}), (0, {"batch_size": 4}), (0, {"epochs": 1})):
            learner = make_learner(seed=seed, training=QUICK.model_copy(update={"augment": "crop", **changes}))
            learner.shared_queries = tmp_path
            before = set(tmp_path.iterdir())
            learner.learn(next(iter(Stream(dataset, 3, 1))))
            assert len(set(tmp_path.iterdir()) - before) == changes.get("epochs", 2)

    def test_those_on_disk_are_for_runs_that_round_alike(self, home, monkeypatch):
        """Else a run would end with other bits than the same run on a machine whose cache is empty."""
        dataset = make_dataset()
        dataset.store.fingerprint = "toy"
        images = next(iter(Stream(dataset, 3, 1))).train
        for instructions, files in (("AVX512", 1), ("AVX512", 1), ("AVX2", 2)):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
            make_learner("linear").queries(images)
            assert len(list((home / "queries").iterdir())) == files

    def test_a_backbone_that_learns_has_none(self):
        learner, images = make_learner("ft"), next(iter(make_stream())).train
        assert learner.queries(images).shape == (len(images), 32)
        assert learner.known_queries.kept == {}


@pytest.mark.bits
class TestResume:
    """A learner saved in the middle of a task, loaded and taken on, ends where one never stopped does."""

    def interrupted(self, folder, method, training, stop: tuple[int, int]):
        """Learn until `stop` (task, epochs done), with a checkpoint there; then forget everything but the folder."""
        learner = make_learner(method, training=training)
        for task in make_stream():
            for epoch in learner.epochs(task):
                if (task.number, epoch.number + 1) == stop:
                    learner.save(folder)
        return Learner.load(folder, backbone=make_vit(), compile="off")

    @pytest.mark.parametrize(("method", "stop"), [("vq-prompt", (0, 1)), ("ft", (1, 2))])
    def test_bit_for_bit(self, tmp_path, method, stop):
        training = Training(epochs=3, batch_size=6, lr=0.01, augment="crop")
        whole = learn_all(make_learner(method, training=training))
        learner = self.interrupted(tmp_path, method, training, stop)
        assert len(learner.history) == stop[0]
        stream = make_stream()
        epochs = []
        for task in stream.start_at(len(learner.history)):
            epochs += [epoch.number for epoch in learner.epochs(task)]
        assert epochs[: 3 - stop[1]] == list(range(stop[1], 3)), "epochs done are not done again"
        assert same_tensors(tensors_of(whole), tensors_of(learner))
        assert learner.accuracies(stream.tasks) == whole.accuracies(stream.tasks)
        assert learner.classes == whole.classes
        assert learner.images_seen == whole.images_seen, "images of the epochs before the kill count, too"
        assert learner.seconds_training > 0

    def test_with_other_data_it_is_refused(self, tmp_path):
        learner = self.interrupted(tmp_path, "linear", QUICK, (1, 1))
        with pytest.raises(CheckpointError, match=r"was learning .*; resume with the same data"):
            learner.learn(next(make_stream().start_at(2)))


@pytest.mark.bits
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_what_another_machine_s_optimizer_needs_stays_there(name, tmp_path):
    """A checkpoint in mid-task that a GPU wrote: its optimizer was fused, and capturable if it can be."""
    settings, ends = Training(epochs=3, batch_size=8, lr=1e-3, optimizer=name), []
    for foreign in (False, True):
        learner, task = make_learner(training=settings), next(iter(make_stream()))

        next(learner.epochs(task))
        for group in learner.open_task.loop.optimizer["param_groups"] if foreign else []:
            group.update({key: True for key in ("fused", "capturable") if key in group})
        learner.save(tmp_path / str(foreign))
        loaded = Learner.load(tmp_path / str(foreign), backbone=make_vit(), device="cpu", compile="off")
        loaded.learn(task)
        ends.append(tensors_of(loaded))
    assert same_tensors(*ends)

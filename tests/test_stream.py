"""Tasks with disjoint classes, and what may be read when."""

import random

import numpy as np
import pytest
import torch
from conftest import QUICK, make_dataset, make_learner, make_stream
from hypothesis import given
from hypothesis import strategies as st

from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset, Stream, split_rows
from vqprompt.core.errors import ImageError, PastImagesError, UserError
from vqprompt.research import methods
from vqprompt.research.methods.bic import Exemplars
from vqprompt.research.methods.finetuning import LinearProbe

CPU = torch.device("cpu")


def names(stream: Stream) -> list[list[str]]:
    return [task.classes for task in stream.tasks]


def flat(stream: Stream) -> list[str]:
    return [name for task in stream.tasks for name in task.classes]


def rows(images: Images) -> set[int]:
    return set(images.rows.tolist())


class TestClassOrder:
    def test_seed_0_is_natural(self):
        assert flat(Stream(make_dataset(classes=6), 3, seed=0)) == [f"class {c}" for c in range(6)]

    @pytest.mark.parametrize("seed", [1, 2, 42])
    def test_other_seeds_shuffle_as_the_released_code_does(self, seed):
        random.seed(seed)
        order = list(range(12))
        random.shuffle(order)
        names = flat(Stream(make_dataset(classes=12, train=2, test=1), 3, seed))
        assert names == [f"class {c}" for c in order]

    def test_numbers_known_by_heart(self):
        """Pinned, so that splits line up with other people's for ever."""
        names = flat(Stream(make_dataset(classes=10, train=2, test=1), 5, seed=1))
        assert names == [f"class {c}" for c in [6, 8, 9, 7, 5, 3, 0, 4, 1, 2]]

    def test_making_a_stream_leaves_the_caller_s_randomness_alone(self):
        random.seed(7)
        expected = random.random()
        random.seed(7)
        Stream(make_dataset(), 3, seed=5, validation=0.2)
        assert random.random() == expected


class TestDivision:
    @given(classes=st.integers(1, 12), tasks=st.integers(1, 12), seed=st.integers(0, 50))
    def test_disjoint_complete_and_as_equal_as_can_be(self, classes, tasks, seed):
        dataset = make_dataset(classes=classes, train=1, test=1, side=4)
        if tasks > classes:
            with pytest.raises(UserError, match=f"{tasks} tasks of {classes} classes; ask for 1 to {classes}"):
                Stream(dataset, tasks, seed)
            return
        stream = Stream(dataset, tasks, seed)
        assert sorted(flat(stream)) == sorted(dataset.classes)
        sizes = [len(group) for group in names(stream)]
        assert len(sizes) == tasks and max(sizes) - min(sizes) <= 1

    def test_sizes_by_list(self):
        assert [len(group) for group in names(make_stream([3, 1, 2]))] == [3, 1, 2]

    def test_fewer_classes_than_there_are(self):
        natural = Stream(make_dataset(), [2, 1], seed=0)
        assert names(natural) == [["class 0", "class 1"], ["class 2"]]

    @pytest.mark.parametrize("sizes", [[4, 3], [3, 0, 3], [-1, 3], []])
    def test_impossible_sizes(self, sizes):
        with pytest.raises(UserError, match="do not fit 6 classes"):
            make_stream(sizes)

    def test_classes_by_name_keep_their_order(self):
        groups = [["class 4"], ["class 0", "class 5"]]
        assert names(make_stream(groups, seed=3)) == groups

    def test_a_class_in_two_tasks_is_refused(self):
        with pytest.raises(UserError, match="'class 2' is in task 1 and in task 3; tasks must be disjoint"):
            make_stream([["class 2"], ["class 1"], ["class 3", "class 2"]])

    def test_a_class_twice_in_one_task_is_refused(self):
        with pytest.raises(UserError, match="'class 2' is in task 1 and in task 1"):
            make_stream([["class 2", "class 2"]])

    def test_an_unknown_class_is_refused(self):
        with pytest.raises(UserError, match="task 2 wants the class 'lion', which toy does not have"):
            make_stream([["class 2"], ["lion"]])

    def test_a_task_without_classes_is_refused(self):
        with pytest.raises(UserError, match="task 2 has no classes"):
            make_stream([["class 2"], []])

    @pytest.mark.parametrize("tasks", [0, -1])
    def test_no_tasks(self, tasks):
        with pytest.raises(UserError, match="ask for 1 to 6"):
            make_stream(tasks)

    def test_images_are_labelled_by_position_in_the_task(self):
        dataset = make_dataset()
        for task in Stream(dataset, 3, seed=1).tasks:
            for images, count, held_out in [(task.train, 8, False), (task.test, 4, True)]:
                assert torch.bincount(images.labels).tolist() == [count, count]
                for row, label in zip(images.rows, images.labels.tolist(), strict=True):
                    assert dataset.classes[dataset.labels[row]] == task.classes[label]
                    assert dataset.is_test[row] == held_out


class TestRows:
    def test_train_and_test_per_class(self):
        stream = make_stream(train_per_class=3, test_per_class=1)
        plain = make_stream()
        for few, all_ in zip(stream.tasks, plain.tasks, strict=True):
            assert torch.bincount(few.train.labels).tolist() == [3, 3]
            assert torch.bincount(few.test.labels).tolist() == [1, 1]
            assert rows(few.train) < rows(all_.train) and rows(few.test) < rows(all_.test)

    def test_training_images_can_be_drawn_by_seed(self):
        dataset = make_dataset(train=10)
        plain = Stream(dataset, 3, seed=1)
        drawn, again, other = (Stream(dataset, 3, s, train_per_class=4, train_choice="seed") for s in (1, 1, 2))
        first = Stream(dataset, 3, seed=1, train_per_class=4)
        for task, same, whole in zip(drawn.tasks, again.tasks, plain.tasks, strict=True):
            assert torch.bincount(task.train.labels).tolist() == [4, 4]
            assert task.train.rows.tolist() == same.train.rows.tolist() and rows(task.train) < rows(whole.train)
        taken = [{row for task in stream.tasks for row in rows(task.train)} for stream in (drawn, other, first)]
        assert taken[0] != taken[1] and taken[0] != taken[2]
        assert [rows(task.test) for task in drawn.tasks] == [rows(task.test) for task in plain.tasks]

    def test_validation_holds_out_a_fifth_and_never_touches_test_rows(self):
        dataset = make_dataset(train=10)
        tuning, real = Stream(dataset, 3, seed=1, validation=0.2), Stream(dataset, 3, seed=1)
        for a, b in zip(tuning.tasks, real.tasks, strict=True):
            assert torch.bincount(a.train.labels).tolist() == [8, 8]
            assert torch.bincount(a.test.labels).tolist() == [2, 2]
            assert not rows(a.train) & rows(a.test)
            assert rows(a.train) | rows(a.test) == rows(b.train)
            assert not (rows(a.train) | rows(a.test)) & rows(b.test)

    def test_validation_is_seeded(self):
        dataset = make_dataset(train=20)
        first, again, other = (rows(Stream(dataset, 1, seed, validation=0.2).tasks[0].test) for seed in (1, 1, 2))
        assert first == again != other

    def test_validation_of_a_single_image_is_refused(self):
        with pytest.raises(ImageError, match="'class 0' has 1 training image"):
            Stream(make_dataset(train=1), 2, validation=0.2)

    @pytest.mark.parametrize("fraction", [-0.1, 1.0, 2])
    def test_impossible_fraction(self, fraction):
        with pytest.raises(UserError, match=f"validation={fraction}"):
            make_stream(validation=fraction)

    @given(count=st.integers(0, 60), fraction=st.floats(0.01, 0.99), seed=st.text(max_size=5))
    def test_split_rows(self, count, fraction, seed):
        given_rows = np.arange(count) * 3
        kept, held = split_rows(given_rows, fraction, seed)
        assert sorted([*kept, *held]) == given_rows.tolist()
        assert list(kept) == sorted(kept) and list(held) == sorted(held)
        if count > 1:
            assert len(kept) and len(held) and abs(len(held) - count * fraction) <= 1
        else:
            assert len(held) == 0
        again = split_rows(given_rows, fraction, seed)
        assert np.array_equal(again[1], held)


@pytest.mark.parametrize(("split", "flag"), [("training", True), ("test", False)])
def test_a_class_without_images_is_refused(split, flag):
    dataset = make_dataset()
    is_test = np.where(dataset.labels == 2, flag, dataset.is_test)
    with pytest.raises(ImageError, match=f"no {split} images for the class 'class 2'"):
        Dataset("toy", dataset.classes, dataset.store, dataset.labels, is_test)


class TestWhatMayBeRead:
    """Only the task being learned, however one holds on to the others."""

    def read(self, images: Images) -> torch.Tensor:
        return images.read(torch.arange(2), CPU)

    def test_nothing_before_the_stream_starts(self):
        with pytest.raises(PastImagesError, match=r"task 1 .*while no task is being learned"):
            self.read(make_stream().tasks[0].train)

    def test_only_the_open_task(self):
        stream = make_stream()
        for task in stream:
            for other in stream.tasks:
                if other is task:
                    assert self.read(other.train).shape == (2, 3, 32, 32)
                else:
                    with pytest.raises(
                        PastImagesError, match=f"task {other.number + 1} .*while task {task.number + 1} is"
                    ):
                        self.read(other.train)

    def test_nothing_after_the_stream_ends(self):
        tasks = list(make_stream())
        for task in tasks:
            with pytest.raises(PastImagesError, match="while no task is being learned"):
                self.read(task.train)

    def test_kept_images_close_too(self):
        """The very object that could be read, a selection of it, a joined set, and an iterator begun before."""
        stream = iter(make_stream())
        first = next(stream)
        kept = first.train
        batches = iter(kept.batches(torch.arange(6).split(2), CPU))
        part, joined = kept.take(torch.arange(4)), Images.concatenate([kept, first.test])
        apart = Images.concatenate([kept, make_dataset_images()])
        for images in (kept, part, joined, apart):
            assert len(self.read(images)) == 2
        next(batches)
        next(stream)
        for images in (kept, part, joined, apart):
            with pytest.raises(PastImagesError):
                self.read(images)
        with pytest.raises(PastImagesError):
            next(batches)

    def test_test_images_stay_readable(self):
        stream = make_stream()
        for task in stream:
            for seen in stream.seen(task.number):
                assert len(self.read(seen.test)) == 2
        assert len(self.read(stream.tasks[0].test)) == 2

    def test_seen(self):
        stream = make_stream()
        assert [t.number for t in stream.seen(1)] == [0, 1]

    def test_a_stream_can_start_in_the_middle(self):
        stream = make_stream()
        (last,) = stream.start_at(2)
        assert last is stream.tasks[2]
        opened = stream.start_at(1)
        assert self.read(next(opened).train) is not None
        with pytest.raises(PastImagesError):
            self.read(stream.tasks[0].train)

    def test_features_kept_by_the_learner_do_not_open_a_closed_task(self):
        learner, stream = make_learner("linear"), iter(make_stream())
        first = next(stream)
        learner.learn(first)
        assert len(learner.queries(first.train)) == 16
        next(stream)
        with pytest.raises(PastImagesError):
            learner.queries(first.train)

    def test_a_learner_cannot_learn_a_task_that_is_not_open(self):
        stream = make_stream()
        with pytest.raises(PastImagesError):
            make_learner("linear").learn(stream.tasks[0])

    def test_a_method_that_keeps_old_images_fails(self, monkeypatch):
        class Hoarder(LinearProbe):
            """Means to replay what it saw."""

            def training_images(self, data):
                self.hoard = [*getattr(self, "hoard", []), (data.images, data.labels)]
                kept, positions = zip(*self.hoard, strict=True)
                return Images.concatenate(kept), torch.cat(positions)

        monkeypatch.setitem(methods.METHODS, "hoarder", Hoarder)
        learner, stream = make_learner("hoarder"), iter(make_stream())
        learner.learn(next(stream))
        second = next(stream)
        with pytest.raises(PastImagesError, match="training images of task 1"):
            learner.learn(second)
        assert len(learner.classes) == 2


class Rehearser(LinearProbe):
    """Keeps two images per class, and looks at queries: of images in two stores at once."""

    masks_old_logits = False

    def __init__(self, *given):
        super().__init__(*given)
        self.memory = Exemplars()

    def training_images(self, data):
        if not len(self.memory):
            return data.images, data.labels
        images = Images.concatenate([self.memory.images(), data.images])
        return images, torch.cat([self.memory.labels, data.labels])

    def finish_task(self, data):
        kept = torch.cat([torch.nonzero(data.labels == label)[:2, 0] for label in data.labels.unique()])
        pixels = data.images.read(kept, torch.device("cpu"))
        self.memory.update(2, pixels, data.images.aspect[kept], data.labels[kept])
        joined, labels = self.training_images(data)
        assert data.logits(joined).shape == (len(labels), data.task.all_classes)


@pytest.mark.parametrize("augment", ["none", "flip", "crop"])
def test_a_method_can_rehearse_images_of_its_own_and_use_queries(monkeypatch, tmp_path, augment):
    monkeypatch.setitem(methods.METHODS, "rehearser", Rehearser)
    learner = make_learner("rehearser", training=QUICK.model_copy(update={"augment": augment}))
    learner.shared_queries = tmp_path
    kept = []
    for task in make_stream():
        memory = learner.method.memory
        if len(memory):
            joined = Images.concatenate([memory.images(), task.train])
            apart = torch.cat([learner.queries(memory.images()), learner.queries(task.train)])
            torch.testing.assert_close(learner.queries(joined), apart, rtol=1e-4, atol=1e-5)
        learner.learn(task)
        kept.append(len(memory))
    assert kept == [4, 8, 12] and learner.images_seen > 2 * 48, "the task's images and those of the memory"


def make_dataset_images() -> Images:
    """Unguarded images of another store, such as a method's own memory."""
    store = Store(np.zeros((3, 3, 32, 32), np.uint8), np.ones(3), "")
    return Images(store, np.arange(3), np.zeros(3))

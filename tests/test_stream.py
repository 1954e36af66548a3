"""Which images are in which task, for every kind of stream, and what may be read when."""

import json
import random
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import QUICK, make_dataset, make_learner, make_stream, make_vit, same_tensors
from hypothesis import given
from hypothesis import strategies as st

from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset, Stream, split_rows
from vqprompt.core.errors import ImageError, PastImagesError, UserError
from vqprompt.core.statistics.gaussians import SharedGaussians
from vqprompt.research import methods
from vqprompt.research.learner.learner import Learner
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

    def test_fewer_classes_than_there_are(self):
        natural = Stream(make_dataset(), [2, 1], seed=0)
        assert names(natural) == [["class 0", "class 1"], ["class 2"]]

    @pytest.mark.parametrize("kind", ["disjoint", "blurry:50,20", "few-shot:2,1,2", "disjoint+online:3"])
    def test_the_first_tasks_are_those_of_the_whole_stream(self, kind):
        whole, part = (Stream(make_dataset(), 4, seed=3, kind=kind, first_tasks=n) for n in (None, 2))
        assert part.stages and len(part.stages) == 2 and part.planned == len(whole)
        for one, other in zip(whole.tasks, part.tasks, strict=False):
            assert (one.classes, one.train.digest(), one.test.digest()) == (
                other.classes, other.train.digest(), other.test.digest()
            )  # fmt: skip
        (joint,) = Stream(make_dataset(), 4, seed=3, kind=kind, first_tasks=2, joint=True).tasks
        assert rows(joint.train) == {row for task in part.tasks for row in rows(task.train)}
        assert rows(joint.test) == {row for task in part.stages for row in rows(task.test)}
        for nonsense in (0, 9):
            with pytest.raises(UserError, match=f"first_tasks={nonsense}: the stream has [45] tasks"):
                Stream(make_dataset(), 4, seed=3, kind=kind, first_tasks=nonsense)

    def test_classes_by_name_keep_their_order(self):
        groups = [["class 4"], ["class 0", "class 5"]]
        assert names(make_stream(groups, seed=3)) == groups

    @pytest.mark.parametrize(
        ("tasks", "words"),
        [
            *((sizes, "do not fit 6 classes") for sizes in ([4, 3], [3, 0, 3], [-1, 3], [])),
            *((count, "ask for 1 to 6") for count in (0, -1)),
            ([["class 2"], ["class 1"], ["class 3", "class 2"]], "'class 2' is in task 1 and in task 3; tasks must be"),
            ([["class 2", "class 2"]], "'class 2' is in task 1 and in task 1"),
            ([["class 2"], ["lion"]], "task 2 wants the class 'lion', which toy does not have"),
            ([["class 2"], []], "task 2 has no classes"),
        ],
    )
    def test_impossible_tasks_are_refused(self, tasks, words):
        with pytest.raises(UserError, match=words):
            make_stream(tasks)

    def test_images_are_labelled_by_position_in_the_task(self):
        dataset = make_dataset()
        for task in Stream(dataset, 3, seed=1).tasks:
            for images, count, held_out in [(task.train, 8, False), (task.test, 4, True)]:
                assert torch.bincount(images.labels).tolist() == [count, count]
                for row, label in zip(images.rows, images.labels.tolist(), strict=True):
                    assert dataset.classes[dataset.labels[row]] == task.classes[label]
                    assert dataset.is_test[row] == held_out


def with_domains(classes: int = 4, train: int = 6, test: int = 2) -> Dataset:
    """Each class in two domains; the last one only in the first."""
    dataset = make_dataset(classes=classes, train=train, test=test)
    half = np.where(np.arange(len(dataset.labels)) % 2, "paint", "photo")
    return replace(dataset, domains=np.where(dataset.labels == classes - 1, "photo", half))


class TestKinds:
    """Streams in which classes come back. Every image is learned once and tested once."""

    @pytest.mark.parametrize(
        "text", ["blurry", "blurry:50", "blurry:50,101", "blurry:5 0,10", "few-shot:30,5", "few-shot:30,0,5", "online",
                 "disjoint:1", "repeated:30+", "repeated:30+online:0", "sometimes", "", "domains,online:5"],
    )  # fmt: skip
    def test_what_is_no_kind_is_refused_with_all_that_are(self, text):
        with pytest.raises(UserError, match=r"no such kind; there are disjoint, domains, blurry:50,10 .*online:100"):
            make_stream(kind=text)

    @pytest.mark.parametrize("kind", ["blurry:50,30", "repeated:30", "online:5", "domains", "domains+online:4"])
    @pytest.mark.parametrize("validation", [0.0, 0.25])
    def test_every_image_is_in_one_task_whatever_the_kind(self, kind, validation):
        dataset = with_domains()
        stream, again, other = (Stream(dataset, 2, seed, validation, kind=kind) for seed in (1, 1, 2))
        learned = [row for task in stream.tasks for row in task.train.rows.tolist()]
        tested = [row for task in stream.stages for row in task.test.rows.tolist()]
        everything = np.flatnonzero(~dataset.is_test) if validation else np.arange(len(dataset.labels))
        assert sorted([*learned, *tested]) == everything.tolist()
        for task in stream.tasks:
            for images in (task.train, task.test):
                names = [dataset.classes[c] for c in dataset.labels[images.rows]]
                assert names == [task.classes[label] for label in images.labels.tolist()]
        by_task = [[task.train.rows.tolist() for task in s.tasks] for s in (stream, again, other)]
        assert by_task[0] == by_task[1] != by_task[2]
        (whole,) = Stream(dataset, 2, 1, validation, kind=kind, joint=True).tasks
        assert sorted(whole.train.rows) == sorted(learned) and sorted(whole.test.rows) == sorted(tested)

    def test_blurry_classes_visit_other_tasks_and_disjoint_ones_do_not(self):
        stream = Stream(make_dataset(classes=8, train=20, test=2), 4, seed=3, kind="blurry:25,10")
        tasks_of = {name: {t.number for t in stream.tasks if name in t.classes} for name in stream.dataset.classes}
        assert sorted(len(tasks) > 1 for tasks in tasks_of.values()) == [False] * 2 + [True] * 6
        home = {name: t for t in stream.tasks for name in {t.classes[label] for label in t.test.labels.tolist()}}
        for name, task in home.items():
            stayed = int((task.train.labels == task.classes.index(name)).sum())
            assert stayed == (18 if len(tasks_of[name]) > 1 else 20)

    def test_repeated_classes_come_only_later(self):
        stream = Stream(make_dataset(classes=6, train=20, test=2), 3, seed=3, kind="repeated:30")
        first = {name: task.number for task in reversed(stream.tasks) for name in task.classes}
        disjoint = {name: t.number for t in Stream(stream.dataset, 3, seed=3).tasks for name in t.classes}
        assert first == disjoint and len(stream.tasks[0].train) == 28

    def test_few_shots_follow_a_base_task(self):
        stream = Stream(make_dataset(classes=7, train=9, test=2), seed=1, kind="few-shot:3,2,4")
        assert [(len(t.classes), len(t.train), len(t.test)) for t in stream.tasks] == [(3, 27, 6), (2, 8, 4), (2, 8, 4)]
        with pytest.raises(UserError, match="do not fit 7 classes"):
            Stream(stream.dataset, kind="few-shot:6,2,4")

    def test_an_online_stream_tests_after_every_piece_on_classes_seen_so_far(self):
        stream = Stream(make_dataset(classes=6, train=8, test=4), 3, seed=1, kind="online:5")
        assert [len(t.train) for t in stream.tasks] == [6, 5, 5] * 3 and [t.ends for t in stream.tasks[:3]] == [0, 0, 1]
        known = set()
        for task in stream:
            known |= {task.classes[label] for label in task.train.labels.tolist()}
            seen = stream.seen(task.number)
            assert {t.classes[label] for t in seen for label in t.test.labels.tolist()} == known
            assert [t.stage for t in seen] == list(range(task.stage + 1))

    def test_a_task_is_a_domain(self):
        stream = Stream(with_domains(), seed=0, kind="domains", train_per_class=2)
        assert [(len(t.classes), len(t.train)) for t in stream.tasks] == [(4, 8), (3, 6)], "of 2 per class and domain"
        with pytest.raises(UserError, match="toy has none; give a folder of DOMAIN/CLASS/…"):
            make_stream(kind="domains")

    def test_a_file_lists_the_images_of_each_task(self, tmp_path):
        dataset = replace(make_dataset(classes=3, train=4, test=2), where=lambda row: f"{row}.png")
        images = [[f"{row}.png" for row in np.flatnonzero(dataset.labels == c)] for c in range(3)]
        train = [[i for i in part if not dataset.is_test[int(i[:-4])]] for part in images]
        file = tmp_path / "tasks.json"

        def made(tasks) -> Stream:
            file.write_text(json.dumps(tasks))
            return Stream(dataset, kind=str(file))

        stream = made([train[0] + train[1][:2], train[1][2:] + train[2]])
        assert names(stream) == [["class 0", "class 1"], ["class 1", "class 2"]]
        assert [len(t.test) for t in stream.tasks] == [4, 2], "class 1 is tested with its first task"
        whole = made([images[0], images[2]])
        assert [(len(t.train), len(t.test)) for t in whole.tasks] == [(4, 2), (4, 2)]
        for tasks, wrong in [
            ([["lion.png"]], "task 1: 'lion.png' is not in toy, as '0.png' is"), ([train[0], train[0]], "listed twice"),
            ([[*train[0], images[1][-1]], train[1]], "task 1: no test images; list some that can be used"),
            ([train[0], [7]], "task 2: 7 is not in toy"), ({}, "expected a list"), ([train[0], []], "task 2: no"),
            ([train[0][:2], train[0][2:]], "task 2: no test images; list some"),
        ]:  # fmt: skip
            with pytest.raises(UserError, match=wrong):
                made(tasks)


ABLE = [n for n, m in methods.METHODS.items() if "classes_return" in vars(m) or m.joint]


@pytest.mark.parametrize("name", [*ABLE, "moving-prompts"])
def test_methods_that_say_so_learn_classes_that_come_back(name, tmp_path):
    """The head and prompts grow for new classes only; a task without one teaches, and a saved learner goes on alike."""
    kind, joint = "domains+online:20", methods.METHODS[name].joint
    stream = Stream(with_domains(train=16, test=4), seed=1, kind=kind, joint=joint)
    options, sizes = {"projection": 50} if name == "ranpac" else {}, dict[int, int]()
    learner = make_learner(name, tasks=1, training=QUICK.model_copy(update={"epochs": 6, "lr": 0.03}), **options)
    for task in stream:  # more tasks than are planned
        before = learner.logits(task.test) if learner.history else None
        learner.learn(task)
        assert learner.method.head.out_features == len(learner.classes)
        counts = learner.method.parameter_counts()
        assert sizes.setdefault(len(learner.classes), counts["prompting"]) == counts["prompting"]
        assert before is None or not torch.equal(before, learner.logits(task.test)[:, : before.shape[1]])
        learner.save(tmp_path)
        learner = Learner.load(tmp_path, backbone=make_vit(), device="cpu")
    assert sorted(learner.classes) == sorted(stream.dataset.classes)
    assert np.mean(learner.accuracies(stream.stages)) > 40, "of 4 classes"


def test_statistics_of_a_class_that_comes_back_are_those_of_all_its_images():
    dataset, kept = with_domains(), []
    for options in ({"kind": "domains"}, {"kind": "domains", "joint": True}):
        learners = make_learner("linear", statistics=True), make_learner("simplecil")
        for learner in learners:
            for task in Stream(dataset, seed=1, **options):
                learner.learn(task)
        order = np.argsort(learners[0].classes)
        statistics = learners[0].method.statistics
        kept.append([t[order] for t in (statistics.means, statistics.spread, learners[1].method.prototypes)])
    for apart, at_once in zip(*kept, strict=True):
        torch.testing.assert_close(apart, at_once, rtol=1e-4, atol=1e-5)


def test_a_memory_that_moves_takes_in_classes_that_come_back_after_it_moved(tmp_path, monkeypatch):
    learner, moved, move = make_learner("moving-weights", most_doubt=0), [], SharedGaussians.move
    monkeypatch.setattr(SharedGaussians, "move", lambda kept, drift: (move(kept, drift), moved.append(deepcopy(kept))))
    stream = iter(Stream(with_domains(), seed=0, kind="domains"))
    learner.learn(next(stream))
    counts, again = learner.method.statistics.seen + 1, next(stream)
    for epoch in learner.epochs(again):
        assert learner.method.task_head.out_features == len(again.classes) == 3 and len(learner.classes) == 4
        if epoch.number == 0:
            learner.save(tmp_path)
            new = torch.bincount(again.train.labels, minlength=4)  # natural order: positions in the head are the same
            scales = [group["scale"] for group in learner.method.parameter_groups()]
            assert scales[1] == pytest.approx(0.006 * float((new / (new + counts)).sum()) / 4)
    statistics, (before,) = learner.method.statistics, moved
    sums = torch.zeros(4, statistics.width).index_add(0, again.train.labels, learner.features(again.train))
    expected = (before.class_means() * counts[:, None] + sums) / (counts + new)[:, None]
    torch.testing.assert_close(statistics.class_means(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics.doubt, before.doubt * (counts / (counts + new)).square().mean())
    assert before.doubt.any() and (statistics.seen == counts + new - 1).all()
    resumed = Learner.load(tmp_path, backbone=make_vit(), device="cpu")
    resumed.learn(again)
    assert same_tensors(resumed.method.state_dict(), learner.method.state_dict())


@pytest.mark.parametrize(("name", "options"), [("ease", {}), ("vq-prompt", {"rebalancing": {"centroids": 2}})])
def test_a_method_that_cannot_learn_a_class_again_says_so_before_it_trains(name, options):
    learner, stream = make_learner(name, **options), iter(Stream(with_domains(), kind="domains"))
    learner.learn(next(stream))
    before = learner.images_seen
    with pytest.raises(UserError, match=f"'class 0' was learned before; {name} cannot learn it again"):
        learner.learn(next(stream))
    assert learner.images_seen == before


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
        first, again, other = (rows(Stream(dataset, 1, seed, validation=0.2).tasks[0].test) for seed in (1, 1, 2))
        assert first == again != other, "by the seed"

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

    def test_only_the_open_task_and_nothing_before_or_after(self):
        stream = make_stream()
        with pytest.raises(PastImagesError, match=r"task 1 .*while no task is being learned"):
            self.read(stream.tasks[0].train)
        for task in stream:
            assert self.read(task.train).shape == (2, 3, 32, 32)
            for other in (other for other in stream.tasks if other is not task):
                with pytest.raises(PastImagesError, match=f"task {other.number + 1} .*while task {task.number + 1} is"):
                    self.read(other.train)
        for task in stream.tasks:
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

"""What is held in memory does not grow with the number of images, and what is not held changes no result."""

import gc

import numpy as np
import pytest
import torch
from conftest import QUICK, make_dataset, make_learner, make_vit, same_tensors, tensors_of
from torch import Tensor

from vqprompt.core.backbones.vit import ViTConfig
from vqprompt.core.data.stream import Stream
from vqprompt.core.progress import Stage
from vqprompt.core.runtime.distributed import Ranks, ShardedRows
from vqprompt.core.statistics.gaussians import KINDS
from vqprompt.core.statistics.sums import ClassSums
from vqprompt.research.learner import queries as queries_module
from vqprompt.research.learner.learner import Learner
from vqprompt.research.learner.rows import JoinedRows, RowsInFile, open_rows, save_rows
from vqprompt.research.methods import task as task_module
from vqprompt.research.training.settings import Training

WIDE = ViTConfig(width=256, depth=1, heads=2, patch=14, image_size=28)  # a kilobyte of features per image
FEATURES = 4 * WIDE.width
CLOSED_FORM = {"statistics": True, "rebalancing": {"how": "closed-form", "covariance": "shared"}}
PROMPTS = {"length": 2, "blocks": [0], "rebalancing": {"epochs": 1, "ratio": 1}}
TASKS = [["class 0", "class 1"], ["class 2", "class 3"]]


@pytest.fixture
def nothing_held(monkeypatch):
    monkeypatch.setattr(task_module, "MOST_IN_MEMORY", 0)
    monkeypatch.setattr(queries_module, "IN_MEMORY_OTHERWISE", 0)


def stream(each: int) -> Stream:
    """Two tasks of two classes with `each` training and `each` test images."""
    return Stream(make_dataset(classes=4, train=each, test=each, side=16), TASKS)


def learn_and_test(learner: Learner, stream: Stream, progress=lambda event: None):
    for task in stream:
        learner.learn(task, progress)
        answers = learner.test(stream.seen(task.number), progress)
        use = [learner.prompt_use(images) for images in (task.train, task.test)]
    return answers, use


class Tensors:
    """The most bytes of new tensors that were alive at any progress event of statistics and tests."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what is alive now, all imported modules among it, is not looked at again: that would take long
        self.most = 0

    def __call__(self, event) -> None:
        if event.stage is not Stage.LEARNING:
            self.most = max(self.most, self.alive())

    @staticmethod
    def alive() -> int:
        tensors = [found for found in gc.get_objects() if type(found) is Tensor]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def growth(method: str, augment: str, options: dict) -> float:
    """Bytes of tensors per additional image of a task."""
    most, few, many = [], 64, 192
    for each in (few, many):
        training = Training(epochs=1, batch_size=32, augment=augment, test_crop=0.0)
        learner = Learner(make_vit(WIDE), method, tasks=2, training=training, device="cpu", compile="off", **options)
        tensors = Tensors()
        learn_and_test(learner, stream(each), tensors)
        most.append(tensors.most)
    return (most[1] - most[0]) / (2 * (many - few))


@pytest.mark.parametrize(
    ("method", "augment", "options"),
    [("linear", "crop", CLOSED_FORM), ("simplecil", "crop", {}), ("vq-prompt", "crop", PROMPTS),
     ("hide-prompt", "crop", PROMPTS), ("coda-p", "flip", {"length": 2, "blocks": [0]})],
)  # fmt: skip
def test_memory_does_not_grow_with_images(method, augment, options, nothing_held):
    if method == "hide-prompt":  # k-means would need all features of a class
        one = {"centroids": 1, "epochs": 1, "ratio": 1}
        options = {**options, "rebalancing": one, "identity_rebalancing": one}
    assert growth(method, augment, options) < FEATURES / 4, "labels, indices and answers; no features"


def test_features_that_are_held_would_be_noticed():
    assert growth("linear", "crop", CLOSED_FORM) > FEATURES


@pytest.mark.parametrize(("method", "augment"), [("vq-prompt-s", "crop"), ("coda-p", "flip"), ("linear", "flip")])
def test_where_queries_lie_changes_nothing(method, augment, monkeypatch, home):
    """In memory, in a file without a name, in a named one that is made or found, or nowhere: the same bits."""
    training = Training(epochs=2, batch_size=8, augment=augment, test_crop=0.0)
    whole = learn_and_test(first := make_learner(method, training=training), stream(20))
    for how in ("file", "named file", "the same again", "no room"):
        with monkeypatch.context() as patch:
            patch.setattr(queries_module, "IN_MEMORY_OTHERWISE", 0)
            if how == "no room":
                patch.setenv("VQPROMPT_CACHE_GB", "1e-9")
            tasks, learner = stream(20), make_learner(method, training=training)
            tasks.dataset.store.fingerprint = "toy" if "file" not in how[:4] and how != "no room" else ""
            answers, use = learn_and_test(learner, tasks)
        exact = augment == "crop" or how != "no room"  # else they are computed in the batches of training
        assert use == whole[1] and torch.equal(answers.guesses, whole[0].guesses)
        if exact:
            assert same_tensors(tensors_of(learner), tensors_of(first)), how
            assert torch.equal(answers.probability, whole[0].probability)
        kinds = {type(rows) for rows in learner.known_queries.kept.values()}
        assert kinds == (set() if how == "no room" else {RowsInFile}), how
    assert len(list((home / "queries").iterdir())) > 0, "named files stay, for the next run"


def test_files_of_a_task_are_closed_after_it(nothing_held):
    learner, kept = (
        make_learner("coda-p", training=Training(epochs=1, batch_size=8, augment="flip")),
        list[RowsInFile](),
    )
    for task in stream(10):
        learner.learn(task)
        plain, mirrored = learner.known_queries.kept.values()
        assert plain.nbytes == mirrored.nbytes == 20 * 4 * learner.vit.config.width
        assert plain not in kept
        kept.append(plain)


# ---------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("variance", ["sample", "population"])
@pytest.mark.parametrize("kind", ["diagonal", "full", "shared"])
def test_sums_give_the_statistics_of_all_features_also_of_classes_that_come_back(kind, variance):
    features, labels = torch.randn(90, 12) * 2 + 30, torch.arange(90) % 3  # far from zero: squares lose digits
    labels[labels == 2] = torch.where(torch.rand(30) < 0.1, 2, 1)
    labels[-1] = 3  # a class with one image
    at_once, summed = (KINDS[kind](12, variance=variance) for _ in range(2))
    at_once.add(features.double(), labels)
    first = (labels < 2) & (torch.arange(90) < 40)
    summed.add(features[first], labels[first])
    rest = ~first
    sums = ClassSums(kind, labels[rest].unique(), 12)
    for batch in torch.nonzero(rest)[:, 0].split(4):
        sums.add(features[batch], labels[batch])
    summed.add_sums(sums)
    for name in ("means", "shares", "spread", "seen"):
        torch.testing.assert_close(getattr(summed, name), getattr(at_once, name), rtol=1e-5, atol=1e-4)


def test_sums_are_exact():
    features, labels = torch.randn(700, 16, dtype=torch.float64), torch.arange(700) % 5
    sums = ClassSums("full", torch.arange(5), 16)
    for part in torch.randperm(700).split(64):
        sums.add(features[part], labels[part])
    for label in range(5):
        own = features[labels == label]
        assert sums.counts[label] == len(own)
        torch.testing.assert_close(sums.totals[label], own.sum(0), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sums.squares[label], own.T @ own, rtol=1e-10, atol=1e-10)


def test_sums_refuse_a_class_without_features_and_several_centroids():
    sums = ClassSums("diagonal", torch.arange(3), 4)
    sums.add(torch.randn(4, 4), torch.tensor([0, 0, 2, 2]))
    with pytest.raises(ValueError, match="class 1 has no features"):
        KINDS["diagonal"](4).add_sums(sums)
    with pytest.raises(ValueError, match="several centroids"):
        KINDS["diagonal"](4, centroids=2).add_sums(sums)


def test_a_method_learns_from_sums_what_it_learns_from_features(monkeypatch):
    training = Training(epochs=1, batch_size=16, test_crop=0.0)
    found = []
    for held in (1 << 20, 0):
        monkeypatch.setattr(task_module, "MOST_IN_MEMORY", held)
        learner = make_learner("linear", training=training, **CLOSED_FORM)
        answers, _ = learn_and_test(learner, stream(40))
        found.append((tensors_of(learner), answers.guesses))
    (whole, guesses), (summed, same_guesses) = found
    assert torch.equal(guesses, same_guesses)
    assert not same_tensors(whole, summed), "they round differently, so both ways were taken"
    for name, tensor in whole.items():
        torch.testing.assert_close(summed[name], tensor, rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


# ---------------------------------------------------------------------------------------------- rows


def test_rows_of_a_file_are_those_of_memory(tmp_path):
    whole = torch.randn(50, 7)
    save_rows(tmp_path / "rows.npy", whole.split(9), (50, 7))
    rows = open_rows(tmp_path / "rows.npy", (50, 7), torch.device("cpu"))
    for index in ([3], [0, 1, 2, 3], [49, 3, 3, 4, 5, 0], list(range(50))):
        assert torch.equal(rows[torch.tensor(index)], whole[index])
    assert np.array_equal(np.load(tmp_path / "rows.npy"), whole.numpy()), "an ordinary array"
    assert open_rows(tmp_path / "rows.npy", (49, 7), torch.device("cpu")) is None
    assert open_rows(tmp_path / "nothing.npy", (50, 7), torch.device("cpu")) is None
    damaged = bytearray((tmp_path / "rows.npy").read_bytes())
    damaged[200] ^= 1
    (tmp_path / "rows.npy").write_bytes(damaged)
    with pytest.warns(UserWarning, match="damaged"):
        assert open_rows(tmp_path / "rows.npy", (50, 7), torch.device("cpu")) is None


def test_joined_rows_are_known_where_their_parts_are():
    parts = [torch.randn(5, 3), None, torch.randn(4, 3)]
    joined = JoinedRows(parts, [5, 2, 4])
    assert torch.equal(joined[torch.arange(2, 5)], parts[0][2:]) and torch.equal(joined[torch.arange(7, 11)], parts[2])
    assert joined[torch.arange(4, 6)] is None and joined[torch.arange(3, 9)] is None
    assert torch.equal(
        JoinedRows([parts[0], parts[2]], [5, 4])[torch.arange(3, 8)], torch.cat([parts[0][3:], parts[2][:3]])
    )


def test_turns_cover_all_rows_once():
    values = torch.arange(40).float()[:, None]
    batches, seen = values.split(3), []
    for rank in range(3):
        turns = ShardedRows(Ranks(rank, 3), list(map(len, batches)), lambda rank=rank: iter(batches[rank::3]))
        seen += [values[rows].equal(own) and range(40)[rows] for rows, own in turns.own()]
    assert sorted(row for rows in seen for row in rows) == list(range(40))
    alone = ShardedRows(Ranks(), list(map(len, batches)), lambda: iter(batches))
    assert torch.equal(alone.whole(), values) and torch.equal(alone.then(lambda v: 2 * v).whole(), 2 * values)


def test_a_full_disk_is_met_once(monkeypatch, nothing_held):
    """Queries that cannot be written are computed where they are needed, and nobody tries again."""
    tried = []

    def full(file, pieces):
        tried.append(sum(map(len, pieces)))
        raise OSError(28, "No space left on device")

    whole, _ = learn_and_test(make_learner("linear", training=QUICK), stream(10))
    monkeypatch.setattr(queries_module, "write_rows", full)
    with pytest.warns(UserWarning, match="nothing is kept in the cache"):
        answers, _ = learn_and_test(make_learner("linear", training=QUICK), stream(10))
    assert torch.equal(answers.guesses, whole.guesses)
    assert tried == [20] * 4, "once for each task's training images and test images"

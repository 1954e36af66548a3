"""The learner from Python: what it takes for an image, what it says, and how it refuses."""

from itertools import islice

import numpy as np
import pytest
import torch
from conftest import QUICK, TINY, make_learner, make_stream, make_vit, same_tensors, tensors_of
from PIL import Image

from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.errors import ImageError, PastImagesError, UserError
from vqprompt.core.progress import Stage
from vqprompt.core.runtime.device import pick_device, pick_precision
from vqprompt.research.learner.learner import Learner


@pytest.fixture(scope="module")
def learner():
    learner = make_learner("vq-prompt")
    for task in make_stream():
        learner.learn(task)
    return learner


@pytest.fixture
def pictures():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (24, 40, 3), np.uint8) for _ in range(5)]


class TestPredict:
    def test_files_pillow_images_and_arrays_are_one(self, learner, pictures, tmp_path):
        paths = []
        for i, pixels in enumerate(pictures):
            paths.append(tmp_path / f"Bild {i}.png")
            Image.fromarray(pixels).save(paths[-1])
        by_array = learner.predict_proba(pictures)
        assert torch.equal(by_array, learner.predict_proba(paths))
        assert torch.equal(by_array, learner.predict_proba([str(p) for p in paths]))
        assert torch.equal(by_array, learner.predict_proba([Image.fromarray(p) for p in pictures]))
        assert learner.predict(paths) == [learner.classes[i] for i in by_array.argmax(1)] and learner.predict([]) == []

    def test_scores_are_probabilities_of_every_class_and_nothing_is_kept(self, learner, pictures, home):
        before = dict(learner.known_queries.kept)
        scores = learner.predict_proba(pictures)
        assert scores.shape == (5, 6)
        torch.testing.assert_close(scores.sum(1), torch.ones(5))
        assert not torch.allclose(scores[0], scores[1], atol=1e-4)
        assert learner.known_queries.kept == before and not list(home.rglob("*.npy"))

    def test_alone_or_in_company(self, learner, pictures):
        torch.testing.assert_close(
            learner.predict_proba(pictures)[2:3], learner.predict_proba(pictures[2:3]), rtol=1e-3, atol=1e-4
        )

    @pytest.mark.parametrize(
        ("shape", "dtype"), [((8, 8, 3), "float32"), ((8,), "uint8"), ((8, 8, 2), "uint8"), ((1, 8, 8, 3), "uint8")]
    )
    def test_impossible_arrays(self, learner, shape, dtype):
        with pytest.raises(UserError, match=r"must be uint8 .*, not "):
            learner.predict([np.zeros(shape, dtype)])

    def test_files_that_are_not_there_or_no_images(self, learner, tmp_path):
        with pytest.raises(UserError, match=r"nowhere\.png: no such image file"):
            learner.predict([tmp_path / "nowhere.png"])
        (tmp_path / "text.png").write_text("text")
        with pytest.raises(ImageError, match=r"text\.png: not an image"):
            learner.predict([tmp_path / "text.png"])

    def test_before_anything_is_learned(self, pictures):
        with pytest.raises(UserError, match="nothing has been learned yet"):
            make_learner().predict(pictures)


class TestConstruction:
    def test_size_is_the_backbone_s_own_by_default(self):
        assert Learner(make_vit(), "linear").vit.config.image_size == TINY.image_size
        assert Learner(make_vit(), "linear", size=42).vit.config.image_size == 42

    def test_impossible_size(self):
        with pytest.raises(UserError, match="nearest that does is 28"):
            Learner(make_vit(), "linear", size=30)

    def test_the_method_s_own_rate_is_the_default(self):
        assert Learner(make_vit(), "linear").settings.lr == 0.0025
        assert Learner(make_vit(), "ft").settings.lr < 0.0025

    def test_unknown_method_and_option(self):
        with pytest.raises(UserError, match="did you mean 'linear'"):
            Learner(make_vit(), "linaer")
        with pytest.raises(UserError, match="options of linear: tau: no such setting"):
            Learner(make_vit(), "linear", tau=3)

    def test_only_a_backbone_that_is_tuned_requires_gradients(self):
        assert not any(p.requires_grad for p in Learner(make_vit(), "vq-prompt").vit.parameters())
        assert all(p.requires_grad for p in Learner(make_vit(), "ft").vit.parameters())


class TestHardware:
    def test_auto_is_a_device_that_is_there(self):
        assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")

    @pytest.mark.parametrize("name", ["abacus", "cuda:99", ""])
    def test_a_device_that_is_not(self, name):
        with pytest.raises(UserError, match=r"cannot be used here .*try auto or cpu"):
            pick_device(name)

    def test_precision(self):
        cpu = torch.device("cpu")
        assert pick_precision("auto", cpu) == pick_precision("fp32", cpu) == torch.float32
        assert pick_precision("bf16", cpu) == torch.bfloat16
        with pytest.raises(UserError, match="precision 'fp8' is unknown"):
            pick_precision("fp8", cpu)

    @pytest.mark.parametrize("method", ["vq-prompt", "ft"])
    def test_mixed_precision_learns_the_same_thing_roughly(self, method):
        """A frozen backbone is stored in bf16; one that learns keeps its weights in fp32."""
        exact, mixed = (
            Learner(make_vit(), method, training=make_learner().settings, device="cpu", precision=precision)
            for precision in ("fp32", "bf16")
        )
        assert mixed.vit.dtype == (torch.float32 if method == "ft" else torch.bfloat16)
        assert mixed.method.head.weight.dtype == torch.float32
        task = next(iter(make_stream()))
        for learner in (exact, mixed):
            learner.learn(task)
        a, b = exact.logits(task.test), mixed.logits(task.test)
        assert b.dtype == torch.float32 and (a - b).abs().mean() < 0.2 * a.std()


def test_nameless_stores_are_not_taken_for_one_another():
    """Queries are kept by what they were computed from; images in memory have no name to go by."""
    learner = make_learner()
    stores = [
        Store(np.random.default_rng(seed).integers(0, 256, (4, 3, 32, 32), np.uint8), np.ones(4), "") for seed in (0, 1)
    ]
    one, other = (learner.queries(Images(store, np.arange(4), np.zeros(4))) for store in stores)
    assert not torch.equal(one, other)


@pytest.mark.bits
class TestInterruption:
    """A task learned half: what was known before can be asked for, and nothing half-learned passes for whole."""

    def half_learned(self, method="vq-prompt", **options):
        learner, tasks = make_learner(method, **options), iter(make_stream())
        learner.learn(next(tasks))
        second = next(tasks)

        def stop(event):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            learner.learn(second, stop)
        return learner, second

    @pytest.mark.parametrize("method", ["vq-prompt", "bic", "evoprompt"])
    def test_it_is_neither_repeated_nor_saved(self, method, tmp_path):
        learner, task = self.half_learned(method)
        for attempt in (lambda: learner.learn(task), lambda: learner.save(tmp_path)):
            with pytest.raises(UserError, match=f"learning {task.classes[0]}.* was interrupted.*Learner.load"):
                attempt()
        assert not list(tmp_path.iterdir())

    def test_old_classes_can_be_asked_for(self, pictures):
        learner, _ = self.half_learned()
        assert learner.predict_proba(pictures).shape == (5, 2)
        assert set(learner.predict(pictures)) <= set(learner.classes)

    def test_also_from_a_checkpoint_in_mid_task(self, pictures, tmp_path):
        learner, tasks = make_learner(), iter(make_stream())
        learner.learn(next(tasks))
        task = next(tasks)

        next(learner.epochs(task))
        learner.save(tmp_path)
        loaded = Learner.load(tmp_path, backbone=make_vit(), device="cpu")
        assert loaded.predict_proba(pictures).shape == (5, 2) and set(loaded.predict(pictures)) <= set(loaded.classes)
        learner.learn(task)  # it was left between two epochs, so it goes on
        loaded.learn(task)
        assert same_tensors(tensors_of(learner), tensors_of(loaded))

    def test_training_that_diverges_is_stopped(self):
        learner = make_learner(training=QUICK.model_copy(update={"lr": 1e30}))
        with pytest.raises(UserError, match=r"task 1, epoch \d: the \w+ loss is not a finite number.*below lr=1e\+30"):
            for task in make_stream():
                learner.learn(task)


class TestRefusals:
    def test_joint_in_a_plain_loop_is_refused_at_the_second_task(self, tmp_path):
        """It would be fine-tuning under another name. What it has learned is still whole."""
        learner, tasks = make_learner("joint"), iter(make_stream())
        learner.learn(next(tasks))
        before = tensors_of(learner)
        with pytest.raises(UserError, match=r"joint learns all classes at once .*Stream\(dataset, tasks=1\)"):
            learner.learn(next(tasks))
        assert same_tensors(tensors_of(learner), before) and len(learner.classes) == 2
        learner.save(tmp_path)
        whole = make_learner("joint")
        for task in make_stream(tasks=1):
            whole.learn(task)
        assert len(whole.classes) == 6

    def test_a_closed_task_is_refused_and_nothing_is_lost(self, tmp_path):
        learner, stream = make_learner(), make_stream()
        tasks = iter(stream)
        learner.learn(next(tasks))
        second = next(tasks)
        for closed in (stream.tasks[2], stream.tasks[0]):  # not open yet, and not open any more
            with pytest.raises(PastImagesError):
                learner.learn(closed)
            learner.save(tmp_path)
        learner.learn(second)
        undisturbed = make_learner()
        for task in islice(make_stream(), 2):
            undisturbed.learn(task)
        assert same_tensors(tensors_of(learner), tensors_of(undisturbed))

    def test_after_an_interruption_nobody_is_told_about_progress(self):
        """The callback of an interrupted `learn` may be gone."""
        learner, task = make_learner(), next(iter(make_stream()))

        def stop(event):
            if event.stage is Stage.STATISTICS:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            learner.learn(task, stop)
        assert learner.features(task.test).shape == (len(task.test), 32)


def test_learners_do_not_share_the_backbone_they_were_given():
    vit = make_vit()
    before = {name: t.clone() for name, t in vit.state_dict().items()}
    probe, stream = Learner(vit, "linear", training=QUICK, device="cpu", compile="off"), make_stream()
    for task in stream:
        probe.learn(task)
    found = probe.accuracies(stream.tasks)
    tuned = Learner(vit, "ft", size=14, training=QUICK, device="cpu", compile="off")
    for task in make_stream():
        tuned.learn(task)
    assert same_tensors(before, vit.state_dict()) and vit.config == TINY
    probe.known_queries.kept.clear()
    assert probe.accuracies(stream.tasks) == found


class TestWhereThingsAre:
    def test_weights_are_found_again_from_anywhere(self, tmp_path, monkeypatch):
        save_backbone(make_vit(), tmp_path / "mine.safetensors")
        monkeypatch.chdir(tmp_path)
        learner = Learner("mine.safetensors", "linear", training=QUICK, device="cpu")
        for task in make_stream():
            learner.learn(task)
        learner.save("learned")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert same_tensors(tensors_of(Learner.load(tmp_path / "learned")), tensors_of(learner))
        (tmp_path / "mine.safetensors").rename(tmp_path / "moved.safetensors")
        with pytest.raises(UserError, match=r"mine.safetensors, which are not there; say where.*--backbone"):
            Learner.load(tmp_path / "learned")
        assert Learner.load(tmp_path / "learned", backbone=tmp_path / "moved.safetensors").classes == learner.classes

    def test_a_run_is_not_saved_over(self, learner, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UserError, match="holds a run"):
            learner.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_frozen_network_sees_every_clean_image_once(monkeypatch):
    """Moving-Prompts joins its features to the moved ones; they do not change from test to test."""
    learner = make_learner("moving-prompts")
    seen, original = [], type(learner.method).frozen_features
    monkeypatch.setattr(
        type(learner.method),
        "frozen_features",
        lambda own, view: seen.append(len(view.images)) or original(own, view),
    )
    stream = make_stream()
    for task in stream:
        learner.learn(task)
        predictions = learner.test(stream.seen(task.number))
    assert sum(seen) == sum(len(task.train) + len(task.test) for task in stream.tasks)
    learner.evaluator.known = None  # all are computed again
    again = learner.test(stream.tasks)
    assert sum(seen) > sum(len(task.train) + len(task.test) for task in stream.tasks)
    torch.testing.assert_close(again.probability, predictions.probability)

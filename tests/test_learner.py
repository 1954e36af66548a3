"""The learner from Python: what it takes for an image, what it says, and how it refuses."""

import numpy as np
import pytest
import torch
from conftest import TINY, make_learner, make_stream, make_vit
from PIL import Image

from vqprompt.errors import ImageError, UserError
from vqprompt.images import Images, Store
from vqprompt.learner import Learner, pick_device, pick_precision


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
        by_array = learner.scores(pictures)
        assert torch.equal(by_array, learner.scores(paths))
        assert torch.equal(by_array, learner.scores([str(p) for p in paths]))
        assert torch.equal(by_array, learner.scores([Image.fromarray(p) for p in pictures]))
        assert learner.predict(paths) == [learner.classes[i] for i in by_array.argmax(1)]

    def test_scores_are_probabilities_of_every_class(self, learner, pictures):
        scores = learner.scores(pictures)
        assert scores.shape == (5, 6)
        torch.testing.assert_close(scores.sum(1), torch.ones(5))
        assert not torch.allclose(scores[0], scores[1], atol=1e-4)

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16"])
    def test_unusual_images_are_read_alike_from_file_and_memory(self, learner, tmp_path, mode):
        rng = np.random.default_rng(2)
        channels = {"RGBA": (4, np.uint8), "LA": (2, np.uint8), "I;16": (1, np.uint16)}[mode]
        image = Image.fromarray(
            rng.integers(0, np.iinfo(channels[1]).max, (20, 20, channels[0]), channels[1]).squeeze()
        )
        assert image.mode == mode
        image.save(tmp_path / "x.png")
        assert torch.equal(learner.scores([image]), learner.scores([tmp_path / "x.png"]))

    def test_grey_arrays(self, learner, pictures):
        grey = pictures[0][..., 0]
        assert torch.equal(learner.scores([grey]), learner.scores([np.stack([grey] * 3, -1)]))

    def test_alone_or_in_company(self, learner, pictures):
        torch.testing.assert_close(learner.scores(pictures)[2:3], learner.scores(pictures[2:3]), rtol=1e-3, atol=1e-4)

    def test_nothing_asked_nothing_said(self, learner):
        assert learner.predict([]) == []

    def test_nothing_of_it_is_kept(self, learner, pictures, home):
        before = dict(learner._queries)
        learner.predict(pictures)
        assert learner._queries == before and not list(home.rglob("*.npy"))

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
        with pytest.raises(UserError, match=r"cannot be used here .*try auto, cpu or cuda"):
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

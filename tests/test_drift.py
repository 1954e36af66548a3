"""Statistics that move with the features, and the loss that keeps features where they were."""

import numpy as np
import pytest
import torch
from conftest import make_learner, make_stream, make_vit, same_tensors, tensors_of

from vqprompt.core.statistics.drift import Drift, Moving, fit_drift
from vqprompt.core.statistics.gaussians import JITTER, KINDS
from vqprompt.research.learner.checkpoint import read_checkpoint
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.settings import Training
from vqprompt.research.training.view import View

WIDTH = 6


def draw(count=80, seed=0, classes=1):
    """Correlated features [n, D], shifted from class to class, and labels [n]."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    centers = 3 * rng.normal(size=(classes, WIDTH))
    x = rng.normal(size=(count, WIDTH)) @ rng.normal(size=(WIDTH, WIDTH)) + centers[labels]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(labels)


def linear_map(x: torch.Tensor, diagonal: bool = False):
    """A map (x − c) A + c + s about the features' own center c, and A."""
    rng = np.random.default_rng(7)
    a = np.diag(rng.uniform(0.5, 2, WIDTH)) if diagonal else np.eye(WIDTH) + 0.3 * rng.normal(size=(WIDTH, WIDTH))
    matrix, shift = torch.tensor(a, dtype=torch.float64), torch.tensor(rng.normal(size=WIDTH))
    center = x.double().mean(0)
    return (lambda points: ((points.double() - center) @ matrix + center + shift).float()), matrix


class TestKnownMaps:
    """What a known map does to features, it does to their statistics, though only other images show the map."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("centroids", [1, 3])
    def test_means_and_covariances_follow(self, kind, centroids):
        old, labels = draw(120, seed=1, classes=3)
        new, _ = draw(100, seed=2)
        moves, matrix = linear_map(new)
        statistics = KINDS[kind](WIDTH, centroids)
        statistics.add(old, labels)
        before = statistics.spread.clone()
        expected = KINDS[kind](WIDTH, centroids)
        expected.add(moves(old), labels)
        shapes = {name: (t.shape, t.dtype) for name, t in statistics.state_dict().items()}
        statistics.move(fit_drift(new, moves(new), Moving(how="linear", ridge=1e-10)))
        assert {name: (t.shape, t.dtype) for name, t in statistics.state_dict().items()} == shapes, "no more memory"
        torch.testing.assert_close(statistics.class_means(), expected.class_means(), rtol=1e-4, atol=1e-4)
        if kind == "diagonal":  # what is left of Aᵀ diag(v) A on the diagonal
            spread = torch.stack(
                [torch.diag(matrix.T @ torch.diag(v.double()) @ matrix) for v in before.flatten(0, 1)]
            ).view_as(before)
            torch.testing.assert_close(statistics.spread, spread.float(), rtol=1e-4, atol=1e-4)
        elif centroids == 1:
            torch.testing.assert_close(statistics.spread, expected.spread, rtol=1e-4, atol=1e-3)
        else:
            torch.testing.assert_close(
                statistics.spread, (matrix.T @ before.double() @ matrix).float(), rtol=1e-4, atol=1e-3
            )

    def test_variances_follow_exactly_where_dimensions_do_not_mix(self):
        old, labels = draw(120, seed=1, classes=3)
        new, _ = draw(100, seed=2)
        moves, matrix = linear_map(new, diagonal=True)
        statistics = KINDS["diagonal"](WIDTH)
        statistics.add(old, labels)
        statistics.move(fit_drift(new, moves(new), Moving(how="linear", ridge=1e-10)))
        variance = torch.stack([moves(old)[labels == c].var(0) for c in range(3)])
        jitter = JITTER * matrix.diagonal().square().float()
        torch.testing.assert_close(statistics.spread[:, 0], variance + jitter, rtol=1e-4, atol=1e-4)

    def test_the_linear_map_is_the_ridge_regression_of_its_docstring(self):
        before, _ = draw(50, seed=3)
        after = before + torch.randn(50, WIDTH)
        drift = fit_drift(before, after, Moving(how="linear", ridge=0.7))
        x, d = before.double().numpy(), (after.double() - before.double()).numpy()
        center, shift = x.mean(0), d.mean(0)
        x = x - center
        penalty = 0.7 * np.diag(x.T @ x).mean()
        slope = np.linalg.inv(x.T @ x + penalty * np.eye(WIDTH)) @ x.T @ (d - shift)
        np.testing.assert_allclose(drift.slope, slope, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(drift.matrix, np.eye(WIDTH) + slope, rtol=1e-6, atol=1e-9)
        point = np.arange(WIDTH, dtype=float)
        moved = drift.points(torch.tensor(point)[None])[0]
        np.testing.assert_allclose(moved, point + shift + (point - center) @ slope, rtol=1e-6, atol=1e-9)

    def test_the_mean_moves_all_points_alike_and_no_covariance(self):
        before, _ = draw()
        after = before + torch.randn_like(before)
        drift = fit_drift(before, after, Moving(how="mean"))
        points = torch.randn(4, 2, WIDTH)
        torch.testing.assert_close(drift.points(points), points + (after - before).mean(0))
        for kind in KINDS:
            statistics = KINDS[kind](WIDTH)
            statistics.add(before, torch.arange(len(before)) % 2)
            spread = statistics.spread.clone()
            statistics.move(drift)
            assert torch.equal(statistics.spread, spread)

    def test_the_kernel_moves_a_point_as_its_neighbours_moved(self):
        modes = torch.tensor([[-20.0] * WIDTH, [20.0] * WIDTH])
        before = torch.cat([modes[0] + torch.randn(30, WIDTH), modes[1] + torch.randn(30, WIDTH)])
        after = before + torch.tensor([1.0, -2.0]).repeat_interleave(30)[:, None]
        drift = fit_drift(before, after, Moving(how="kernel", bandwidth=0.1))
        torch.testing.assert_close(drift.points(modes), modes + torch.tensor([[1.0], [-2.0]]), rtol=0, atol=1e-4)
        wide = fit_drift(before, after, Moving(how="kernel", bandwidth=1e4))
        torch.testing.assert_close(wide.points(modes), modes - 0.5, rtol=0, atol=1e-3)
        assert drift.points(modes[None, :, :].expand(3, 2, WIDTH)).shape == (3, 2, WIDTH)


class TestNothingToMove:
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_old_class(self, kind):
        statistics = KINDS[kind](WIDTH)
        before = {name: t.clone() for name, t in statistics.state_dict().items()}
        statistics.move(Drift(torch.zeros(WIDTH), torch.ones(WIDTH), torch.eye(WIDTH)))
        assert same_tensors(before, statistics.state_dict())

    @pytest.mark.parametrize("how", ["mean", "kernel", "linear"])
    def test_features_that_stayed(self, how):
        before, labels = draw(classes=2)
        statistics = KINDS["full"](WIDTH)
        statistics.add(before, labels)
        kept = {name: t.clone() for name, t in statistics.state_dict().items()}
        statistics.move(fit_drift(before, before, Moving(how=how)))
        torch.testing.assert_close(dict(statistics.state_dict()), kept)

    @pytest.mark.parametrize("how", ["mean", "kernel", "linear"])
    def test_a_single_image(self, how):
        """One image says by how much, and nothing about how a space turns."""
        before = torch.ones(1, WIDTH)
        drift = fit_drift(before, before + 2, Moving(how=how))
        points = torch.randn(5, WIDTH)
        torch.testing.assert_close(drift.points(points), points + 2)


# ---------------------------------------------------------------------------------------------- in a method

FAST = {"epochs": 1, "ratio": 1}
MOVING = {"moving": {"how": "linear"}, "feature_distillation": 1.0, "statistics": True, "rebalancing": FAST}


@pytest.mark.bits
@pytest.mark.parametrize(("method", "stop"), [("vq-prompt", 0), ("ft++", 1)])
def test_killed_in_mid_task_it_ends_with_the_same_bits(method, stop, tmp_path):
    """The former self and the features from before the task are in the checkpoint."""
    training = Training(epochs=3, batch_size=6, lr=0.01, augment="crop")
    whole, stream = make_learner(method, training=training, **MOVING), make_stream(tasks=2)
    for task in stream:
        whole.learn(task)
    learner, tasks = make_learner(method, training=training, **MOVING), iter(make_stream(tasks=2))
    learner.learn(next(tasks))
    second = next(tasks)
    for epoch in learner.epochs(second):
        if epoch.number == stop:
            learner.save(tmp_path)
    saved = read_checkpoint(tmp_path)[0]
    assert saved["task.features_before"].shape == (24, 32)
    assert any(name.startswith("method.former.") for name in saved)
    assert any(name.startswith("method.former.vit.") for name in saved) == METHODS[method].tunes_backbone
    resumed = Learner.load(tmp_path, device="cpu", compile="off", backbone=make_vit())
    resumed.learn(second)
    assert same_tensors(tensors_of(whole), tensors_of(resumed))
    assert resumed.method.former is None
    resumed.save(tmp_path)
    assert not [name for name in read_checkpoint(tmp_path)[0] if "former" in name or "before" in name]


@pytest.mark.parametrize("method", ["vq-prompt", "coda-p", "ft++"])
def test_old_means_are_moved_by_what_the_task_did_to_the_features(method):
    """Measured on the task's own images, from the moment before the task started to the moment after its training."""
    options = {**MOVING, "feature_distillation": 0.0, "moving": {"how": "mean"}}
    learner, tasks = make_learner(method, **options), iter(make_stream())
    learner.learn(next(tasks))
    second, old = next(tasks), learner.method.statistics.means.clone()
    before = learner.features(second.train)
    learner.learn(second)
    moved = learner.features(second.train, 1).mean(0) - before.mean(0)
    assert moved.norm() > 0.05 * old.norm(dim=-1).mean(), "it has to move for this test to say anything"
    torch.testing.assert_close(learner.method.statistics.means[:2], old + moved, rtol=1e-3, atol=1e-3)


class TestFeatureDistillation:
    def second_task(self, method: str, **options):
        """A learner whose second task has started, and a view of its images."""
        learner, tasks = make_learner(method, feature_distillation=2.0, **options), iter(make_stream())
        learner.learn(next(tasks))
        task = next(tasks)
        learner.method.start_task(TaskInfo(1, 2, 2))
        learner.method.train()
        images = torch.randn(8, 3, 28, 28)
        return learner, View(learner.vit, lambda: images, labels=task.train.labels[:8] % 2 + 2, task=1)

    @pytest.mark.parametrize("method", ["vq-prompt", "l2p++", "ft", "ft++", "slca", "linear"])
    def test_zero_at_the_first_step(self, method):
        learner, view = self.second_task(method)
        assert learner.method.losses(view)["feature distillation"].item() == pytest.approx(0, abs=1e-9)

    @pytest.mark.parametrize("method", ["vq-prompt", "ft++"])
    def test_no_gradient_reaches_the_former_self(self, method):
        learner, view = self.second_task(method)
        current = learner.method
        with torch.no_grad():
            for p in [*current.prompting_parameters(), *(current.vit.parameters() if current.tunes_backbone else [])]:
                p += 0.1 * torch.randn_like(p)
        loss = current.losses(view)["feature distillation"]
        features, former = current.features(view)[0], current.former.features(view.through(current.former.vit))[0]
        torch.testing.assert_close(loss, 2.0 * (features - former).square().mean())
        loss.backward()
        assert loss > 0 and all(p.grad is None for p in current.former.parameters())
        own = current.prompting_parameters() or list(current.vit.parameters())
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in own)
        trained = {id(p) for group in current.parameter_groups() for p in group["params"]}
        assert not trained & {id(p) for p in current.former.parameters()}

    def test_it_is_there_from_the_second_task_on(self):
        learner, terms = make_learner("vq-prompt", feature_distillation=1.0), []
        for task in make_stream():
            terms += [epoch.losses.get("feature distillation") for epoch in learner.epochs(task)]
        assert terms[:2] == [None, None] and all(terms[2:])
        assert terms[2][0] == pytest.approx(0, abs=1e-9) and terms[3][-1] > 0
        assert learner.method.former is None, "dropped when the task is over"


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("moving-prompts", "moving-weights", "sldc", "ssiat")]
)
def test_methods_that_are_not_about_moving_use_neither_by_default(name):
    options = METHODS[name].Options()
    assert getattr(options, "moving", Moving()).how == "none"
    assert getattr(options, "feature_distillation", 0.0) == 0.0
    for preset in METHODS[name].presets.values():
        assert "moving" not in preset and "feature_distillation" not in preset

"""Class Gaussians and the classifier's rebalancing from them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import make_learner, make_stream, make_vit, same_tensors, tensors_of
from scipy.optimize import minimize_scalar
from scipy.special import stdtrit
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from vqprompt.core.statistics import discriminant
from vqprompt.core.statistics.gaussians import JITTER, KINDS, ClassStatistics
from vqprompt.product.model.calibration import student_quantile
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.base import Head
from vqprompt.research.training.rebalancing import Rebalancing, fill_gradient, normalized_cross_entropy, rebalance

WIDTH = 6


def draw_classes(classes=3, count=40, width=WIDTH, seed=0):
    """Correlated Gaussians, a different one for each class: features [n, D] and labels [n], shuffled."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(classes, width, width))
    x = np.concatenate(
        [rng.normal(size=(count, width)) @ mixing[c] + 3 * rng.normal(size=width) for c in range(classes)]
    )
    y = np.arange(classes).repeat(count)
    order = rng.permutation(len(y))
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order])


def filled(covariance="diagonal", centroids=1, **data) -> tuple[ClassStatistics, torch.Tensor, torch.Tensor]:
    features, labels = draw_classes(**data)
    statistics = KINDS[covariance](features.shape[1], centroids)
    statistics.add(features, labels)
    return statistics, features, labels


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class TestMoments:
    def test_diagonal_against_numpy(self):
        statistics, features, labels = filled("diagonal")
        for c in range(3):
            own = features[labels == c].double().numpy()
            np.testing.assert_allclose(statistics.means[c, 0], own.mean(0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(statistics.spread[c, 0], own.var(0, ddof=1) + JITTER, rtol=1e-4)
        assert torch.equal(statistics.shares, torch.ones(3, 1))

    def test_full_against_numpy(self):
        statistics, features, labels = filled("full")
        for c in range(3):
            np.testing.assert_allclose(
                statistics.spread[c], np.cov(features[labels == c].numpy().T), rtol=1e-3, atol=1e-4
            )

    def test_shared_against_numpy_however_the_classes_come(self):
        at_once, features, labels = filled("shared")
        bit_by_bit = KINDS["shared"](WIDTH)
        for c in range(3):
            bit_by_bit.add(features[labels == c], labels[labels == c])
        rest = np.concatenate([(own := features[labels == c].numpy()) - own.mean(0) for c in range(3)])
        expected = rest.T @ rest / (len(rest) - 3)
        for statistics in (at_once, bit_by_bit):
            np.testing.assert_allclose(statistics.shared_covariance(), expected, rtol=1e-3, atol=1e-4)

    def test_a_class_without_features_is_an_error(self):
        with pytest.raises(ValueError, match="class 1 has no features"):
            KINDS["diagonal"](WIDTH).add(torch.randn(4, WIDTH), torch.tensor([0, 0, 2, 2]))

    def test_several_centroids_find_the_modes(self):
        modes = torch.tensor([[-10.0] * WIDTH, [10.0] * WIDTH])
        features = torch.cat([modes[0] + torch.randn(30, WIDTH), modes[1] + 2 * torch.randn(10, WIDTH)])
        statistics = KINDS["diagonal"](WIDTH, centroids=2)
        statistics.add(features, torch.zeros(40, dtype=torch.long))
        first = int(statistics.means[0, 0].sum() > 0)  # which of the two is the upper one
        for member, part in [(first, features[:30]), (1 - first, features[30:])]:
            torch.testing.assert_close(statistics.means[0, member], part.mean(0))
            torch.testing.assert_close(statistics.spread[0, member], part.var(0) + JITTER, rtol=1e-3, atol=1e-3)
            assert statistics.shares[0, member] == len(part) / 40
        drawn, _ = statistics.sample(4000, generator())
        assert float((drawn.mean(1) > 0).float().mean()) == pytest.approx(0.25, abs=0.03)


class TestSampling:
    @pytest.mark.parametrize("kind", KINDS)
    def test_moments(self, kind):
        statistics, features, labels = filled(kind, count=60)
        count = 20_000
        drawn, drawn_labels = statistics.sample(count, generator())
        assert torch.equal(torch.bincount(drawn_labels), torch.tensor([count] * 3))
        pooled = np.mean([np.cov(features[labels == c].numpy().T) for c in range(3)], axis=0)
        for c in range(3):
            own, new = features[labels == c].numpy(), drawn[drawn_labels == c].numpy()
            covariance = {"full": np.cov(own.T), "diagonal": np.diag(own.var(0, ddof=1)), "shared": pooled}[kind]
            np.testing.assert_allclose(new.mean(0), own.mean(0), atol=5 * np.sqrt(np.diag(covariance).max() / count))
            np.testing.assert_allclose(np.cov(new.T), covariance, atol=0.05 * np.diag(covariance).max())

    def test_a_seed_says_what_is_drawn(self):
        statistics, _, _ = filled()
        a, b, c = (statistics.sample(5, generator(seed))[0] for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c)

    def test_means_can_be_scaled_class_by_class(self):
        statistics, _, _ = filled()
        plain, _ = statistics.sample(3, generator())
        scaled, labels = statistics.sample(3, generator(), torch.tensor([1.0, 0.5, 0.0]))
        lost = torch.tensor([0.0, 0.5, 1.0])[labels, None] * statistics.means[labels, 0]
        torch.testing.assert_close(plain - scaled, lost, rtol=1e-4, atol=1e-4)


class TestFewImages:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("centroids", [1, 3])
    def test_one_image_per_class(self, kind, centroids):
        features = torch.randn(4, WIDTH) * 10
        statistics = KINDS[kind](WIDTH, centroids)
        statistics.add(features, torch.arange(4))
        drawn, labels = statistics.sample(200, generator())
        assert drawn.isfinite().all()
        assert (drawn - features[labels]).abs().max() < 10 * JITTER**0.5, "nothing but the jitter around the image"
        head = Head(WIDTH)
        head.grow(4)
        for how in ("train", "closed-form"):
            rebalance(
                head, statistics, 2, 8, Rebalancing(how=how, covariance=kind, centroids=centroids, lr=0.1), seed=0
            )
            assert head.weight.isfinite().all() and head.bias.isfinite().all()
            assert torch.equal(head(features).argmax(1), torch.arange(4))

    @pytest.mark.parametrize("kind", KINDS)
    def test_two_images_with_three_centroids(self, kind):
        statistics = KINDS[kind](WIDTH, 3)
        features = torch.tensor([[-5.0] * WIDTH, [5.0] * WIDTH])
        statistics.add(features, torch.zeros(2, dtype=torch.long))
        drawn, _ = statistics.sample(100, generator())
        nearest = torch.cdist(drawn, features).min(1)
        assert nearest.values.max() < 1 and nearest.indices.unique().tolist() == [0, 1], "never the empty centroid"


class TestRebalancing:
    def biased_head(self, statistics, towards):
        """Knows each class by its mean, then leans so far towards some that they win everywhere."""
        head = Head(WIDTH)
        head.grow(len(statistics.means))
        with torch.no_grad():
            rebalance(head, statistics, 0, 8, Rebalancing(how="closed-form"), seed=0)
            head.bias[towards] += 50
        return head

    def accuracy(self, head, features, labels):
        return float((head(features).argmax(1) == labels).float().mean())

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    def test_puts_a_biased_head_right(self, optimizer):
        statistics, features, labels = filled(classes=4)
        head = self.biased_head(statistics, [2, 3])
        before = self.accuracy(head, features, labels)
        rate = 0.3 if optimizer == "adamw" else 0.5
        settings = Rebalancing(lr=rate, epochs=60, optimizer=optimizer, weight_decay=0)
        rebalance(head, statistics, 2, 16, settings, seed=0)
        after = self.accuracy(head, features, labels)
        assert before < 0.55 and after > before + 0.25

    def test_one_step_per_old_class_and_epoch_with_the_right_batch_and_rate(self, monkeypatch):
        statistics, _, _ = filled(classes=5)
        head, sizes, rates = Head(WIDTH), [], []
        head.grow(5)
        head.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
        step = torch.optim.AdamW.step

        def spy(optimizer, *given, **named):
            rates.append(optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[0]["weight_decay"] == 5e-4
            return step(optimizer, *given, **named)

        monkeypatch.setattr(torch.optim.AdamW, "step", spy)
        rebalance(head, statistics, 3, 7, Rebalancing(epochs=4, ratio=2, lr=0.1), seed=0)
        assert sizes == [14] * (4 * 3)
        expected = [0.1 * (1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4) for _ in range(3)]
        np.testing.assert_allclose(rates, expected)

    @pytest.mark.parametrize(("kind", "centroids"), [("diagonal", 1), ("diagonal", 2), ("shared", 1)])
    def test_with_more_classes_than_steps_only_what_the_steps_need_is_drawn(self, kind, centroids, monkeypatch):
        statistics, _, _ = filled(kind, centroids, classes=5)
        drawn = []
        every = ClassStatistics.sample

        def noted(self, count, *given):
            features, labels = every(self, count, *given)
            drawn.append((features, labels))
            return features, labels

        monkeypatch.setattr(ClassStatistics, "sample", noted)
        head = Head(WIDTH)
        head.grow(5)
        rebalance(head, statistics, 4, 500, Rebalancing(epochs=1, steps=3, ratio=4, centroids=centroids), seed=0)
        features, labels = drawn[0]
        assert features.shape == (3 * 500 * 4, WIDTH) and labels.bincount().min() > 1000, "all classes have their turn"
        means = torch.stack([features[labels == c].mean(0) for c in range(5)])
        assert (means - statistics.class_means()).abs().max() < 0.5, "of the classes that their labels name"

    def test_steps_of_an_epoch_are_capped(self):
        """Each step scores all classes: a step for every old one, too, would make time quadratic in the classes."""
        statistics, _, _ = filled(classes=5)
        head, steps = Head(WIDTH), []
        head.grow(5)
        head.register_forward_pre_hook(lambda module, given: steps.append(1))
        rebalance(head, statistics, 4, 7, Rebalancing(epochs=3, steps=2), seed=0)
        assert len(steps) == 3 * 2 and Rebalancing().steps == 200

    def test_each_step_sees_a_mixture_of_all_classes(self, monkeypatch):
        statistics, _, _ = filled(classes=4)
        head, seen = Head(WIDTH), []
        head.grow(4)
        entropy = normalized_cross_entropy
        monkeypatch.setattr(
            "vqprompt.research.training.rebalancing.normalized_cross_entropy",
            lambda logits, labels, *rest: (
                seen.append(torch.bincount(labels, minlength=4)),
                entropy(logits, labels, *rest),
            )[1],
        )
        rebalance(head, statistics, 2, 32, Rebalancing(epochs=2), seed=0)
        assert len(seen) == 4 and all((counts > 0).all() for counts in seen)

    def test_logit_norm(self):
        logits, labels = torch.randn(5, 4), torch.arange(5) % 4
        expected = torch.nn.functional.cross_entropy(logits / logits.norm(dim=1, keepdim=True) / 0.1, labels)
        torch.testing.assert_close(normalized_cross_entropy(logits, labels, 0.1), expected)
        plain = torch.nn.functional.cross_entropy(logits, labels)
        assert torch.equal(normalized_cross_entropy(logits, labels, 0), plain)


class TestClosedForm:
    def test_is_the_linear_discriminant(self):
        """scikit-learn divides the scatter by n, we by n − C: the same classifier, scores in proportion."""
        statistics, features, labels = filled("shared", classes=4, count=50)
        head = Head(WIDTH)
        head.grow(4)
        rebalance(head, statistics, 0, 8, Rebalancing(how="closed-form", covariance="shared", shrinkage=0), seed=0)
        known = LinearDiscriminantAnalysis(solver="lsqr", priors=[0.25] * 4).fit(features.numpy(), labels.numpy())
        proportion = (200 - 4) / 200
        np.testing.assert_allclose(head.weight.detach(), known.coef_ * proportion, rtol=5e-3, atol=5e-3)
        intercept = (known.intercept_ - np.log(0.25)) * proportion
        np.testing.assert_allclose(head.bias.detach(), intercept, rtol=5e-3, atol=5e-2)

    def test_shrinkage_against_numpy(self):
        statistics, features, labels = filled("shared")
        head = Head(WIDTH)
        head.grow(3)
        rebalance(head, statistics, 0, 8, Rebalancing(how="closed-form", shrinkage=0.3), seed=0)
        x, y = features.double().numpy(), labels.numpy()
        means = np.stack([x[y == c].mean(0) for c in range(3)])
        covariance = (x - means[y]).T @ (x - means[y]) / (len(x) - 3)
        covariance = 0.7 * covariance + (0.3 * np.trace(covariance) / WIDTH + JITTER) * np.eye(WIDTH)
        weight = means @ np.linalg.inv(covariance)
        np.testing.assert_allclose(head.weight.detach(), weight, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(head.bias.detach(), -0.5 * (weight * means).sum(1), rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("kind", KINDS)
    def test_several_centroids_are_one_class_all_the_same(self, kind):
        """Its mean and its covariance are what they were; only how they are kept differs."""
        one, features, labels = filled(kind, count=60)
        several = KINDS[kind](WIDTH, 4)
        several.add(features, labels)
        torch.testing.assert_close(several.class_means(), one.class_means(), rtol=1e-4, atol=1e-4)
        whole, parts = one.class_covariance(), several.class_covariance()
        assert (parts - whole).norm() < 0.15 * whole.norm() < (several.shared_covariance() - whole).norm()

    def test_a_class_of_one_image_says_nothing_of_the_spread(self):
        statistics, features, _ = filled("shared")
        before = statistics.shared_covariance()
        statistics.add(features[:2], torch.tensor([3, 4]))
        assert torch.equal(statistics.shared_covariance(), before)


# ---------------------------------------------------------------------------------------------- in a method


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_learned_prompts(kind, tmp_path):
    """Means of clean features with the prompts as they are after the task; kept through save and load."""
    learner = make_learner("vq-prompt", rebalancing={"covariance": kind, "how": "closed-form"})
    tasks, expected = make_stream(tasks=2), []
    for task in tasks:
        learner.learn(task)
        features = learner.features(task.train)
        expected += [features[task.train.labels == c].mean(0) for c in range(3)]
    torch.testing.assert_close(learner.method.statistics.means[:, 0], torch.stack(expected))
    learner.save(tmp_path)
    again = Learner.load(tmp_path, backbone=make_vit(), compile="off")
    assert same_tensors(learner.method.statistics.state_dict(), again.method.statistics.state_dict())
    assert again.method.statistics.kind == kind


def test_a_linear_head_can_be_solved_for_from_frozen_features(home):
    """From their means and one covariance: no prompt, and no step of training, has a say in it."""
    solved = {"how": "closed-form", "covariance": "shared"}
    learner, stream = make_learner("linear", statistics=True, rebalancing=solved), make_stream()
    features, labels = [], []
    for task in stream:
        features.append(learner.queries(task.train))
        labels.append(task.train.labels + len(learner.classes))
        learner.learn(task)
    features, labels = torch.cat(features), torch.cat(labels)
    means = torch.stack([features[labels == c].mean(0) for c in range(6)])
    torch.testing.assert_close(learner.method.statistics.means[:, 0], means)
    expected = Head(features.shape[1])
    expected.grow(6)
    statistics = KINDS["shared"](features.shape[1])
    statistics.add(features, labels)
    rebalance(expected, statistics, 0, 8, Rebalancing(**solved), seed=0)
    torch.testing.assert_close(learner.method.head.weight, expected.weight, rtol=1e-3, atol=1e-3)
    assert "statistics" not in dict(make_learner("linear").method.named_modules()), "none unless asked for"


@pytest.mark.parametrize("how", ["closed-form", "train"])
def test_prompts_that_learn_in_the_first_task_alone_leave_old_statistics_true(how, tmp_path):
    learner = make_learner("vq-prompt", learn="first-task", rebalancing={"covariance": "shared", "how": how})
    expected = [learner.method.trains_in(number) for number in range(3)]
    pools, trained = [tensors_of(learner)["pool.prompts"]], []
    for task in make_stream():
        learner.learn(task)
        if not pools[1:]:
            learner.save(tmp_path)
            learner = Learner.load(tmp_path, backbone=make_vit(), device="cpu", compile="off")
        pools.append(tensors_of(learner)["pool.prompts"])
        trained.append(learner.images_seen)
    assert not torch.equal(pools[0], pools[1]) and torch.equal(pools[1], pools[2]) and torch.equal(pools[1], pools[3])
    steps = [b - a for a, b in pairwise([0, *trained])]
    assert steps[0] and (steps[1:] == [0, 0] if how == "closed-form" else all(steps)), "what is solved is not trained"
    assert expected == [step > 0 for step in steps], "as is known before the first task"
    first = next(iter(make_stream())).train  # the same images, in a stream where they may still be read
    features = learner.features(first)
    means = torch.stack([features[first.labels == c].mean(0) for c in range(2)])
    torch.testing.assert_close(learner.method.statistics.means[:2, 0], means)


def test_what_is_computed_without_scipy_agrees_with_it() -> None:
    rng = np.random.default_rng(0)
    scores, classes = 3 * rng.normal(size=(60, 5)), rng.integers(0, 5, 60)
    scores[np.arange(60), classes] += 4

    def loss(log_temperature: float) -> float:
        shares = np.log(discriminant.probabilities(scores, np.exp(log_temperature)))
        rival = np.where(np.arange(5) == classes[:, None], -np.inf, shares).max(1)
        return float(-(shares[np.arange(60), classes] + rival / 60).mean())

    expected = minimize_scalar(
        loss, bounds=np.log(discriminant.TEMPERATURES), method="bounded", options={"xatol": 1e-5}
    )
    assert np.log(discriminant.best_temperature(scores, classes)) == pytest.approx(expected.x, abs=2e-3)
    for freedom in (1, 1.5, 4, 19):
        assert student_quantile(freedom, 0.05) == pytest.approx(stdtrit(freedom, 0.05), abs=1e-4)


def test_the_gradient_that_gpus_rebalance_with_is_that_of_the_cross_entropy():
    head, features, labels = torch.nn.Linear(12, 7).double(), torch.randn(33, 12).double(), torch.randint(0, 7, (33,))
    torch.nn.functional.cross_entropy(head(features), labels).backward()
    expected = head.weight.grad, head.bias.grad
    fill_gradient(head, features, torch.eye(7).double()[labels])
    torch.testing.assert_close((head.weight.grad, head.bias.grad), expected)

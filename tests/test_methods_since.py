"""What defines the methods that came after the paper, rivals and our own."""

import copy
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import QUICK, make_dataset, make_learner, make_stream, make_vit, same_tensors, tensors_of

from vqprompt import Learner, Stream
from vqprompt.core.backbones.low_rank import LAYERS, add_low_rank, linear_layers
from vqprompt.core.runtime.device import seeded
from vqprompt.core.statistics.discriminant import shrunk
from vqprompt.core.statistics.drift import Drift
from vqprompt.research.methods import sldc
from vqprompt.research.methods.base import Method, symmetric_cross_entropy
from vqprompt.research.methods.ease import EASE
from vqprompt.research.methods.moving import MovingMemory
from vqprompt.research.methods.ranpac import RIDGES, RanPAC
from vqprompt.research.methods.sldc import blended_map, fit_map
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.view import View

READOUT = {"class_tokens": 2, "scaled": True, "mirror": True}
CLOSED_FORM = {"statistics": True, "rebalancing": {"how": "closed-form", "covariance": "shared", "shrinkage": 0.1}}
QUICK_SLDC = {"map_steps": 20, "rebalancing": {"epochs": 2, "samples": 8}}
SLOW = QUICK.model_copy(update={"lr": 1e-12, "min_lr": 0.0})


def view_of(learner: Learner, count: int = 5, labels=None) -> View:
    images = torch.randn(count, 3, 28, 28)
    return View(learner.vit, lambda: images, labels=labels)


def learned(method: str, training=QUICK, tasks: int = 3, **options) -> tuple[Learner, list]:
    learner, stream = make_learner(method, training=training, **options), make_stream(tasks)
    seen = []
    for task in stream:
        learner.learn(task)
        seen.append((task, learner.features(task.train)))
    return learner, seen


class TestViT:
    def test_class_tokens_of_the_wanted_blocks_in_the_wanted_order(self):
        vit, images = make_vit(), torch.randn(3, 3, 28, 28)
        x, tokens = vit.embed(images), []
        for block in vit.blocks:
            x = sum(block(x))
            tokens.append(vit.norm(x)[:, 0])
        for blocks in ((-1,), (-1, -2), (-2, -1), (-3, -1)):
            found = vit.encode(vit.embed(images), class_tokens=blocks)
            torch.testing.assert_close(found, torch.cat([tokens[block] for block in blocks], dim=1))

    def test_an_adapter_is_a_bottleneck_beside_the_mlp(self):
        vit, images = make_vit(), torch.randn(3, 3, 28, 28)
        adapters = [tuple(torch.randn(*shape) for shape in ((4, 32), (4,), (32, 4), (32,))) for _ in vit.blocks]
        x = vit.embed(images)
        for block, (down, down_bias, up, up_bias) in zip(vit.blocks, adapters, strict=True):
            x = x + block.attn(block.norm1(x), None, "after", False, None)
            x = x + block.mlp(block.norm2(x))[0] + (x @ down.T + down_bias).relu() @ up.T + up_bias
        found = vit.encode(vit.embed(images), adapters=adapters)
        torch.testing.assert_close(found, vit.norm(x)[:, 0], rtol=1e-4, atol=1e-4)

    def test_low_rank_changes_are_merged_in_a_copy(self):
        vit, images = make_vit(), torch.randn(3, 3, 28, 28)
        before = vit(images)
        add_low_rank(vit, 2)
        torch.testing.assert_close(vit(images), before, msg="nothing changes before something is learned")
        for change in linear_layers(vit):
            change.up.data.normal_(std=0.1)
        assert not torch.allclose(vit(images), before, atol=1e-2)
        torch.testing.assert_close(vit.frozen_copy()(images), vit(images))


class TestPrototypes:
    def test_simplecil_is_the_nearest_mean_by_cosine_and_trains_nothing(self):
        learner, seen = learned("simplecil")
        assert learner.images_seen == 0
        means = torch.cat([torch.stack([f[t.train.labels == c].mean(0) for c in (0, 1)]) for t, f in seen])
        view = view_of(learner)
        expected = F.cosine_similarity(view.query[:, None], means[None], dim=-1)
        torch.testing.assert_close(learner.method.logits(view) * 0.1, expected, rtol=1e-4, atol=1e-5)

    def test_any_division_into_tasks_gives_the_same_simplecil(self):
        several, one = learned("simplecil", tasks=3)[0], learned("simplecil", tasks=1)[0]
        assert several.classes == one.classes
        torch.testing.assert_close(several.method.prototypes, one.method.prototypes)

    def test_apers_adapters_learn_in_the_first_task_alone(self):
        learner, stream = make_learner("aper"), make_stream()
        states = [copy.deepcopy(learner.method.adapters.state_dict())]
        for task in stream:
            learner.learn(task)
            states.append(copy.deepcopy(learner.method.adapters.state_dict()))
        assert not same_tensors(states[0], states[1])
        assert same_tensors(states[1], states[2]) and same_tensors(states[2], states[3])

    @pytest.mark.parametrize("method", ["aper", "ranpac", "ease"])
    def test_adapters_are_trained_with_a_cosine_classifier(self, method):
        learner = make_learner(method)
        learner.method.start_task(TaskInfo(0, 0, 2))
        with torch.no_grad():
            learner.method.sharpness.fill_(3.0)
        view = view_of(learner, labels=torch.tensor([0, 1, 1, 0, 1]))
        loss = learner.method.losses(view)["task"]
        features, rows = learner.method.features(view)[0], learner.method.head.weight
        cosines = F.cosine_similarity(features[:, None], rows[None], dim=-1)
        torch.testing.assert_close(loss, F.cross_entropy(3 * cosines, view.labels))

    def test_apers_features_are_the_frozen_and_the_adapted_ones(self):
        learner, _ = learned("aper")
        view = view_of(learner)
        features = learner.method.features(view)[0]
        torch.testing.assert_close(features[:, :32], learner.vit(view.images))
        adapted = learner.vit.encode(view.tokens, adapters=learner.method.adapters.by_block())
        torch.testing.assert_close(features[:, 32:], adapted)
        assert not torch.allclose(features[:, :32], adapted, atol=1e-4)


class TestRanPAC:
    def test_the_solution_is_ridge_regression_on_everything_seen(self):
        learner, seen = learned("ranpac", projection=40, adapt=False)
        method, total = learner.method, 0
        lifted, targets = [], []
        for task, features in seen:
            lifted.append((features @ method.projection).relu())
            targets.append(F.one_hot(task.train.labels + total, 6).float())
            total += 2
        h, y = torch.cat(lifted).double(), torch.cat(targets).double()
        lowest = 2**-23 * float((h.T @ h).norm())
        candidates = [np.linalg.solve((h.T @ h).numpy() + r * np.eye(40), (h.T @ y).numpy()).T for r in
                      (lowest, *(10.0**e for e in range(-8, 9)))]  # fmt: skip
        assert min(np.abs(method.weight.double().numpy() - c).max() for c in candidates) < 1e-2
        torch.testing.assert_close(method.gram.double(), h.T @ h, rtol=1e-4, atol=1e-3)

    def test_the_ridge_is_chosen_on_the_current_task_alone(self):
        method = learned("ranpac", projection=40, adapt=False)[0].method
        features, targets = torch.randn(60, 32), F.one_hot(torch.arange(60) % 2, 2).float()
        features[:, 0] += targets[:, 0]
        chosen = method._choose_ridge(features, targets, seed=5)
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(5))
        cut = int(0.2 * len(features))
        lifted = (features @ method.projection).relu().double()
        h, unseen = lifted[order[cut:]], lifted[order[:cut]]
        errors = {
            r: F.mse_loss(unseen @ torch.linalg.solve(h.T @ h + r * torch.eye(40), h.T @ targets[order[cut:]].double()),
                          targets[order[:cut]].double()) for r in (10.0**e for e in range(-1, 9))
        }  # fmt: skip
        assert RIDGES[chosen] == min(errors, key=errors.get)

    @pytest.mark.parametrize(
        ("sizes", "train", "expected"),
        [([2, 2, 1, 2], 50, [3, 7, 7, 16]), ([1, 28], 4, [3, 3]), ([1, 1], 2, [3, 3])],
    )
    def test_too_few_images_keep_the_ridge_of_the_task_before(self, monkeypatch, sizes, train, expected):
        """Held out: 20 of 2 classes, 10 of one; 22 of 28 classes, fewer than one each."""
        ridges = iter([3, 7, 16])
        monkeypatch.setattr(RanPAC, "_choose_ridge", lambda *_: next(ridges))
        learner, chosen = make_learner("ranpac", projection=40, adapt=False), []
        for task in Stream(make_dataset(sum(sizes), train), sizes):
            learner.learn(task)
            chosen.append(int(learner.method.chosen))
        assert chosen == expected

    def test_sums_do_not_depend_on_the_division_into_tasks(self):
        several, one = (learned("ranpac", tasks=n, projection=30, adapt=False)[0].method for n in (3, 1))
        torch.testing.assert_close(several.gram, one.gram)
        torch.testing.assert_close(several.products, one.products)

    def test_the_projection_comes_from_the_seed_and_is_not_saved(self, tmp_path):
        learner, _ = learned("ranpac", projection=30)
        learner.save(tmp_path)
        again = Learner.load(tmp_path, backbone=make_vit(), device="cpu", compile="off")
        assert "projection" not in learner.method.state_dict()
        assert torch.equal(again.method.projection, learner.method.projection)
        view = view_of(learner)
        assert torch.equal(again.method.logits(view), learner.method.logits(view))

    def test_a_ridge_below_the_rounding_of_the_sums_is_raised_above_it(self, monkeypatch):
        """With fewer images than random features, 1e-8 would divide by what rounding left of zeros."""
        monkeypatch.setattr(RanPAC, "_choose_ridge", lambda *_: RIDGES.index(1e-8))
        learner, seen = learned("ranpac", projection=300, adapt=False)
        h = torch.cat([features @ learner.method.projection for _, features in seen]).relu().double()
        y = F.one_hot(torch.cat([task.train.labels + 2 * n for n, (task, _) in enumerate(seen)]), 6).double()
        assert len(h) < 300
        ridge = 2**-23 * (h.T @ h).norm()
        exact = torch.linalg.solve(h.T @ h + ridge * torch.eye(300), h.T @ y).T
        assert (h @ (learner.method.weight.double() - exact).T).norm() < 0.05 * y.norm()


class TestEASE:
    def test_old_subspaces_stay(self):
        learner, stream, states = make_learner("ease"), make_stream(), []
        for task in stream:
            learner.learn(task)
            states.append([copy.deepcopy(a.state_dict()) for a in learner.method.adapters])
        assert [len(s) for s in states] == [1, 2, 3]
        assert same_tensors(states[0][0], states[2][0]) and same_tensors(states[1][1], states[2][1])

    def test_missing_prototypes_are_mixtures_of_new_ones(self):
        learner, stream = make_learner("ease"), iter(make_stream())
        learner.learn(next(stream))
        before = learner.method.prototypes.clone()
        task = next(stream)
        learner.learn(task)
        after, features = learner.method.prototypes, learner.features(task.train).unflatten(1, (2, -1))
        new = torch.stack([features[task.train.labels == c].mean(0) for c in (0, 1)])
        torch.testing.assert_close(after[2:], new, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after[:2, 0], before[:, 0])
        weights = torch.softmax(F.cosine_similarity(before[:, None, 0], new[None, :, 0], dim=-1), dim=-1)
        torch.testing.assert_close(after[:2, 1], weights @ new[:, 1], rtol=1e-4, atol=1e-4)

    def test_mixtures_are_made_of_all_classes_seen_in_a_subspace(self):
        learner, _ = learned("ease")
        known = learner.method.prototypes  # 6 classes, 3 subspaces; classes 2 to 5 were seen in subspace 1
        weights = torch.softmax(F.cosine_similarity(known[:2, None, 0], known[None, 2:, 0], dim=-1), dim=-1)
        torch.testing.assert_close(known[:2, 1], weights @ known[2:, 1], rtol=1e-4, atol=1e-4)

    def test_a_class_s_own_subspace_counts_fully(self):
        learner, _ = learned("ease", others=0.25)
        method: EASE = learner.method
        view = view_of(learner)
        features = method.features(view)[0].unflatten(1, (3, -1))
        for c in range(6):
            cosines = F.cosine_similarity(features, method.prototypes[c][None], dim=-1)
            weights = torch.tensor([1.0 if t == c // 2 else 0.125 for t in range(3)])  # 0.25, shared by two subspaces
            torch.testing.assert_close(method.logits(view)[:, c] * 0.1, cosines @ weights, rtol=1e-4, atol=1e-4)


class TestFeCAM:
    def test_the_nearest_class_by_its_own_shrunk_correlations(self):
        learner, seen = learned("fecam", variance_shrinkage=2.0, covariance_shrinkage=0.5)
        assert learner.images_seen == 0
        view, expected = view_of(learner), []
        points = F.normalize(view.query, dim=1).double().numpy()
        for task, features in seen:
            for c in (0, 1):
                own = features[task.train.labels == c].double().numpy()
                np.testing.assert_allclose(np.linalg.norm(own, axis=1), 1, rtol=1e-5)
                cov = np.cov(own.T)
                rest = (cov.sum() - np.trace(cov)) / (32 * 31)
                cov = cov + 2.0 * np.trace(cov) / 32 * np.eye(32) + 0.5 * rest * (1 - np.eye(32))
                away = points - own.mean(0)
                inverse = np.linalg.pinv(cov / np.sqrt(np.outer(np.diag(cov), np.diag(cov))))
                expected.append(-np.einsum("bd,de,be->b", away, inverse, away))
        found = learner.method.logits(view).double().numpy()
        np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=1e-3, atol=1e-4)

    def test_with_adapters_the_first_task_is_learned(self):
        learner, _ = learned("fecam", adapt=True)
        assert learner.method.adapters.up.any() and learner.images_seen > 0


class TestSSIAT:
    def test_one_set_of_adapters_learns_in_every_task(self):
        learner, states = make_learner("ssiat"), []
        for task in make_stream():
            learner.learn(task)
            states.append(copy.deepcopy(learner.method.adapters.state_dict()))
        assert not same_tensors(states[0], states[1]) and not same_tensors(states[1], states[2])

    def test_scores_are_cosines_times_a_factor_in_training_and_in_the_correction(self):
        learner, _ = learned("ssiat", sharpness=7.0)
        view = view_of(learner)
        cosines = F.cosine_similarity(learner.method.features(view)[0][:, None], learner.method.head.weight, dim=-1)
        torch.testing.assert_close(learner.method.logits(view), 7 * cosines, rtol=1e-4, atol=1e-4)
        assert learner.method.head.bias.grad is None

    def test_old_means_follow_and_covariances_stay(self):
        """With `moving.how=linear` covariances follow as well."""
        fast = QUICK.model_copy(update={"lr": 0.05})
        for how, moves in (("kernel", (True, False)), ("linear", (True, True)), ("none", (False, False))):
            learner, stream = make_learner("ssiat", training=fast, moving={"how": how}), iter(make_stream())
            learner.learn(next(stream))
            before = copy.deepcopy(learner.method.statistics)
            learner.learn(next(stream))
            after = learner.method.statistics
            moved = [not torch.equal(a[:2], b) for a, b in ((after.means, before.means), (after.spread, before.spread))]
            assert tuple(moved) == moves


class TestSDLoRA:
    def test_old_directions_stay_and_all_magnitudes_learn(self):
        learner, states = make_learner("sd-lora", rank=2), []
        layer, start = learner.vit.blocks[0].attn.qkv, make_vit().state_dict()["blocks.0.attn.qkv.weight"]
        assert torch.equal(layer.weight, start)
        for task in make_stream():
            learner.learn(task)
            states.append(copy.deepcopy(layer.state_dict()))
        for task in range(2):
            assert all(torch.equal(states[task][f"{n}.{task}"], states[2][f"{n}.{task}"]) for n in ("ups", "downs"))
        assert [len(s["magnitudes"]) for s in states] == [1, 2, 3]
        assert (states[2]["magnitudes"] != 0.8).all(), "those of old directions learn, too"

    def test_the_change_is_a_sum_of_directions_of_unit_size_and_of_what_is_being_learned(self):
        learner, _ = learned("sd-lora", rank=2)
        layer, width = learner.vit.blocks[1].attn.qkv, 32
        for up in layer.ups:
            up.data.normal_()
        expected = torch.zeros(2, width, width)
        for n, (up, down, magnitude) in enumerate(zip(layer.ups, layer.downs, layer.magnitudes, strict=True)):
            for part in (0, 1):
                size = 1.0 if n == 2 else up[part].norm() * down[part].norm()
                expected[part] += magnitude * up[part] @ down[part] / size
        queries, keys, values = (layer.weight - layer.original).chunk(3)
        torch.testing.assert_close(torch.stack([queries, values]), expected, rtol=1e-4, atol=1e-5)
        assert not keys.any()


class TestSLDC:
    def test_symmetric_cross_entropy(self):
        logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 1, 0])
        p, hot = logits.softmax(1), F.one_hot(labels, 4).float()
        reverse = -(p * hot.clamp(min=1e-4).log()).sum(1).mean()
        expected = 0.5 * F.cross_entropy(logits, labels) + 0.5 * reverse
        torch.testing.assert_close(symmetric_cross_entropy(logits, labels), expected)

    def test_the_backbone_changes_by_low_rank_matrices_alone(self, tmp_path):
        learner, start = make_learner("sldc", rank=2, **QUICK_SLDC), make_vit().state_dict()
        first = start["blocks.0.mlp.fc1.weight"]
        torch.testing.assert_close(linear_layers(learner.vit)[2].down.data, torch.linalg.svd(first).Vh[:2])
        for task in make_stream():
            learner.learn(task)
        for layer, name in zip(linear_layers(learner.vit)[:4], LAYERS, strict=True):
            change = layer.weight.detach() - start[f"blocks.0.{name}.weight"]
            assert torch.linalg.matrix_rank(change, atol=1e-5) <= 2
            assert bool(change.abs().max() > 0) == (name != "attn.proj"), "the projection stays, as published"
        learner.save(tmp_path)
        names = {n for n in learner.method.state_dict() if learner.method.saved(n)}
        assert not any(".original" in n or n == "vit.cls_token" for n in names)
        again = Learner.load(tmp_path, backbone=make_vit(), device="cpu", compile="off")
        view = view_of(learner)
        assert torch.equal(again.method.logits(view), learner.method.logits(view))

    def test_the_map_is_blended_with_the_identity(self):
        x = torch.randn(40, 8)
        a = torch.linalg.qr(torch.randn(8, 8))[0]
        drift = blended_map(x, x @ a)  # a rotation keeps lengths, so the map is found exactly
        weight = math.exp(-40 / 8)
        expected = (1 - weight) * a + weight * torch.eye(8)
        torch.testing.assert_close(drift.matrix.float(), expected, rtol=1e-3, atol=1e-3)

    def test_the_weakly_nonlinear_map_follows_where_a_linear_one_cannot(self):
        """Directions that bend: the sign of one dimension decides where another goes."""
        x = torch.randn(600, 6)
        moved = F.normalize(x + 0.8 * F.one_hot(torch.tensor(1), 6) * x[:, :1].abs(), dim=1) * x.norm(dim=1)[:, None]
        curved = fit_map(x, moved, 1500, seed=0)(x) - moved
        linear = blended_map(x, moved).points(x) - moved
        assert curved.norm() < 0.8 * linear.norm() < 0.8 * (x - moved).norm()
        doubled = fit_map(x, moved, 5, seed=0)
        torch.testing.assert_close(doubled(2 * x), 2 * doubled(x))

    def test_the_map_leaves_the_draws_of_other_threads_alone(self):
        """PyTorch has one random state for all threads."""
        fitting = threading.Thread(target=fit_map, args=(torch.ones(4, 2), torch.ones(4, 2), 1, 0))
        with seeded(3):
            fitting.start()
            fitting.join(timeout=0.5)
            drawn = torch.rand(4)
        fitting.join()
        with seeded(3):
            assert torch.equal(drawn, torch.rand(4))

    @pytest.mark.parametrize("weakly_nonlinear", [True, False])
    def test_moved_gaussians_are_those_of_moved_samples(self, weakly_nonlinear, monkeypatch):
        """A map that is known, and linear: both kinds of move then give A μ and A Σ Aᵀ, plus a little variance."""
        learner, seen = learned("sldc", tasks=1, weakly_nonlinear=weakly_nonlinear, **QUICK_SLDC)
        statistics = learner.method.statistics
        before = copy.deepcopy(statistics)
        a = torch.linalg.qr(torch.randn(32, 32))[0] * 1.5
        monkeypatch.setattr(sldc, "fit_map", lambda *given: lambda points: points @ a)
        drift = Drift(torch.zeros(32), torch.zeros(32), a - torch.eye(32))
        monkeypatch.setattr(sldc, "blended_map", lambda *given: drift)
        data = SimpleNamespace(features=seen[0][1], features_before=seen[0][1], seed=0)
        learner.method.move_statistics(statistics, data)
        added, noise = (1e-3, 0.1) if weakly_nonlinear else (1e-2, 1e-5)
        expected = a.T @ before.spread @ a
        torch.testing.assert_close(statistics.means, before.means @ a, rtol=noise, atol=noise)
        traces = [m.diagonal(dim1=1, dim2=2).sum(1) for m in (statistics.spread, expected)]
        torch.testing.assert_close(traces[0] - traces[1], torch.full((6,), 32 * added), rtol=0.2, atol=noise)

    def test_the_next_task_continues_with_the_classifier_from_before_the_correction(self):
        learner, stream = make_learner("sldc", **QUICK_SLDC), iter(make_stream())
        learner.learn(next(stream))
        learner.learn(next(stream))
        trained = learner.method.unaligned.clone()
        assert not torch.equal(learner.method.head.weight, trained[:, :-1])
        learner.method.start_task(TaskInfo(2, 4, 2))
        assert torch.equal(learner.method.head.weight[:4], trained[:, :-1])


class TestMovingMemory:
    @pytest.mark.parametrize("method", ["moving-prompts", "moving-weights"])
    def test_features_are_two_class_tokens_averaged_over_the_mirror_image(self, method):
        learner, _ = learned(method, frozen_beside=True)
        view = view_of(learner)
        plain, mirrored = (learner.method.encode(v, (-1, -2))[0] for v in (view, view.mirrored()))
        assert plain.shape == (5, 64)
        expected = [F.normalize(v.unflatten(1, (2, -1)), dim=-1).flatten(1) * 20 for v in (plain, mirrored)]
        moved, frozen = learner.method.features(view)[0].chunk(2, dim=1)
        torch.testing.assert_close(moved, (expected[0] + expected[1]) / 2)
        closed_form = make_learner("linear", class_tokens=2, scaled=True, mirror=True)
        torch.testing.assert_close(frozen, closed_form.method.features(view.through(closed_form.vit))[0])
        flipped = View(learner.vit, lambda: view.images.flip(-1), view.query)
        torch.testing.assert_close(learner.method.encode(flipped, (-1, -2))[0], mirrored)

    @pytest.mark.parametrize(("options", "rates"), [({}, [1, 0.5]), ({"fewest_classes": 20}, [0.1, 0.1])])
    def test_the_smaller_the_share_of_new_classes_the_slower_it_learns(self, options, rates):
        method = make_learner("moving-prompts", plasticity=1, prompt_lr_scale=1, **options).method
        scales = []
        for task in (TaskInfo(0, 0, 2), TaskInfo(1, 2, 2)):
            method.start_task(task)
            scales.append(method.parameter_groups()[-1]["scale"])
        assert scales == pytest.approx(rates)

    @pytest.mark.parametrize("method", ["moving-prompts", "moving-weights"])
    def test_where_nothing_moves_it_is_the_closed_form_on_all_images(self, method):
        """A rate of almost zero: any division into tasks then gives the same classifier."""
        several, one = (learned(method, training=SLOW, tasks=n, feature_distillation=0.0)[0].method for n in (3, 1))
        torch.testing.assert_close(several.head.weight, one.head.weight, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(several.statistics.means, one.statistics.means, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("method", ["moving-prompts", "moving-weights"])
    def test_old_means_follow_the_features(self, method):
        """Of old classes, retaken from their images: moved means are closer than means that stay."""
        distances = {}
        for how in ("linear", "none"):
            fast = QUICK.model_copy(update={"lr": 0.02, "epochs": 4})
            learner, stream = make_learner(method, training=fast, moving={"how": how}), make_stream()
            tasks = []
            for task in stream:
                learner.learn(task)
                tasks.append(task)
            for task in tasks[:2]:
                task.train._guards = ()  # a look that no method gets
            features = [learner.features(task.train) for task in tasks[:2]]
            true = torch.cat(
                [
                    torch.stack([f[t.train.labels == c].mean(0) for c in (0, 1)])
                    for t, f in zip(tasks, features, strict=False)
                ]
            )
            distances[how] = float((learner.method.statistics.means[:4, 0] - true).norm())
        assert distances["linear"] < 0.8 * distances["none"]

    @pytest.mark.parametrize("method", ["moving-prompts", "moving-weights"])
    def test_training_beyond_what_the_memory_bears_is_undone_and_named(self, method):
        """With a limit that nothing meets, with almost none, and with a quarter of the doubt that was measured."""
        fast = QUICK.model_copy(update={"lr": 0.02, "epochs": 4})

        def run(most_doubt: float) -> Method:
            return learned(method, training=fast, most_doubt=most_doubt, frozen_beside=False, plasticity=0)[0].method

        def doubt(method: Method) -> float:
            """Of old means, relative to that of few images, as the classifier weighs it."""
            statistics = method.statistics
            covariance = statistics.shared_covariance().double()
            precision = np.linalg.inv(shrunk(covariance.numpy(), method.options.rebalancing.shrinkage))
            noise = covariance / statistics.images_per_class
            return float(
                (precision * statistics.doubt.numpy()).sum() / len(statistics.means) / (precision * noise.numpy()).sum()
            )

        free, none = run(1e9), run(1e-9)
        limited = run(doubt(free) / 4)
        assert free.kept.tolist() == [1, 1, 1] and not free.notes() and doubt(free) > 1
        assert none.kept.tolist() == [1, 0, 0] and none.notes() == [
            "tasks of which only a part of the training was kept: 2 (0%), 3 (0%)"
        ]
        assert 0 < limited.kept.min() < 1 and "2 (" in limited.notes()[0] and doubt(limited) < doubt(free)

    @pytest.mark.parametrize("method", ["moving-prompts", "moving-weights"])
    @pytest.mark.parametrize(
        ("classes", "tasks", "images"), [(6, 6, 8), (12, 4, 2), (100, 50, 3)],
        ids=["one class per task", "two images per class", "50 tasks"],
    )  # fmt: skip
    def test_it_never_falls_below_the_closed_form_on_frozen_features(self, method, classes, tasks, images):
        data = make_dataset(classes, images, 4, noise=60)
        training = QUICK.model_copy(update={"epochs": 1})
        found, last = {}, tasks - 1
        same = {"frozen_beside": False, "rebalancing": CLOSED_FORM["rebalancing"]} if classes == tasks else {}
        for name, options in (method, same), ("linear", {**READOUT, **CLOSED_FORM}):
            learner = make_learner(name, training=training, **options)
            accuracies = []
            for task in (stream := Stream(data, tasks, 1)):
                learner.learn(task)
                if task.number in (last // 2, last):
                    accuracies.append(np.mean(learner.accuracies(stream.seen(task.number))))
            found[name] = np.array(accuracies)
        noise = 100 * (0.25 / (4 * classes)) ** 0.5
        assert (found[method] > found["linear"] - noise).all() and found["linear"].min() > 3 * 100 / classes
        if classes == tasks:
            assert not learner.images_seen and np.allclose(found[method], found["linear"], atol=1e-4)

    @pytest.mark.parametrize("method", ["moving-prompts", "moving-weights"])
    def test_features_that_recognize_images_best_before_training_on_them_are_used(self, method, monkeypatch):
        """If these are the frozen ones, the classifier is the closed form, as if nothing had been trained."""
        fast = QUICK.model_copy(update={"lr": 0.05, "epochs": 4})
        both, _ = learned(method, training=fast, frozen_beside=True)
        assert 0 < both.method.recognized.max() <= 32 and "before they were trained on" in both.method.notes()[-1]
        monkeypatch.setattr(MovingMemory, "recognizes", lambda *given: torch.tensor([1, 2, 3]))
        moved, _ = learned(method, training=fast, frozen_beside=True)
        closed_form, _ = learned("linear", **READOUT, **CLOSED_FORM)
        half = moved.method.feature_width // 2
        torch.testing.assert_close(
            moved.method.head.weight[:, half:], closed_form.method.head.weight, rtol=1e-3, atol=1e-4
        )
        assert not moved.method.head.weight[:, :half].any()

    def test_images_are_recognized_as_a_classifier_without_them_would(self):
        """By hand, for the frozen features: each image is left out of the mean of its class."""
        learner, seen = learned("moving-prompts", tasks=3)
        method, statistics = learner.method, copy.deepcopy(learner.method.statistics)
        task, features = seen[-1]
        statistics.doubt.zero_()
        statistics.means, statistics.shares = statistics.means[:-2], statistics.shares[:-2]
        labels, half = task.train.labels + 4, method.feature_width // 2
        precision = np.linalg.inv(shrunk(statistics.class_covariance()[half:, half:].double().numpy(), 0.1))
        right = 0
        for n, (feature, label) in enumerate(zip(features, labels, strict=True)):
            others = torch.arange(len(labels)) != n
            new = [features[others & (labels == c)].mean(0) for c in (4, 5)]
            new = [m if c == label else features[labels == c].mean(0) for c, m in zip((4, 5), new, strict=True)]
            means = torch.cat([statistics.class_means(), torch.stack(new)])[:, half:].double().numpy()
            away = feature[half:].double().numpy() - means
            right += int(np.einsum("cd,de,ce->c", away, precision, away).argmin() == label)
        assert method.recognizes(statistics, features.double(), labels)[2] == right

    def test_the_training_classifier_is_thrown_away(self):
        learner, _ = learned("moving-prompts")
        assert learner.method.task_head is None
        assert not any(name.startswith("task_head") for name in learner.method.state_dict())

    def test_a_reduced_model_keeps_only_low_rank_changes(self, tmp_path):
        learner, _ = learned("moving-weights", rank=3, rank_every=1)
        learner.save(tmp_path / "reduced")
        names = {n for n in learner.method.state_dict() if learner.method.saved(n)}
        assert not any(n.endswith(("qkv.weight", "fc1.weight", "pos_embed", "cls_token")) for n in names)
        start = make_vit().state_dict()
        for number, layer in enumerate(linear_layers(learner.vit)):
            change = layer.weight.detach() - linear_layers(learner.method.frozen)[number].weight
            assert torch.linalg.matrix_rank(change, atol=1e-5) <= 3
        assert same_tensors(dict(learner.method.frozen.state_dict()), dict(start))
        again = Learner.load(tmp_path / "reduced", backbone=make_vit(), device="cpu", compile="off")
        assert same_tensors(tensors_of(again), tensors_of(learner))

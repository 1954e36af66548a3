"""Published settings and behaviour, point by point: recipes, schedules, statistics, views, rivals."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import QUICK, make_learner, make_stream, make_vit, same_tensors, tensors_of
from PIL import Image

from vqprompt import Learner
from vqprompt.core.data.views import change_colors, random_boxes, random_colors, render, window_boxes
from vqprompt.core.statistics.gaussians import KINDS
from vqprompt.research.datasets import open_dataset
from vqprompt.research.learner.checkpoint import checksum
from vqprompt.research.learner.predictor import Predictor
from vqprompt.research.methods import METHODS
from vqprompt.research.methods.l2p import pull_to_batch
from vqprompt.research.methods.recipes import PAPER_DATA, describe_recipe, find_recipe, in_use, recipe_settings
from vqprompt.research.paper.grids import GRIDS, plan
from vqprompt.research.paper.table_rows import make_rows, read_runs
from vqprompt.research.results.config import completed, resolve
from vqprompt.research.results.result import RunResult
from vqprompt.research.training import rebalancing as rebalancing_module
from vqprompt.research.training.optim import clip_gradients, make_optimizer, rate_at
from vqprompt.research.training.rebalancing import Rebalancing, rebalance, released_rate
from vqprompt.research.training.settings import Training

R10 = {"data": "imagenet-r", "tasks": 10, "backbone": "vit-b16-in1k"}
CUB = {"data": "cub200", "backbone": "vit-b16-in21k"}


def published(method: str, **given):
    return resolve({"method": method, **given}, recipe=True)


class TestRecipes:
    def test_every_method_of_a_table_has_one_with_a_source_for_each_setting(self):
        for grid in GRIDS.values():
            for planned in plan(grid, seeds=[1]) if grid.table else []:
                c = planned.config
                parts = find_recipe(c.method, c.data, c.backbone, c.tasks)
                assert parts and all(part.source for part in parts), planned.name
                assert "epochs" in recipe_settings(parts) and "schedule" in recipe_settings(parts), planned.name

    @pytest.mark.parametrize(
        ("method", "given", "wanted"),
        [
            ("hide-prompt", R10, {"epochs": 150, "lr": 0.00028125, "prompt_lr_scale": 10, "contrastive_weight": 0.5}),
            ("hide-prompt", CUB, {"epochs": 50, "lr": 0.0028125, "schedule": "steps", "clip": 1, "crop_area": 0.05}),
            ("evoprompt", R10, {"epochs": 50, "schedule": "constant", "clip": 1, "query": "raw", "batch_size": 64}),
            ("coda-p", R10, {"epochs": 50, "batch_size": 128, "schedule": "coda", "normalize": "none"}),
            ("l2p++", R10, {"epochs": 50, "batch_size": 128, "key_loss": "batch"}),
            ("dualprompt", R10, {"epochs": 50, "batch_size": 128, "unlearned_experts": True}),
            ("coda-p", {"data": "cifar100"}, {"epochs": 20, "batch_size": 128}),
            ("slca", CUB, {"epochs": 50, "milestones": [0.8], "weight_decay": 5e-4, "normalize": "imagenet"}),
            ("vq-prompt", R10, {"hold": 40, "tau": 1, "normalize": "none", "statistics_views": "augmented"}),
            ("vq-prompt", {**R10, "tasks": 5}, {"hold": 80, "nominal_steps": 80, "batch_size": 64}),
            ("vq-prompt", {**R10, "tasks": 20}, {"hold": 20, "nominal_steps": 20}),
            ("vq-prompt", CUB, {"schedule": "coda", "tau": 5, "batch_size": 128}),
            ("vq-prompt", {"data": "vtab"}, {"batch_size": 8}),
            ("simplecil", R10, {"normalize": "none", "crop_area": 0.05}),
            ("ease", R10, {"lr": 0.05, "batch_size": 16, "weight_decay": 0.005, "normalize": "none", "others": 0.1}),
            ("aper", R10, {"lr": 0.05, "batch_size": 16, "weight_decay": 0.005, "epochs": 10, "crop_area": 0.05}),
            ("ranpac", CUB, {"lr": 0.01, "batch_size": 48, "weight_decay": 5e-4, "epochs": 20, "normalize": "none"}),
            ("fecam", R10, {"variance_shrinkage": 10.0, "covariance_shrinkage": 10.0}),
            ("ssiat", CUB, {"lr": 0.01, "batch_size": 48, "sharpness": 20.0}),
            ("sd-lora", R10, {"lr": 0.01, "schedule": "constant", "optimizer": "sgd", "rank": 10}),
            ("sldc", CUB, {"epochs": 15, "batch_size": 16, "min_lr": 1e-4 / 3, "rank": 4, "augment": "window"}),
        ],
    )
    def test_published_settings(self, method, given, wanted):
        config = published(method, **given)
        used = {**config.options, **config.model_dump()}
        for key, value in wanted.items():
            assert used[key] == (pytest.approx(value) if isinstance(value, float) else value), key

    def test_rebalancing_of_vq_prompt_is_as_gentle_as_published(self):
        for given in (R10, CUB, {"data": "cifar100"}, {"data": "imagenet-a"}):
            assert published("vq-prompt", **given).options["rebalancing"]["lr"] == 1e-5
        assert resolve({"data": "imagenet-r"}).options["rebalancing"]["lr"] == 1e-3, "ours, without a recipe"

    def test_bench_uses_them_and_what_is_given_wins(self):
        (planned,) = plan(GRIDS["imagenet-r-10"], ["hide-prompt"], [1])
        assert planned.config.epochs == 150
        (planned,) = plan(GRIDS["imagenet-r-10"], ["hide-prompt"], [1], {"epochs": 3}, {"hide-prompt": {"lr": 0.5}})
        assert (planned.config.epochs, planned.config.lr, planned.config.clip) == (3, 0.5, 1.0)

    def test_a_temperature_belongs_to_the_backbone(self):
        assert published("vq-prompt", data="cub200", backbone="vit-s14").options["tau"] == 1
        assert published("vq-prompt", data="imagenet-r", backbone="vit-b16-in21k").options["tau"] == 5
        assert resolve({"data": "cub200"}).options["tau"] == 1

    def test_an_unknown_backbone_is_normalized_as_it_wants(self):
        assert published("vq-prompt", data="cub200", backbone="vit-s14").normalize == "backbone"
        assert published("vq-prompt", **CUB).normalize == "none"

    def test_the_correction_of_sldc_is_the_published_one(self):
        settings = published("sldc", **CUB).options["rebalancing"]
        wanted = {"lr": 5e-4, "min_lr": 5e-5, "symmetric": True, "epochs": 6, "samples": 1024, "covariance": "full"}
        assert wanted.items() <= settings.items()

    def test_seeds_are_the_published_ones(self):
        assert GRIDS["self-supervised"].seeds == (0, 1, 2), "the only table of three runs"
        assert GRIDS["cub200"].seeds == (0, 12, 24, 36, 48)
        assert GRIDS["imagenet-r-10"].seeds == GRIDS["cifar100"].seeds == (0, 1, 2, 3, 4)

    @pytest.mark.parametrize("data", PAPER_DATA)
    def test_they_are_described_with_their_sources(self, data):
        for method in ("vq-prompt", "hide-prompt", "evoprompt", "slca", "lwf", "joint"):
            lines = describe_recipe(method, data)
            assert len(lines) > 3 and all("(" in line or "ours" in line or "statistics" in line for line in lines[1:])
        assert "epochs = 150" in "\n".join(describe_recipe("hide-prompt", "imagenet-r"))
        assert describe_recipe("linear", data)[0].startswith(f"linear on {data}: no recipe")

    def test_the_command_prints_them(self, command):
        status, out, err = command("methods", "hide-prompt", "--data", "imagenet-r")
        assert status == 0 and "epochs = 150" in out and "train_imr_vit.sh" in out, err
        status, out, _ = command("methods", "vq-prompt", "--data", "cub200", "--backbone", "vit-s14")
        assert status == 0 and "tau = 1 " in out and "normalized as the backbone's card says" in out
        status, _, err = command("methods", "vq-prompt", "--data", "nowhere")
        assert status == 2 and "imagenet-r" in err

    def test_released_is_the_published_code(self):
        config = resolve({**R10, "tasks": 5}, "released")
        assert (config.options["vq_weight"], config.options["commitment_weight"]) == (0.1, 0.4)
        assert (config.schedule, config.hold, config.normalize, config.stored) == ("released", 80, "none", 2.0)
        assert (config.statistics_views, config.batch_size, config.options["tau"]) == ("augmented", 64, 1.0)
        slca, evo = (resolve({"method": name, **CUB}, "released") for name in ("slca", "evoprompt"))
        assert (slca.epochs, slca.milestones, slca.augment) == (50, [0.8], "window")
        assert (evo.augment, evo.schedule, evo.clip) == ("crop-color", "constant", 1.0)
        own = resolve({"data": "/my/photos"}, "released")
        assert (own.schedule, own.hold, own.normalize) == ("released", 40, "none")
        birds = resolve({"data": "cub200"}, "released-cub")
        assert (birds.schedule, birds.options["tau"], birds.options["rebalancing"]["ratio"]) == ("coda", 5.0, 2)
        assert birds.options["rebalancing"]["schedule"] == "released"

    def test_deviations_are_marked_and_idle_settings_are_not(self, tmp_path):
        grid = GRIDS["cub200"]
        configs = [planned.config for planned in plan(grid, ["vq-prompt", "vq-prompt-s"], [0], {"schedule": "cosine"})]
        entries = [{**RunResult(done=True, faa=1.0, caa=1.0).model_dump(), "config": c.model_dump()} for c in configs]
        (tmp_path / "runs.json").write_text(json.dumps(entries))
        rows = [row for row in make_rows(grid, read_runs(tmp_path / "runs.json")) if row.runs]
        assert [row.changed for row in rows] == [{"schedule": ("cosine", "coda")}] * 2
        flat = {"schedule": "constant", "hold": "3", "min_lr": "1", "options.statistics": "false", "lr": "2",
                "options.rebalancing.lr": "1", "statistics_views": "clean"}  # fmt: skip
        assert in_use(flat) == {"schedule": "constant", "options.statistics": "false", "lr": "2"}
        moved = {**flat, "options.moving.how": "linear", "options.moving.ridge": "1"}
        assert in_use(moved) == {**in_use(flat), "options.moving.how": "none"}, "without statistics nothing moves"

    def test_older_runs_are_compared_as_they_were(self):
        """A run from before a setting existed had what was fixed then."""
        config = published("slca", **CUB).model_dump(mode="json")
        for key in ("schedule", "clip", "normalize", "stored", "milestones"):
            del config[key]
        del config["options"]["rebalancing"]["steps_for"]
        then = completed(config)
        assert (then["schedule"], then["clip"], then["normalize"]) == ("cosine", 0.0, "backbone")
        assert then["options"]["rebalancing"]["steps_for"] == "old"


# ------------------------------------------------------------------------------------------- schedules, clipping


def rates(settings: Training, per_epoch: int, scale: float = 1.0) -> list[float]:
    steps = per_epoch * settings.epochs
    return [rate_at(settings, step // per_epoch, step, steps)(scale) for step in range(steps)]


class TestSchedules:
    def test_ours_is_a_cosine_per_step(self):
        curve = rates(Training(epochs=2, lr=1.0, min_lr=0.1), 5, scale=5.0)
        assert curve[0] == 5.0 and curve[-1] == pytest.approx(0.5) and curve == sorted(curve, reverse=True)

    def test_constant(self):
        assert set(rates(Training(epochs=3, lr=0.5, schedule="constant"), 4)) == {0.5}

    def test_steps_drop_at_shares_of_the_epochs(self):
        """SLCA: 50 epochs, milestone 40."""
        settings = Training(epochs=50, lr=0.01, schedule="steps", milestones=[0.8])
        curve = rates(settings, 1)
        assert curve[39] == 0.01 and curve[40] == pytest.approx(0.001) and curve[49] == curve[40]

    def test_coda_s_is_a_quarter_of_a_cosine_per_epoch(self):
        curve = rates(Training(epochs=20, lr=1.0, schedule="coda"), 3)
        assert curve[:3] == [1.0] * 3 and curve[3] == pytest.approx(math.cos(99 * math.pi / (200 * 19)))
        assert curve[-1] == pytest.approx(math.cos(99 * math.pi / 200))

    def test_sldc_s_is_the_cosine_of_torch_per_epoch_and_hide_prompt_s_the_same_one_epoch_late(self):
        groups = [{"params": [torch.zeros(1)], "lr": 1e-3 * scale} for scale in (0.1, 1.0)]
        optimizer, epochs = torch.optim.AdamW(groups), 15
        annealing, expected = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=1e-4 / 3), []
        for _ in range(epochs):
            expected.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            annealing.step()
        settings = published("sldc", **CUB)
        late = settings.model_copy(update={"schedule": "epoch-cosine"})
        for scale, curve in zip((0.1, 1.0), zip(*expected, strict=True), strict=True):
            assert rates(settings, 1, scale) == pytest.approx(list(curve), rel=1e-9)
            assert rates(late, 1, scale) == pytest.approx([curve[0], *curve[:-1]], rel=1e-9)

    def test_vq_prompt_s_starts_full_freezes_and_decays(self):
        """ImageNet-R, 10 tasks: 40, 0, 20 and iter_step 40; 37 real steps per epoch."""
        settings = Training(epochs=20, lr=0.0025, schedule="released", hold=40, nominal_steps=40)
        for scale in (1.0, 5.0):
            curve = rates(settings, 37, scale)
            peak = 0.0025 * scale
            assert curve[0] == peak and curve[1:41] == [1e-6] * 40 and curve[41] == pytest.approx(peak)
            i = 200 - 41
            decayed = 1e-6 + 0.5 * (peak - 1e-6) * (1 + math.cos(math.pi * i / (800 - 40)))
            assert curve[200] == pytest.approx(decayed)
        assert rates(settings, 41)[-1] == 1e-6, "past its end"

    def test_resumed_in_the_middle_it_goes_on_the_same(self, tmp_path):
        settings = QUICK.model_copy(
            update={"schedule": "coda", "epochs": 3, "clip": 0.5, "normalize": "none", "statistics_views": "augmented",
                    "augment": "crop-color"}
        )  # fmt: skip
        whole, half = make_learner(training=settings), make_learner(training=settings)
        stream = make_stream()
        for task in stream:
            whole.learn(task)
        tasks = iter(make_stream())
        first = next(tasks)
        next(half.epochs(first))
        half.save(tmp_path / "half")
        again = Learner.load(tmp_path / "half", device="cpu", compile="off", backbone=make_vit())
        for task in make_stream():
            again.learn(task)
        assert same_tensors(tensors_of(whole), tensors_of(again))


class TestClipping:
    def test_groups_are_clipped_together_unless_they_say_otherwise(self):
        a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
        optimizer = make_optimizer([{"params": [a]}, {"params": [b]}, {"params": [c], "clip": "c"}], "sgd", 0.1, 0.0)
        a.grad, b.grad, c.grad = torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([0.5])
        clip_gradients(optimizer, 1.0)
        assert torch.cat([a.grad, b.grad, c.grad]).tolist() == pytest.approx([0.6, 0.8, 0.5], rel=1e-4)

    def test_the_loop_clips(self, monkeypatch):
        norms = []
        step = torch.optim.AdamW.step
        monkeypatch.setattr(
            torch.optim.AdamW, "step",
            lambda self, *a: (norms.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])
                                           .norm().item()), step(self, *a))[1],
        )  # fmt: skip
        make_learner("linear", training=QUICK.model_copy(update={"clip": 1e-3})).learn(next(iter(make_stream())))
        assert max(norms) == pytest.approx(1e-3, rel=1e-3)

    def test_hide_prompt_s_identity_classifier_is_clipped_for_itself(self):
        learner = make_learner("hide-prompt")
        learner.learn(next(iter(make_stream())))
        assert [group.get("clip") for group in learner.method.parameter_groups()] == [None, None, "identity"]


# ------------------------------------------------------------------------------------------- images


class TestNormalization:
    def test_pixels_reach_the_network_as_they_are(self):
        learner = make_learner(training=QUICK.model_copy(update={"normalize": "none"}))
        plain = make_learner()
        assert learner.vit.config.mean == (0.0, 0.0, 0.0) and learner.vit.config.std == (1.0, 1.0, 1.0)
        assert learner.built.fingerprint == plain.built.fingerprint, "the weights are the same"
        pixels = torch.full((1, 3, 28, 28), 51, dtype=torch.uint8)
        shown = render(pixels, torch.tensor([[0.0, 0.0, 1.0, 1.0]]), None, learner.vit.config)
        assert torch.allclose(shown, torch.tensor(0.2))
        images = make_stream().tasks[0].test
        assert learner.known_queries.key(images, False) != plain.known_queries.key(images, False)
        assert not torch.allclose(learner.queries(images), plain.queries(images))

    def test_it_is_remembered(self, tmp_path):
        learner = make_learner(training=QUICK.model_copy(update={"normalize": "none", "stored": 2.0}))
        learner.learn(next(iter(make_stream())))
        learner.save(tmp_path)
        picture = np.full((40, 40, 3), 90, dtype=np.uint8)
        expected = learner.predict_proba([picture])
        loaded = Learner.load(tmp_path, device="cpu", compile="off", backbone=make_vit())
        predictor = Predictor.load(tmp_path, device="cpu", compile="off", backbone=make_vit())
        assert loaded.vit.config.mean == (0.0, 0.0, 0.0)
        for other in (loaded, predictor, learner.predictor()):
            assert torch.allclose(other.predict_proba([picture]), expected, atol=1e-6)


class TestViews:
    def test_statistics_of_augmented_views(self):
        """Published: one augmented view of each image; ours: the image itself."""
        learners = [
            make_learner(training=QUICK.model_copy(update={"augment": "crop", "statistics_views": views}))
            for views in ("clean", "augmented", "augmented")
        ]
        for learner in learners:
            learner.learn(next(iter(make_stream())))
        clean, augmented, again = (learner.method.statistics.means for learner in learners)
        assert not torch.allclose(clean, augmented) and torch.equal(augmented, again), "drawn from the seed"

    def test_small_crops_cover_what_is_asked(self):
        aspect = torch.ones(2000)
        for area in (0.05, 0.5):
            boxes = random_boxes(aspect, torch.Generator().manual_seed(0), (area, 1.0))
            covered = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
            assert area * 0.999 <= covered.min() < area * 1.2

    def test_windows_are_of_one_size_and_inside(self):
        boxes = window_boxes(500, torch.Generator().manual_seed(0))
        assert torch.allclose(boxes[:, 2:] - boxes[:, :2], torch.tensor(224 / 300))
        assert boxes.min() >= 0 and boxes.max() <= 1 and boxes[:, 0].std() > 0.05

    def test_small_crops_from_a_larger_store_are_sharper(self):
        draw = np.random.default_rng(0)
        original = torch.from_numpy(draw.integers(0, 256, (1, 3, 112, 112), dtype=np.uint8))
        box = torch.tensor([[0.3, 0.3, 0.6, 0.6]])
        config = make_vit().config
        wanted = render(original, box, None, config)

        def error(side: int) -> float:
            kept = torch.nn.functional.interpolate(original.float(), (side, side), mode="bicubic", antialias=True)
            return (render(kept.clamp(0, 255).to(torch.uint8), box, None, config) - wanted).abs().mean().item()

        assert error(56) < 0.85 * error(32)

    def test_stored_decides_the_side_of_the_store(self, tmp_path):
        draw = np.random.default_rng(0)
        for name in ("cats", "dogs"):
            for n in range(5):
                path = tmp_path / "pets" / name / f"{n}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw.integers(0, 256, (70, 80, 3), dtype=np.uint8)).save(path)
        assert open_dataset(str(tmp_path / "pets"), 28).store.pixels.shape[-1] == 32
        assert open_dataset(str(tmp_path / "pets"), 28, stored=2.0).store.pixels.shape[-1] == 56


class TestColors:
    def test_half_are_changed_and_a_fifth_is_grey(self):
        colors = random_colors(20_000, torch.Generator().manual_seed(0))
        changed, grey = (colors[:, 0] != 1).float().mean(), colors[:, 4].mean()
        assert changed == pytest.approx(0.5, abs=0.02) and grey == pytest.approx(0.2, abs=0.02)
        jittered = colors[colors[:, 0] != 1]
        assert jittered[:, :3].min() >= 0.6 and jittered[:, :3].max() <= 1.4 and jittered[:, 3].abs().max() <= 0.1

    def test_each_change_does_what_pillow_and_colorsys_do(self):
        import colorsys

        generator = torch.Generator().manual_seed(1)
        images = torch.rand(4, 3, 5, 5, generator=generator)
        same = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]]).repeat(4, 1)
        assert torch.allclose(change_colors(images, same), images, atol=1e-6)
        brighter = same.clone()
        brighter[:, 0] = 1.3
        assert torch.allclose(change_colors(images, brighter), (images * 1.3).clamp(0, 1), atol=1e-6)
        turned = same.clone()
        turned[:, 3] = 0.07
        wanted = images.clone()
        for n in range(4):
            for y in range(5):
                for x in range(5):
                    h, s, v = colorsys.rgb_to_hsv(*images[n, :, y, x].tolist())
                    wanted[n, :, y, x] = torch.tensor(colorsys.hsv_to_rgb((h + 0.07) % 1, s, v))
        assert torch.allclose(change_colors(images, turned), wanted, atol=1e-5)
        grey = same.clone()
        grey[:, 4] = 1
        changed = change_colors(images, grey)
        assert torch.equal(changed[:, 0], changed[:, 1]) and torch.equal(changed[:, 1], changed[:, 2])

    def test_training_views_have_them_and_known_queries_do_not_hide_them(self):
        settings = QUICK.model_copy(update={"augment": "crop-color"})
        colored, plain = (
            make_learner(training=settings),
            make_learner(training=QUICK.model_copy(update={"augment": "crop"})),
        )
        images = make_stream().tasks[0].train
        assert colored.known_queries.for_training(images, settings, 0) is None
        for learner in (colored, plain):
            learner.learn(next(iter(make_stream())))
        assert not same_tensors(tensors_of(colored), tensors_of(plain))


# ------------------------------------------------------------------------------------------- statistics


class TestStatistics:
    def test_hide_prompt_s_centroids_count_equally_with_variances_over_n(self):
        """Features 0, 2, 10, 12 with two centroids: variance 1 each."""
        options = METHODS["hide-prompt"].Options().rebalancing
        assert (options.variance, options.centroid_weights) == ("population", "equal")
        statistics = KINDS["diagonal"](1, 2, options.variance, options.centroid_weights)
        statistics.add(torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.zeros(4, dtype=torch.long))
        assert statistics.spread.flatten().tolist() == pytest.approx([1.0, 1.0], abs=2e-4)

    def test_equal_centroids_and_single_images(self):
        """Two centroids that hold 6 and 2 images count the same; one with a single image is not drawn from."""
        features = torch.tensor([[0.0], [0.1], [0.2], [0.3], [0.4], [0.5], [50.0], [50.1], [900.0]])
        statistics = KINDS["diagonal"](1, 3, "population", "equal")
        statistics.add(features, torch.zeros(9, dtype=torch.long))
        assert sorted(statistics.shares[0].tolist()) == [0.0, 0.5, 0.5]
        drawn, _ = statistics.sample(2000, torch.Generator().manual_seed(0))
        assert (drawn > 500).sum() == 0 and (drawn > 20).float().mean() == pytest.approx(0.5, abs=0.05)
        alone = KINDS["diagonal"](1, 3, "population", "equal")
        alone.add(torch.tensor([[1.0], [2.0]]), torch.zeros(2, dtype=torch.long))
        assert alone.shares.sum() == 1, "a class of single images is not lost"

    def test_slca_takes_a_step_for_each_class_seen(self, monkeypatch):
        """Two tasks of 20 classes: 40 steps per epoch, where VQ-Prompt takes 20."""
        steps = []
        monkeypatch.setattr(rebalancing_module, "GraphedStep", lambda step, device: steps.append)
        for settings in (METHODS["slca"].Options().rebalancing, Rebalancing()):
            statistics = KINDS["diagonal"](4)
            statistics.add(torch.randn(80, 4), torch.arange(40).repeat_interleave(2))
            steps.clear()
            head = torch.nn.Linear(4, 40)
            rebalance(head, statistics, 20, 2, settings.model_copy(update={"covariance": "diagonal"}), 0, [20, 20])
            assert len(steps) == (40 if settings.steps_for == "seen" else 20) * settings.epochs
        assert METHODS["slca"].Options().rebalancing.steps_for == "seen"

    def test_vq_prompt_s_rates_per_step(self):
        curve = [released_rate(1e-5, step, 200) for step in range(200)]
        assert curve[0] == pytest.approx(1e-4) and curve[1] == pytest.approx(1e-5) and curve[-1] < 1.01e-6


# ------------------------------------------------------------------------------------------- rivals


class TestRivals:
    def test_evoprompt_s_query_comes_before_the_final_norm(self):
        learner, normed = make_learner("evoprompt"), make_learner("evoprompt", query="normed")
        images = make_stream().tasks[0].test
        raw = learner.queries(images)
        assert torch.allclose(learner.vit.norm(raw), normed.queries(images), atol=1e-5)
        assert not torch.allclose(raw, normed.queries(images), atol=0.1)
        assert learner.method.frozen_copy().vit.raw_queries and make_learner().vit.raw_queries is False

    def test_evoprompt_s_prototypes_stay_features(self):
        learner, normed = make_learner("evoprompt"), make_learner("evoprompt", query="normed")
        for one in (learner, normed):
            one.learn(next(iter(make_stream())))
        assert torch.allclose(learner.method.prototypes, normed.method.prototypes, atol=1e-4)

    def test_an_older_evoprompt_predicts_as_it_did(self, tmp_path):
        learner = make_learner("evoprompt", query="normed")
        learner.learn(next(iter(make_stream())))
        learner.save(tmp_path)
        file = tmp_path / "checkpoint.json"
        info = json.loads(file.read_text())
        del info["options"]["query"]  # as it was saved before there was a choice
        file.write_text(json.dumps(info | {"checksum": checksum(info)}))
        older = Learner.load(tmp_path, device="cpu", compile="off", backbone=make_vit())
        assert older.method.options.query == "normed" and not older.vit.raw_queries

    def test_l2p_s_keys_can_be_pulled_to_the_whole_batch(self):
        """CODA-Prompt's code: cos_sim[:, k_idx], all queries with the keys that any of them chose."""
        generator = torch.Generator().manual_seed(0)
        cosines = torch.rand(6, 2, 5, generator=generator)
        choice = cosines.topk(2, dim=-1).indices
        published = sum((1 - cosines[:, m][:, choice[:, m]]).sum() for m in range(2)) / 36
        assert pull_to_batch(cosines, choice).item() == pytest.approx(published.item(), rel=1e-5)
        assert METHODS["l2p++"].Options().key_loss == "own"
        learners = [make_learner("l2p++", key_loss=how, pool=6, top=2) for how in ("own", "batch")]
        for learner in learners:
            learner.learn(next(iter(make_stream())))
        assert not torch.equal(learners[0].method.pool.keys, learners[1].method.pool.keys)

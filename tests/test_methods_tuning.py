"""What defines each method that tunes the whole network: FT, FT++, Joint, LwF, BiC, SLCA."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_learner, make_stream, same_tensors

from vqprompt import Learner, Stream, Training
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import UserError
from vqprompt.core.statistics.gaussians import KINDS, ClassStatistics
from vqprompt.research.methods import find_method
from vqprompt.research.methods.bic import Exemplars, fit_correction, herd, split
from vqprompt.research.methods.lwf import distillation
from vqprompt.research.methods.task import TaskData, TaskInfo
from vqprompt.research.training.optim import make_optimizer
from vqprompt.research.training.rebalancing import Rebalancing, normalized_cross_entropy, rebalance
from vqprompt.research.training.view import View

CONFIG = ViTConfig(width=32, depth=3, heads=2, patch=14, image_size=28)
CLASSES, TASKS, PER_CLASS, TEST = 6, 3, 10, 3
TUNING = ["ft", "ft++", "lwf", "bic", "slca", "joint"]
SMALL = {"bic": {"exemplars": 20}}


@torch.no_grad()
def before(method, view):
    """Scores of the network from before the task."""
    return method.former.logits(view.through(method.former.vit))


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return ViT(CONFIG)


@pytest.fixture(scope="module")
def dataset():
    """Noisy colours: easy to tell apart, and no two images alike."""
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), PER_CLASS + TEST)
    colours = draw.integers(0, 200, (CLASSES, 3, 1, 1))
    pixels = (colours[labels] + draw.integers(0, 56, (len(labels), 3, 32, 32))).astype(np.uint8)
    is_test = np.tile(np.arange(PER_CLASS + TEST) >= PER_CLASS, CLASSES)
    aspect = draw.uniform(0.8, 1.25, len(labels))
    return Dataset("colours", [f"c{i}" for i in range(CLASSES)], Store(pixels, aspect, "colours"), labels, is_test)


@pytest.fixture
def stream(dataset):
    return Stream(dataset, TASKS)


@pytest.fixture
def make(backbone):
    def build(method, epochs=1, lr=None, **options):
        settings = {**find_method(method).training_defaults, "epochs": epochs, "batch_size": 8, "augment": "flip"}
        training = Training(**settings | ({"lr": lr} if lr else {}))
        return Learner(copy.deepcopy(backbone), method, tasks=TASKS, training=training, device="cpu", **options)

    return build


def view_of(learner, images, labels=None):
    rendered = torch.randn(len(images), 3, 28, 28, generator=torch.Generator().manual_seed(3))
    return View(learner.vit, lambda: rendered, labels=labels, task=learner.method.task.number)


def state(learner):
    return {name: t.clone() for name, t in learner.method.state_dict().items()}


# ---------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("method", TUNING)
def test_the_whole_backbone_is_tuned_and_no_former_self_stays(method, make, dataset):
    learner = make(method, **SMALL.get(method, {}))
    before = state(learner)
    for task in Stream(dataset, 1 if learner.method.joint else TASKS):
        learner.learn(task)
    after = state(learner)
    moved = {name for name in before if name.startswith("vit.") and not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("vit.")}
    counts = learner.method.parameter_counts()
    assert counts["prompting"] == 0 and counts["trainable"] == counts["backbone"] + counts["classifier"]
    assert not any("former" in name for name in after)


# ---------------------------------------------------------------------------------------------- FT, FT++, Joint


@pytest.mark.parametrize(("method", "kept"), [("ft", False), ("ft++", True), ("lwf", True)])
def test_masked_old_logits_leave_the_rows_of_old_classes_alone(method, kept, make, stream):
    learner = make(method, **({"distillation_weight": 0.0} if method == "lwf" else {}))
    tasks = iter(stream)
    learner.learn(next(tasks))
    old = learner.method.head.weight.detach().clone(), learner.method.head.bias.detach().clone()
    learner.learn(next(tasks))
    head = learner.method.head
    assert (torch.equal(head.weight[:2], old[0]) and torch.equal(head.bias[:2], old[1])) == kept
    assert len(head.weight) == 4


def test_joint_training_sees_all_classes_at_once(make, dataset):
    learner = make("joint", epochs=8, lr=3e-3)
    assert learner.method.joint
    task = next(iter(Stream(dataset, 1)))
    seen = set()
    losses = learner.method.task_loss
    learner.method.task_loss = lambda logits, labels: (seen.update(labels.tolist()), losses(logits, labels))[1]
    learner.learn(task)
    assert seen == set(range(CLASSES))
    assert learner.accuracies([task])[0] > 80


# ---------------------------------------------------------------------------------------------- LwF


def test_lwf_is_taught_by_the_old_network_on_the_new_images(make, stream):
    learner = make("lwf", lr=1e-3)
    tasks = iter(stream)
    learner.learn(next(tasks))
    task = next(tasks)
    view = view_of(learner, task.train, task.train.labels + 2)
    with torch.no_grad():
        recorded = learner.method.logits(view)
    targets, losses = [], []
    real = learner.method.losses

    def spy(batch):
        learner.method.losses = real
        targets.append(before(learner.method, view))
        found = learner.method.losses(view_of(learner, task.train, view.labels))
        losses.append({name: value.item() for name, value in found.items()})
        learner.method.losses = spy
        return real(batch)

    learner.method.losses = spy
    learner.learn(task)
    assert len(targets) > 1 and all(torch.equal(target, targets[0]) for target in targets)
    assert torch.allclose(targets[0], recorded, atol=1e-6)
    assert abs(losses[0]["distillation"]) < 1e-6 < 1e-4 < losses[-1]["distillation"]  # pupil and teacher begin as one


def test_distillation_is_the_divergence_of_softened_scores():
    ours, theirs = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    p, q = (theirs / 2).softmax(1), (ours / 2).softmax(1)
    expected = (p * (p / q).log()).sum(1).mean()
    assert torch.isclose(distillation(ours, theirs, 2.0).double(), expected, atol=1e-6)
    pupil = ours.clone().requires_grad_()  # the gradient is that of the cross-entropy with the teacher's scores
    distillation(pupil, theirs, 2.0).backward()
    assert torch.allclose(pupil.grad, (q - p) / 2 / len(p), atol=1e-6)


def test_more_distillation_forgets_less(make, stream):
    drift = []
    for weight in (0.0, 30.0):
        learner = make("lwf", epochs=3, lr=1e-3, distillation_weight=weight)
        tasks = iter(stream)
        learner.learn(next(tasks))
        task = next(tasks)
        before = learner.logits(task.train).softmax(1)
        learner.learn(task)
        drift.append(float((learner.logits(task.train)[:, :2].softmax(1) - before).abs().mean()))
    assert drift[1] < 0.5 * drift[0]


def test_a_compiled_backbone_can_be_a_teacher(backbone):
    vit = copy.deepcopy(backbone).compile_blocks()
    teacher = vit.frozen_copy()
    assert teacher.compiled and teacher.blocks[0]._compiled_call_impl is not None
    assert teacher.state_dict().keys() == vit.state_dict().keys() and same_tensors(
        teacher.state_dict(), vit.state_dict()
    )


# ---------------------------------------------------------------------------------------------- BiC


def test_the_memory_is_full_at_most_equally_shared_and_of_old_classes(make, stream, dataset):
    learner = make("bic", exemplars=15, selection="random")
    names = stream.dataset.classes
    for task in stream:
        learner.learn(task)
        memory, seen = learner.method.memory, 2 * (task.number + 1)
        assert len(memory) == learner.method.exemplar_count() == seen * min(15 // seen, PER_CLASS) <= 15
        assert torch.bincount(memory.labels).tolist() == [min(15 // seen, PER_CLASS)] * seen
        for pixels, aspect, label in zip(memory.pixels, memory.aspect, memory.labels, strict=True):
            rows = np.flatnonzero((dataset.labels == names.index(learner.classes[label])) & ~dataset.is_test)
            row = [r for r in rows if np.array_equal(dataset.store.pixels[r], pixels.numpy())]
            assert len(row) == 1 and dataset.store.aspect[row[0]] == aspect


def test_stage_one_rehearses_and_holds_out_a_balanced_set(make, stream):
    learner, tasks = make("bic", exemplars=20, held_out=0.2), iter(stream)
    learner.learn(next(tasks))
    task = next(tasks)
    learner.method.start_task(TaskInfo(1, 2, 2))
    data = TaskData(TaskInfo(1, 2, 2), task.train, task.train.labels + 2, learner.evaluator, batch_size=8, seed=0)
    shown, labels = learner.method.training_images(data)
    held, held_labels = learner.method.held_out
    assert torch.bincount(labels).tolist() == [8, 8, 8, 8] and torch.bincount(held_labels).tolist() == [2, 2, 2, 2]
    device = torch.device("cpu")
    pixels = [images.read(torch.arange(len(images)), device) for images in (shown, held)]
    assert len(torch.cat(pixels).flatten(1).unique(dim=0)) == 40  # apart, and each image once
    order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(0))
    assert torch.equal(shown.read(order, device), pixels[0][order])
    assert shown.aspect.shape == (32,) and torch.equal(labels[:16], shown.labels[:16])
    again, _ = learner.method.training_images(data)
    assert torch.equal(again.read(torch.arange(len(again)), device), pixels[0])


def test_the_correction_touches_only_the_new_classes(make, stream):
    learner, tasks = make("bic", exemplars=20, epochs=3, lr=1e-3), iter(stream)
    learner.learn(next(tasks))
    assert learner.method.correction.tolist() == [[1, 1], [0, 0]]
    learner.learn(next(tasks))
    method, test = learner.method, stream.tasks[0].test
    pair = method.correction[:, 2]
    assert torch.equal(method.correction, torch.stack([torch.tensor([1.0, 0]), torch.tensor([1.0, 0]), pair, pair], 1))
    assert pair.tolist() != [1, 0]
    corrected = learner.logits(test)
    method.correction = torch.tensor([[1.0] * 4, [0.0] * 4])
    raw = learner.logits(test)
    assert torch.equal(corrected[:, :2], raw[:, :2])
    assert torch.allclose(corrected[:, 2:], raw[:, 2:] * pair[0] + pair[1])
    method.correction[:, 2:] = pair[:, None]
    learner.learn(next(tasks))  # each task keeps the pair it was given
    assert torch.equal(method.correction[:, :4].T, torch.stack([torch.tensor([1.0, 0])] * 2 + [pair] * 2))


def test_stage_two_finds_the_best_pair():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(6).repeat(20)
    logits = torch.randn(120, 6, generator=g) + 2 * F.one_hot(labels, 6)
    biased = torch.cat([logits[:, :4], logits[:, 4:] * 2 + 3], dim=1)
    alpha, beta = fit_correction(biased, labels, 4, 0.0)

    def loss(a, b):
        return float(F.cross_entropy(torch.cat([biased[:, :4], biased[:, 4:] * a + b], dim=1), labels))

    assert loss(alpha, beta) < loss(1, 0) - 0.1
    around = [loss(alpha + a, beta + b) for a in (-0.05, 0, 0.05) for b in (-0.05, 0, 0.05)]
    assert loss(alpha, beta) <= min(around) + 1e-5
    assert alpha < 1 and beta < 0
    easy = fit_correction(2 * F.one_hot(labels, 6).float(), labels, 4, 0.01)
    assert (easy - torch.tensor([1.0, 0.0])).abs().max() < 5  # told apart without a mistake, but no runaway
    assert torch.allclose(fit_correction(biased, labels, 4, 1e6), torch.tensor([1.0, 0.0]), atol=1e-3)


def test_distillation_weighs_as_much_as_there_is_to_lose(make, stream):
    learner, tasks = make("bic", exemplars=20), iter(stream)
    learner.learn(next(tasks))
    task = next(tasks)
    method = learner.method
    method.correction[:, :2] = torch.tensor([[2.0], [0.5]])
    method.start_task(TaskInfo(1, 2, 2))
    with torch.no_grad():
        method.head.weight.add_(0.1 * torch.randn_like(method.head.weight))
        view = view_of(learner, task.train, torch.arange(len(task.train)) % 4)
        found, z = method.losses(view), method.logits(view)
        plain = method.former.head(method.former.features(view.through(method.former.vit))[0])
        assert torch.allclose(before(method, view), plain * 2 + 0.5)  # yesterday's correction included
    assert torch.isclose(found["task"], 0.5 * F.cross_entropy(z, view.labels))  # old classes' labels count too
    assert torch.isclose(found["distillation"], 0.5 * distillation(z[:, :2], before(method, view), 2.0))


def test_herding_follows_the_mean():
    features = torch.randn(30, 8, generator=torch.Generator().manual_seed(0)) + 1
    order = herd(features, 10)
    assert len(order) == len(order.unique()) == 10
    assert len(herd(features, 99)) == 30 and len(herd(features, 0)) == 0
    unit = F.normalize(features, dim=1)
    assert order[0] == (unit - unit.mean(0)).norm(dim=1).argmin()
    assert (unit[order].mean(0) - unit.mean(0)).norm() < (unit[:10].mean(0) - unit.mean(0)).norm()


def test_exemplars_are_cut_from_the_end():
    memory = Exemplars()
    pixels = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    memory.update(3, pixels, torch.ones(6), torch.tensor([0, 0, 0, 1, 1, 1]))
    memory.update(2, pixels[:2] + 10, torch.ones(2), torch.tensor([2, 2]))
    assert memory.pixels.flatten().tolist() == [0, 1, 3, 4, 10, 11] and memory.labels.tolist() == [0, 0, 1, 1, 2, 2]
    memory.update(0, pixels[:0], torch.ones(0), torch.zeros(0))
    assert len(memory) == 0
    keep, out = split(torch.tensor([1, 1, 2, 2, 2]), 0)
    assert len(keep) == 5 and len(out) == 0


# ---------------------------------------------------------------------------------------------- SLCA


def test_slca_learns_slowly_in_the_backbone(make):
    learner = make("slca")
    learner.method.start_task(TaskInfo(0, 0, 2))
    optimizer = make_optimizer(learner.method.parameter_groups(), learner.settings.optimizer, learner.settings.lr, 0.0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert isinstance(optimizer, torch.optim.SGD)
    assert {rates[id(p)] for p in learner.method.head.parameters()} == {0.01}
    assert {rates[id(p)] for p in learner.vit.parameters()} == {0.01 * 0.01}


@pytest.mark.parametrize("method", ["ft++", "lwf", "slca"])
def test_layer_decay_slows_the_first_layers_most(make, method):
    learner = make(method, layer_decay=0.5, backbone_lr_scale=0.1)
    learner.method.start_task(TaskInfo(0, 0, 2))
    scales = {id(p): group["scale"] for group in learner.method.parameter_groups() for p in group["params"]}
    vit, depth = learner.vit, len(learner.vit.blocks)
    assert {scales[id(p)] for p in learner.method.head.parameters()} == {1.0}
    assert {scales[id(p)] for p in vit.norm.parameters()} == {0.1}
    for number, block in enumerate(vit.blocks):
        assert {scales[id(p)] for p in block.parameters()} == {0.1 * 0.5 ** (depth - number)}
    assert scales[id(vit.pos_embed)] == scales[id(vit.patch_embed.proj.weight)] == 0.1 * 0.5 ** (depth + 1)
    assert all(id(p) in scales for p in vit.parameters())


def test_slca_aligns_the_head_alone_and_goes_on_from_where_it_was(make, stream):
    learner, tasks = make("slca"), iter(stream)
    method = learner.method
    learner.learn(next(tasks))
    assert torch.equal(method.unaligned[:, :-1], method.head.weight)  # one task: nothing to align
    seen = {}
    align = method.remember

    def spy(*given):
        seen["before"] = state(learner)
        align(*given)

    method.remember = spy
    learner.learn(next(tasks))
    before, after = seen["before"], state(learner)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {n for n in changed if not n.startswith("statistics.")} == {"head.weight", "head.bias"}
    assert method.statistics.spread.shape == (4, 32, 32)
    assert method.statistics.spread[0].fill_diagonal_(0).abs().max() > 0  # full, not diagonal
    method.start_task(TaskInfo(2, 4, 2))
    assert torch.equal(method.head.weight[:4], before["head.weight"])
    assert torch.equal(method.head.bias[:4], before["head.bias"])


def test_logits_are_normalized_by_the_mean_of_the_tasks_norms():
    logits = torch.tensor([[3.0, 4.0, 6.0, 8.0, 0.0]])
    expected = F.cross_entropy(logits / (5 + 10 + 0) * 3 / 0.1, torch.tensor([1]))
    assert torch.isclose(normalized_cross_entropy(logits, torch.tensor([1]), 0.1, [2, 2, 1]), expected)


def test_older_means_are_drawn_closer_to_zero(monkeypatch):
    statistics = KINDS["full"](4)
    statistics.add(torch.randn(40, 4) + 5, torch.arange(4).repeat(10))
    taken = {}
    real = ClassStatistics.sample
    monkeypatch.setattr(ClassStatistics, "sample", lambda self, *a: (taken.update(scales=a[2]), real(self, *a))[1])
    head = torch.nn.Linear(4, 4)
    rebalance(head, statistics, 3, 8, Rebalancing(covariance="full", epochs=1, mean_decay=0.1), 0, [2, 1, 1])
    assert torch.allclose(taken["scales"], torch.tensor([0.9 + 0.1 / 3, 0.9 + 0.1 / 3, 0.9 + 0.2 / 3, 1.0]))


def test_bic_s_memory_must_hold_an_image_of_every_class():
    learner, stream = make_learner("bic", exemplars=3), iter(make_stream())
    learner.learn(next(stream))
    with pytest.raises(UserError, match="exemplars=3 cannot hold one image of each of 4 classes"):
        learner.learn(next(stream))

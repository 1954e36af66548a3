"""What defines HiDe-Prompt (one prompt per task, found by inference) and EvoPrompt (prompts made from the image)."""

from itertools import permutations

import numpy as np
import pytest
import torch
from conftest import TINY, make_stream, make_vit
from torch import nn

from vqprompt.core.backbones.vit import ViT
from vqprompt.core.errors import UserError
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods.evoprompt import EvoOptions, EvoPrompt, PromptMemory, compose, match
from vqprompt.research.methods.hide_prompt import HidePrompt, contrastive
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.settings import Training
from vqprompt.research.training.view import View

WIDTH, DEPTH = TINY.width, TINY.depth
TRAINING = Training(epochs=2, batch_size=8, augment="none", test_crop=0.0, weight_decay=0.1)
SMALL = {
    "hide-prompt": {"length": 4, "rebalancing": {"centroids": 2, "epochs": 2}, "identity_rebalancing": {"epochs": 2}},
    "evoprompt": {"hidden": 4},
}


def make_learner(method: str, tasks: int = 3, **more) -> Learner:
    return Learner(
        make_vit(), method, tasks=tasks, seed=3, training=TRAINING, device="cpu", **{**SMALL[method], **more}
    )


def view_of(vit: ViT, count: int = 4, **more) -> View:
    images = torch.randn(count, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    return View(vit, lambda: images, **more)


def states(module: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in module.state_dict().values()]


def differ(before: list[torch.Tensor], module: nn.Module) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, states(module), strict=True))


# ---------------------------------------------------------------------------------------------- HiDe-Prompt


def make_hide(tasks: int = 3, **options) -> HidePrompt:
    method = HidePrompt(make_vit(), HidePrompt.Options(**{**SMALL["hide-prompt"], **options}), tasks)
    for number in range(tasks):
        method.start_task(TaskInfo(number, 2 * number, 2))
        method.prompts[number].data.add_(number)  # else all are alike: each starts from the one before
    return method


def spy_on_prompts(monkeypatch, vit: ViT) -> list:
    """What reaches vit.encode: (prompts, placement). Queries, which have no prompts, are left out."""
    seen, encode = [], vit.encode

    def spy(tokens, prompts=None, placement="after", normalize=None, **others):
        if normalize is not None:
            return encode(tokens, normalize=normalize)
        seen.append((prompts, placement))
        return encode(tokens, prompts, placement, **others)

    monkeypatch.setattr(vit, "encode", spy)
    return seen


def test_hide_counts_one_prompt_and_both_classifiers_as_learning():
    one, heads = 5 * 4 * WIDTH, 2 * (6 * WIDTH + 6)
    assert make_hide(identity_mlp=False).parameter_counts()["trainable"] == one + heads
    mlp = WIDTH * 2 * WIDTH + 2 * WIDTH + 2 * WIDTH * WIDTH + WIDTH + 2 * WIDTH  # two layers and a norm
    assert make_hide().parameter_counts().items() >= {"prompting": 3 * one, "classifier": heads + mlp}.items()


def test_hide_infers_the_task_and_then_picks_its_prompt(monkeypatch):
    method = make_hide(identity_mlp=False).eval()
    view = view_of(method.vit)
    # rigged so that image i looks like class wanted[i]: the row of that class is the query itself, made the longest
    wanted = [5, 0, 3, 2]
    rows = torch.zeros(6, WIDTH)
    inverse = torch.linalg.pinv(view.query)  # query @ inverse = 1
    for image, label in enumerate(wanted):
        rows[label] = inverse[:, image]
    method.identity.weight.data.copy_(rows)
    method.identity.bias.data.zero_()
    assert method.infer_task(view.query).tolist() == [2, 0, 1, 1]
    seen = spy_on_prompts(monkeypatch, method.vit)
    method.logits(view)
    [(prompts, placement)] = seen
    assert placement == "after" and sorted(prompts) == [0, 1, 2, 3, 4]
    for m, block in enumerate(prompts):
        for image, task in enumerate([2, 0, 1, 1]):
            assert torch.equal(prompts[block][image], method.prompts[task][m])


def test_hide_knows_the_task_in_training_and_blends_the_earlier_prompts_in(monkeypatch):
    method = make_hide(momentum=0.25).train()
    seen = spy_on_prompts(monkeypatch, method.vit)
    labels = torch.tensor([4, 5, 4, 5])
    method.losses(view_of(method.vit, labels=labels, task=2, known_query=torch.randn(4, WIDTH)))
    [(prompts, _)] = seen
    first, second, own = (p.detach() for p in method.prompts)
    for m, block in enumerate(prompts):
        assert prompts[block].shape == (1, 4, WIDTH)
        torch.testing.assert_close(prompts[block][0], 0.75 * own[m] + 0.25 * (first[m] + second[m]) / 2)


def test_hide_takes_statistics_with_the_tasks_own_prompt(monkeypatch):
    """The clean features of a finished task must not depend on what task the classifier would infer."""
    learner, stream = make_learner("hide-prompt"), make_stream()
    monkeypatch.setattr(HidePrompt, "infer_task", lambda self, query: pytest.fail("inferred a task that is known"))
    for task in stream:
        learner.learn(task)


def test_hide_learns_one_prompt_only_and_starts_it_from_the_one_before():
    learner, stream = make_learner("hide-prompt", momentum=0.1), make_stream()
    method = learner.method
    started = []
    start = method.start_task
    method.start_task = lambda info: (start(info), started.append(method.prompts[info.number].detach().clone()))
    for task in stream:
        before = states(method.prompts)
        learner.learn(task)
        for number, old in enumerate(before):
            changed = not torch.equal(old, method.prompts[number])
            assert changed == (number == task.number)
        if task.number:
            assert torch.equal(started[task.number], before[task.number - 1])


def test_hide_keeps_the_blend_when_a_task_ends():
    learner, stream = make_learner("hide-prompt", momentum=0.25), make_stream()
    method = learner.method
    blends = []
    finish = method.finish_task
    method.finish_task = lambda f: (blends.append(method.blended_prompt().detach().clone()), finish(f))
    for task in stream:
        learner.learn(task)
        assert torch.equal(method.prompts[task.number], blends[-1])


def test_hide_replays_both_classifiers_from_statistics_of_their_own_features():
    by_size = {"centroid_weights": "size"}  # so that centroids add up to the mean of their class
    learner = make_learner("hide-prompt", rebalancing=by_size, identity_rebalancing=by_size)
    stream = make_stream()
    method = learner.method
    around = []
    finish = method.finish_task

    def watched(info):
        before = states(method.head), states(method.identity)
        finish(info)
        around.append((differ(before[0], method.head), differ(before[1], method.identity)))

    method.finish_task = watched
    for task in stream:
        learner.learn(task)
        count = 2 * (task.number + 1)
        assert len(method.statistics.means) == len(method.identity_statistics.means) == count
        method.eval()
        query, features = learner.queries(task.train), learner.features(task.train, task=task.number)
        for stats, values in ((method.statistics, features), (method.identity_statistics, query)):
            means = (stats.means * stats.shares[..., None]).sum(1)[-2:]
            expected = torch.stack([values[task.train.labels == c].mean(0) for c in range(2)])
            torch.testing.assert_close(means, expected, rtol=1e-4, atol=1e-5)
    assert around == [(False, False), (True, True), (True, True)]  # there is nothing to balance after the first


def test_hide_contrastive_term():
    generator = torch.Generator().manual_seed(2)
    features, means = torch.randn(3, 8, generator=generator), torch.randn(4, 8, generator=generator)
    rows = torch.cat([features, means]).double().numpy()
    total = 0.0
    for x in rows:
        similar = np.array([float(x @ y) / 0.8 for y in rows])
        total -= float(x @ x) / 0.8 - np.log(np.exp(similar).sum())
    assert float(contrastive(features, means, 0.8)) == pytest.approx(total / 7, rel=1e-5)


def test_hide_contrasts_with_every_mean_that_stands_for_images():
    method = make_hide(tasks=2).train()
    generator = torch.Generator().manual_seed(4)
    stored = torch.randn(5, WIDTH, generator=generator)
    # class 0 has two images, class 1 three: of its two centroids a class each has some; one more is made empty
    method.statistics.add(stored, torch.tensor([0, 0, 1, 1, 1]))
    method.statistics.means[1, 1] = 0.0
    view = view_of(method.vit, task=1, labels=torch.tensor([2, 3, 2, 3]))
    features, losses = method.features(view)
    anchors = torch.cat([method.statistics.means[0], method.statistics.means[1, :1]])
    expected = 0.01 * contrastive(features, anchors, 0.8)
    torch.testing.assert_close(losses["contrastive"], expected)
    assert method.losses(view).keys() == {"task", "contrastive", "identity"}


def test_hide_closed_form_needs_a_linear_identity_classifier():
    closed = {"identity_rebalancing": {"how": "closed-form"}}
    with pytest.raises(UserError, match="identity_mlp=false"):
        Learner(make_vit(), "hide-prompt", device="cpu", **closed)
    learner = make_learner("hide-prompt", identity_mlp=False, **closed)
    for task in make_stream():
        learner.learn(task)
        assert learner.accuracies([task])[0] >= 0


# ---------------------------------------------------------------------------------------------- EvoPrompt


def test_evo_counts_its_memory_and_the_classifier_as_learning():
    method = EvoPrompt(make_vit(), EvoOptions(hidden=4, length=3), 2)
    method.start_task(TaskInfo(0, 0, 2))
    counts = method.parameter_counts()
    assert counts["prompting"] == DEPTH * (WIDTH * 4 + 4 * 3 * WIDTH) == counts["trainable"] - 2 * (WIDTH + 1)


def test_evo_prompt_is_the_networks_answer_to_the_query():
    memory = PromptMemory(blocks=2, width=6, hidden=3, length=5)
    query = torch.randn(4, 6)
    made = memory(query)
    assert made.shape == (4, 2, 5, 6)
    for block in range(2):
        mlp = nn.Sequential(nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 30, bias=False))
        mlp[0].weight.data.copy_(memory.down[block])
        mlp[2].weight.data.copy_(memory.up[block])
        torch.testing.assert_close(made[:, block].flatten(1), mlp(query))
    assert not torch.allclose(made[0], made[1])


def test_evo_tokens_join_at_every_block_and_stay():
    method = EvoPrompt(make_vit(), EvoOptions(), 2)
    lengths = []
    for block in method.vit.blocks:
        block.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    method.vit.encode(method.vit.embed(torch.randn(2, 3, 28, 28)))
    method.features(view_of(method.vit, known_query=torch.randn(4, WIDTH)))
    assert lengths == [5] * DEPTH + [5 + 5 * (i + 1) for i in range(DEPTH)]


def test_evo_features_depend_on_the_query():
    method = EvoPrompt(make_vit(), EvoOptions(), 2)
    one, other = (method.features(view_of(method.vit, known_query=torch.randn(4, WIDTH)))[0] for _ in range(2))
    assert not torch.allclose(one, other)


def test_match_is_the_best_of_all_orders():
    generator = torch.Generator().manual_seed(6)
    rows, others = torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)

    def cost(order) -> float:
        a, b = rows[list(order)], others
        a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
        return float((a - b).square().sum())

    best = min(permutations(range(5)), key=cost)
    assert match(rows, others).tolist() == list(best)


@pytest.mark.parametrize("outputs", [True, False])
def test_evo_aligning_a_permuted_copy_of_the_reference_recovers_it(outputs):
    memory = PromptMemory(blocks=3, width=8, hidden=6, length=2)
    memory.start_task()
    query = torch.randn(5, 8)
    before = memory(query)
    for block in range(3):
        order = torch.randperm(6)
        memory.down.data[block] = memory.down.data[block][order]
        memory.up.data[block] = memory.up.data[block][:, order]
    torch.testing.assert_close(memory(query), before)  # hidden units have no order of their own
    assert not torch.equal(memory.down, memory.reference_down)
    memory.align(outputs)
    assert torch.equal(memory.down, memory.reference_down)
    assert torch.equal(memory.up, memory.reference_up)


def test_evo_contributions_are_the_mean_positive_activity():
    memory = PromptMemory(blocks=2, width=6, hidden=3, length=2)
    queries = torch.randn(7, 6)
    hidden, outputs = memory.contributions(queries, batch_size=3)
    for block in range(2):
        inner = (queries @ memory.down[block].T).clamp(min=0)
        torch.testing.assert_close(hidden[block], inner.mean(0))
        torch.testing.assert_close(outputs[block], (inner @ memory.up[block].T).clamp(min=0).mean(0))
    assert not any(t.any() for t in memory.contributions(queries[:0], batch_size=3))  # nothing was classified right


def test_evo_merges_the_memories_by_contribution():
    memory = PromptMemory(blocks=2, width=4, hidden=3, length=2)
    memory.start_task()
    memory.down.data.add_(torch.randn(2, 3, 4))
    memory.up.data.add_(torch.randn(2, 8, 3))
    now = torch.rand(2, 3), torch.rand(2, 8)
    memory.hidden_credit, memory.output_credit = torch.rand(2, 3), torch.rand(2, 8)
    working, before = (memory.down.detach().clone(), memory.up.detach().clone()), (
        memory.reference_down, memory.reference_up,
    )  # fmt: skip
    memory.merge(*now, rate=0.5)
    for after, w, r, c, g in zip(
        (memory.down, memory.up), working, before, now, (memory.hidden_credit, memory.output_credit), strict=True
    ):
        for block in range(2):
            for unit in range(c.shape[1]):
                c_scaled = (c[block, unit] - c[block].min()) / (c[block].max() - c[block].min())
                g_scaled = (g[block, unit] - g[block].min()) / (g[block].max() - g[block].min())
                omega = 0.5 + 0.5 * (c_scaled - g_scaled)
                expected = (1 - omega) * r[block, unit] + omega * w[block, unit]
                torch.testing.assert_close(after[block, unit], expected)


def test_evo_merges_after_every_task_but_the_first():
    learner, stream = make_learner("evoprompt"), make_stream()
    memory = learner.method.memory
    working = []
    finish = learner.method.finish_task
    learner.method.finish_task = lambda f: (working.append(memory.down.detach().clone()), finish(f))
    reference = None
    for task in stream:
        learner.learn(task)
        if task.number == 0:
            assert torch.equal(memory.down, working[0])
        else:
            assert torch.equal(memory.reference_down, reference)  # what the task started from
            assert not torch.equal(memory.down, working[-1])
            aligned = torch.stack([w[match(w, r)] for w, r in zip(working[-1], memory.reference_down, strict=True)])
            low, high = torch.minimum(aligned, reference), torch.maximum(aligned, reference)
            assert ((memory.down >= low - 1e-6) & (memory.down <= high + 1e-6)).all()  # between the two
        assert (memory.hidden_credit >= 0).all()
        reference = memory.down.detach().clone()


def test_evo_gives_credit_for_the_images_it_gets_right():
    learner, stream = make_learner("evoprompt"), make_stream()
    method, memory = learner.method, learner.method.memory
    finish = method.finish_task
    for task in stream:
        best = [memory.hidden_credit.clone(), memory.output_credit.clone()]
        found = []

        def watched(info, task=task, found=found):
            method.head.bias.data[-1] = 1000 * (task.number + 1)  # the last class is all it sees: half are right
            right = learner.logits(task.train).argmax(1) == task.train.labels + 2 * task.number
            hidden, outputs = memory.units(learner.queries(task.train)[right])
            found.extend([right.float().mean(), hidden.mean(0), outputs.clamp(min=0).mean(0), memory.down.clone()])
            found.append(memory.up.clone())
            finish(info)

        method.finish_task = watched
        learner.learn(task)
        share, hidden, outputs, down, up = (t.detach() for t in found)
        assert share == 0.5
        for block in range(DEPTH if task.number else 0):
            order = match(down[block], memory.reference_down[block])
            hidden[block] = hidden[block][order]
            outputs[block] = outputs[block][match(up[block][:, order], memory.reference_up[block])]
        torch.testing.assert_close(memory.hidden_credit, torch.maximum(best[0], hidden))
        torch.testing.assert_close(memory.output_credit, torch.maximum(best[1], outputs))


def test_evo_composes_new_classifier_rows_from_old_ones():
    generator = torch.Generator().manual_seed(8)
    new, old, rows = (torch.randn(n, 8, generator=generator) for n in (2, 3, 3))
    made = compose(new, old, rows, width=4, temperature=0.05)
    for c in range(2):
        for group in (slice(0, 4), slice(4, 8)):
            cosines = torch.stack([torch.cosine_similarity(new[c, group], p[group], dim=0) for p in old])
            weights = torch.softmax(cosines / 0.05, dim=0)
            expected = sum(w * r[group] for w, r in zip(weights, rows, strict=True))
            torch.testing.assert_close(made[c, group], expected)
    # a class that looks just like an old one, and like no other, starts with its row
    torch.testing.assert_close(compose(torch.eye(4)[:1], torch.eye(4)[:3], rows[:, :4], 4, 0.05), rows[:1, :4])


@pytest.mark.parametrize("composes", [True, False])
def test_evo_classifier_is_composed_before_training(composes):
    learner, stream = make_learner("evoprompt", compose_classifier=composes), make_stream()
    method = learner.method
    prepare = method.prepare_training
    changed = []

    def watched(queries):
        before = method.head.weight.detach().clone()
        prepare(queries)
        changed.append([not torch.equal(a, b) for a, b in zip(before, method.head.weight, strict=True)])

    method.prepare_training = watched
    for task in stream:
        learner.learn(task)
        if composes:
            query = learner.queries(task.train)
            query = method.vit.norm(query) if method.options.query == "raw" else query
            expected = torch.stack([query[task.train.labels == c].mean(0) for c in range(2)])
            torch.testing.assert_close(method.prototypes[-2:], expected)
    rest = [composes] * 2
    assert changed == [[False] * 2, [False] * 2 + rest, [False] * 4 + rest]


def test_evo_groups_must_divide_the_width():
    with pytest.raises(UserError, match="compose_width=5 does not divide the backbone's width 32"):
        make_learner("evoprompt", compose_width=5)

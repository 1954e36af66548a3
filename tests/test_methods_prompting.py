"""What defines L2P++, DualPrompt and CODA-P, each against loops in float64, one image at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import QUICK, make_learner, make_stream, make_vit

from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.errors import UserError
from vqprompt.research.methods import METHODS
from vqprompt.research.methods.coda import nonorthogonality, orthogonal_rows
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.training.view import View

WIDTH, BATCH = 32, 6


def make(name, tasks=2, **options):
    method_class = METHODS[name]
    return method_class(make_vit(), method_class.Options(**options), tasks)


def make_view(vit, task=None, labels=None, query=None):
    images = torch.randn(BATCH, 3, 28, 28, generator=torch.Generator().manual_seed(2))
    return View(vit, lambda: images, query, labels, task)


def see_prompts(method, monkeypatch):
    """What the ViT is given, by block, filled at each pass that has prompts."""
    seen, encode = {}, method.vit.encode

    def spy(tokens, prompts=None, placement="after", **more):
        if prompts:
            assert placement == "after"
            seen.clear()
            seen.update({block: p.detach().expand(len(tokens), -1, -1) for block, p in prompts.items()})
        return encode(tokens, prompts, placement, **more)

    monkeypatch.setattr(method.vit, "encode", spy)
    return seen


def cosine_of(a, b):
    a, b = a.double(), b.double()
    return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))


def own_tensors(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if not name.startswith("vit.")}


# ---------------------------------------------------------------------------------------------- L2P++


@pytest.mark.parametrize(("name", "blocks"), [("l2p++", [0]), ("deep-l2p++", [0, 1, 2, 3, 4])])
def test_l2p_gives_every_image_the_five_prompts_with_the_nearest_keys(name, blocks, monkeypatch):
    method = make(name)
    method.pool.keys.data.normal_()
    view, seen = make_view(method.vit), see_prompts(method, monkeypatch)
    method.features(view)
    assert list(seen) == blocks
    choices = method.choices(view.query)
    for m, block in enumerate(blocks):
        keys, prompts = method.pool.keys.detach()[m], method.pool.prompts.detach()[m]
        for b, query in enumerate(view.query):
            nearest = sorted(range(30), key=lambda i: -cosine_of(query, keys[i]))[:5]
            assert choices[b, m].tolist() == nearest
            halves = [prompts[i][:10] for i in nearest] + [prompts[i][10:] for i in nearest]
            assert torch.equal(seen[block][b], torch.cat(halves))


def test_the_key_loss_pulls_the_chosen_keys_to_the_queries_and_no_others():
    method = make("l2p++")
    method.start_task(TaskInfo(0, 0, 2))
    method.pool.keys.data.normal_()
    before, prompts = method.pool.keys.detach().clone()[0], method.pool.prompts.detach().clone()[0]
    view = make_view(method.vit, task=0, labels=torch.arange(BATCH) % 2)
    chosen = method.choices(view.query)[:, 0]
    losses = method.losses(view)
    pairs = [(b, int(k)) for b in range(BATCH) for k in chosen[b]]
    expected = sum(1 - cosine_of(view.query[b], before[k]) for b, k in pairs) / BATCH
    assert float(losses["key"].detach()) == pytest.approx(expected, rel=1e-5)
    assert torch.autograd.grad(losses["key"], method.pool.prompts, retain_graph=True, allow_unused=True)[0] is None
    assert torch.autograd.grad(losses["task"], method.pool.keys, retain_graph=True, allow_unused=True)[0] is None

    optimizer = torch.optim.AdamW(method.prompting_parameters(), lr=1e-3, weight_decay=0.0)
    sum(losses.values()).backward()
    optimizer.step()
    used = set(chosen.flatten().tolist())
    after = method.pool.keys.detach()[0]
    for k in range(30):
        assert torch.equal(after[k], before[k]) == (k not in used)
        assert torch.equal(method.pool.prompts[0, k], prompts[k]) == (k not in used)
    for k in used:
        mine = [b for b, other in pairs if other == k]
        now, then = (sum(cosine_of(view.query[b], keys[k]) for b in mine) for keys in (after, before))
        assert now > then


def test_l2p_v2_keeps_statistics_of_every_class_and_rebalances_with_them():
    learners = {name: make_learner(name) for name in ("l2p++", "l2p++-v2")}
    for task in make_stream():
        for learner in learners.values():
            learner.learn(task)
        plain, rebalanced = (learner.method for learner in learners.values())
        assert len(rebalanced.statistics.means) == 2 * (task.number + 1)
        assert torch.equal(plain.pool.prompts, rebalanced.pool.prompts)  # the head alone is put right, and only it
        same = torch.equal(plain.head.weight, rebalanced.head.weight)
        assert same == (task.number == 0)  # one task has nothing to be balanced against
        if task.number == 0:
            means = torch.stack(
                [learners["l2p++"].features(task.train)[task.train.labels == c].mean(0) for c in (0, 1)]
            )
            torch.testing.assert_close(rebalanced.statistics.means[:, 0], means)
    assert plain.statistics is None
    # old rows: untouched by the masked loss of later tasks, moved by the rebalancing
    assert not torch.equal(plain.head.weight[:2], rebalanced.head.weight[:2])


# ---------------------------------------------------------------------------------------------- DualPrompt


def dual_with_tasks(count, planned=4, **options):
    method = make("dualprompt", tasks=planned, **options)
    for number in range(count):
        method.start_task(TaskInfo(number, 2 * number, 2))
    for expert in method.experts:
        expert.keys.data.normal_()
    return method


def test_dualprompt_trains_with_the_tasks_own_expert(monkeypatch):
    method = dual_with_tasks(2)
    seen = see_prompts(method, monkeypatch)
    view = make_view(method.vit, task=1, labels=torch.arange(BATCH) % 2 + 2)
    losses = method.losses(view)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    for block in (0, 1):  # the general prompt
        assert torch.equal(seen[block], method.general[block].detach().expand(BATCH, 6, WIDTH))
    for m, block in enumerate((2, 3, 4)):  # the expert
        assert torch.equal(seen[block], method.experts[1].prompts[m].detach().expand(BATCH, 20, WIDTH))
    keys = method.experts[1].keys.detach()
    expected = sum(1 - cosine_of(q, keys[m, 0]) for q in view.query for m in range(3)) / BATCH
    assert float(losses["key"].detach()) == pytest.approx(expected, rel=1e-5)
    sum(losses.values()).backward()
    learning = {name for name, p in method.named_parameters() if p.grad is not None}
    assert learning == {"head.weight", "head.bias", "general.0", "general.1", "experts.1.keys", "experts.1.prompts"}


@pytest.mark.parametrize(("options", "candidates"), [({}, 3), ({"unlearned_experts": True}, 4)])
def test_dualprompt_takes_the_expert_with_the_nearest_key_at_test(options, candidates, monkeypatch):
    method = dual_with_tasks(3, **options)
    seen, query = see_prompts(method, monkeypatch), torch.randn(BATCH, WIDTH)
    query[0] = method.experts[3].keys[1, 0]  # the key, in block 3, of a task not learned yet
    view = make_view(method.vit, query=query)
    _, losses = method.features(view)
    assert not losses
    choices = method.choices(query)
    assert len(set(choices.flatten().tolist())) > 1
    assert (int(choices[0, 1]) == 3) == bool(options)
    for b in range(BATCH):
        for m, block in enumerate((2, 3, 4)):
            nearest = max(range(candidates), key=lambda t: cosine_of(query[b], method.experts[t].keys.detach()[m, 0]))
            assert int(choices[b, m]) == nearest
            assert torch.equal(seen[block][b], method.experts[nearest].prompts.detach()[m, 0])


# ---------------------------------------------------------------------------------------------- CODA-P


def coda_with_tasks(count, planned=3, **options):
    """Tasks one after another, the components of each moved as training would."""
    method = make("coda-p", tasks=planned, **({"pool": 3 * planned, "length": 4} | options))
    for number in range(count):
        if number:
            for p in method.components[number - 1].parameters():
                p.data += torch.randn_like(p)
        method.start_task(TaskInfo(number, 2 * number, 2))
    return method


def test_codas_new_components_start_orthogonal_to_all_others():
    method = coda_with_tasks(3)
    for name in ("keys", "attention", "prompts"):
        rows = torch.cat([getattr(part, name).detach().flatten(2) for part in method.components], dim=1).double()
        gram = rows @ rows.mT  # [blocks, 9, 9]
        assert gram[:, :6, :6].tril(-1).abs().max() > 0.1  # the old ones have moved and are not orthogonal themselves
        expected = torch.cat([torch.zeros(5, 3, 6), torch.eye(3).repeat(5, 1, 1)], dim=2).double()
        torch.testing.assert_close(gram[:, 6:], expected, atol=1e-5, rtol=0)


def test_orthogonal_rows_are_gram_schmidt_and_survive_a_full_space():
    torch.manual_seed(3)
    old = torch.randn(1, 3, 8)
    torch.manual_seed(4)
    found = orthogonal_rows(torch.cat([old, torch.zeros(1, 2, 8)], dim=1), 2)[0].double()
    torch.manual_seed(4)
    basis = []
    for row in torch.cat([old, torch.randn(1, 2, 8)], dim=1)[0].double():
        for u in basis:
            row = row - (row @ u) * u
        basis.append(row / row.norm())
    torch.testing.assert_close(found, torch.stack(basis[3:]), atol=1e-5, rtol=0)
    crowded = orthogonal_rows(torch.zeros(2, 9, 8), 3)  # nine rows cannot be orthogonal in eight dimensions
    torch.testing.assert_close(crowded.norm(dim=-1), torch.ones(2, 3))


def test_codas_prompt_is_the_sum_of_components_weighted_by_attended_cosine(monkeypatch):
    method = coda_with_tasks(2)  # of three: the third task's components have no part yet
    seen, view = see_prompts(method, monkeypatch), make_view(method.vit)
    method.features(view)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    for block in range(5):
        for b, query in enumerate(view.query):
            prompt = torch.zeros(4, WIDTH, dtype=torch.float64)
            for part in list(method.components)[:2]:
                for n in range(3):
                    weight = cosine_of(query * part.attention.detach()[block, n], part.keys.detach()[block, n])
                    prompt += weight * part.prompts.detach()[block, n].double()
            torch.testing.assert_close(seen[block][b].double(), prompt, atol=1e-5, rtol=1e-4)


def test_codas_penalty_is_zero_for_orthonormal_rows_and_positive_otherwise():
    orthonormal = torch.linalg.qr(torch.randn(5, 16, 4)).Q.mT
    assert float(nonorthogonality(orthonormal)) == pytest.approx(0, abs=1e-10)
    tilted = orthonormal.clone()
    tilted[2, 0] = F.normalize(tilted[2, 0] + tilted[2, 1], dim=0)  # cosine √½ with one other row, in one block
    assert float(nonorthogonality(tilted)) == pytest.approx(2 * 0.5 / 16, rel=1e-5)
    longer = orthonormal.clone()
    longer[0, 0] *= 2
    assert float(nonorthogonality(longer)) == pytest.approx((4 - 1) ** 2 / 16, rel=1e-5)

    method = coda_with_tasks(2, orthogonality_weight=0.1)
    losses = method.losses(make_view(method.vit, task=1, labels=torch.tensor([2, 3] * 3)))
    rows = [
        torch.cat([getattr(part, name).detach().flatten(2) for part in list(method.components)[:2]], dim=1)
        for name in ("keys", "attention", "prompts")
    ]
    expected = 0.1 * sum(float(nonorthogonality(r)) for r in rows)
    assert float(losses["orthogonality"].detach()) == pytest.approx(expected, rel=1e-5)
    assert expected > 0
    assert "orthogonality" not in coda_with_tasks(1).losses(make_view(method.vit, 0, torch.tensor([0, 1] * 3)))


# ---------------------------------------------------------------------------------------------- what several share


@pytest.mark.parametrize(
    ("name", "parts", "options"),
    [("coda-p", "components", {"pool": 8, "orthogonality_weight": 0.1}), ("dualprompt", "experts", {})],
)
def test_what_earlier_tasks_learned_stays_to_the_bit_even_under_weight_decay(name, parts, options):
    learner, kept = make_learner(name, training=QUICK.model_copy(update={"weight_decay": 0.1}), **options), []
    earlier: dict = {}
    for task in make_stream():
        for epoch in learner.epochs(task):
            now = [own_tensors(part) for part in getattr(learner.method, parts)]
            assert all(torch.equal(old[key], part[key]) for old, part in zip(kept, now, strict=False) for key in old)
            if epoch.number:  # and the task's own learn
                own = now[task.number]
                assert not any(torch.equal(own[key], earlier[key]) for key in own)
            earlier = now[task.number]
        kept.append(earlier)


@pytest.mark.parametrize(
    ("name", "tasks", "count"),
    [
        ("vq-prompt", 10, 5 * (10 * 768 + 10 * 8 * 768)),
        ("hide-prompt", 10, 1_536_000),
        ("evoprompt", 10, 12 * (768 * 16 + 16 * 5 * 768)),
        ("l2p++", 10, 30 * 20 * 768 + 30 * 768),
        ("l2p++-v2", 10, 30 * 20 * 768 + 30 * 768),
        ("deep-l2p++", 10, 5 * (30 * 20 * 768 + 30 * 768)),
        ("dualprompt", 10, 2 * 6 * 768 + 3 * (10 * 20 * 768 + 10 * 768)),
        ("dualprompt", 20, 976_896),
        ("coda-p", 10, 3_840_000),
        ("coda-p", 5, 3_840_000),
    ],
)
def test_prompting_parameters_on_vit_b_follow_the_papers_configurations(name, tasks, count):
    with torch.device("meta"):
        vit = ViT(ViTConfig(width=768, depth=12, heads=12, patch=16))
        method = METHODS[name](vit, METHODS[name].Options(), tasks)
    assert method.parameter_counts()["prompting"] == count


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("l2p++", {"length": 7}, "length.*multiple of 2"),
        ("l2p++", {"pool": 4}, "top=5 prompts cannot be chosen from a pool of 4"),
        ("l2p++", {"blocks": [6]}, r"blocks=\[6\] must be distinct blocks of 0–5"),
        ("l2p++", {"blocks": [-1]}, r"blocks=\[-1\] must be distinct"),
        ("dualprompt", {"blocks": [1, 2]}, r"blocks=\[0, 1, 1, 2\] must be distinct"),
        ("coda-p", {"pool": 2}, "pool=2 components are too few for 3 tasks"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        make_learner(name, **options)

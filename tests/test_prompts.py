"""Soft selection, quantization, the gradient, the two losses, and the method made of them."""

import math

import numpy as np
import pytest
import torch
from conftest import TINY, make_learner, make_stream, make_vit, same_tensors
from hypothesis import given
from hypothesis import strategies as st

from vqprompt.core.errors import UserError
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.methods.prompts import PromptPool, Spread
from vqprompt.research.methods.task import TaskInfo
from vqprompt.research.methods.vq_prompt import VQPrompt
from vqprompt.research.training.view import View

BLOCKS, SIZE, LENGTH, WIDTH, BATCH = 3, 5, 4, 8, 6


def soft_prompts(pool, query, *how, **named):
    return pool.mix(pool.weights(query, *how, **named))


def make_pool(**changes) -> PromptPool:
    shape = {"blocks": BLOCKS, "size": SIZE, "length": LENGTH, "width": WIDTH} | changes
    return PromptPool(**shape)


def draw_soft(pool: PromptPool) -> torch.Tensor:
    return torch.rand(BATCH, *pool.prompts.shape[:1], *pool.prompts.shape[2:]).requires_grad_()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class TestSoftSelection:
    @pytest.mark.parametrize("unit_keys", [True, False])
    @pytest.mark.parametrize("unit_query", [True, False])
    @pytest.mark.parametrize("tau", [0.5, 5.0])
    def test_formula(self, unit_keys, unit_query, tau):
        pool, queries = make_pool().double(), torch.randn(BATCH, WIDTH, dtype=torch.float64)
        found = soft_prompts(pool, queries, tau, unit_keys, unit_query).detach().numpy()
        keys, prompts = pool.keys.detach().numpy(), pool.prompts.detach().numpy()
        for b, query in enumerate(queries.numpy()):
            q = query / np.linalg.norm(query) if unit_query else query
            for m in range(BLOCKS):
                k = keys[m] / np.linalg.norm(keys[m], axis=1, keepdims=True) if unit_keys else keys[m]
                alpha = softmax(k @ q / tau)
                np.testing.assert_allclose(found[b, m], sum(a * p for a, p in zip(alpha, prompts[m], strict=True)))

    def test_defaults_are_the_released_code_s(self):
        """Keys of unit length, the query as it is, no temperature."""
        pool, queries = make_pool(), torch.randn(BATCH, WIDTH)
        written_out = soft_prompts(pool, queries, 1.0, normalize_keys=True, normalize_query=False)
        assert torch.equal(soft_prompts(pool, queries), written_out)

    def test_temperature_goes_from_one_prompt_to_their_mean(self):
        pool, queries = make_pool(), torch.randn(BATCH, WIDTH)
        torch.testing.assert_close(soft_prompts(pool, queries, 1e6)[0], pool.prompts.mean(1), rtol=1e-4, atol=1e-4)
        best = torch.einsum("d,mnd->mn", queries[0], torch.nn.functional.normalize(pool.keys, dim=-1)).argmax(-1)
        torch.testing.assert_close(soft_prompts(pool, queries, 1e-4)[0], pool.prompts[range(BLOCKS), best])

    def test_pool_and_keys_start_uniform(self):
        pool = PromptPool(blocks=5, size=10, length=8, width=64)
        for values in (pool.keys.detach(), pool.prompts.detach()):
            assert values.min() >= 0 and values.max() < 1
            assert abs(float(values.mean()) - 1 / 2) < 0.02 and abs(float(values.var()) - 1 / 12) < 0.01


class TestNearest:
    @given(
        blocks=st.integers(1, 3), size=st.integers(1, 6), half=st.integers(1, 2), width=st.integers(1, 4),
        batch=st.integers(1, 4), scale=st.sampled_from([0.01, 1.0, 30.0]), seed=st.integers(0, 999),
    )  # fmt: skip
    def test_brute_force(self, blocks, size, half, width, batch, scale, seed):
        torch.manual_seed(seed)
        pool = PromptPool(blocks, size, 2 * half, width).double()
        soft = torch.randn(batch, blocks, 2 * half, width, dtype=torch.float64) * scale
        found = pool.nearest(soft)
        assert found.shape == (batch, blocks)
        for b in range(batch):
            for m in range(blocks):
                distances = [float((soft[b, m] - pool.prompts[m, j].detach()).norm()) for j in range(size)]
                assert distances[found[b, m]] <= min(distances) + 1e-9


class TestStraightThrough:
    def test_forward_is_the_chosen_element(self):
        pool = make_pool()
        soft = draw_soft(pool)
        quantized = pool.quantize(soft)
        torch.testing.assert_close(quantized.prompt, pool.prompts[range(BLOCKS), pool.nearest(soft)])
        assert torch.equal(quantized.choice, pool.nearest(soft))

    def test_the_gradient_reaching_the_soft_prompt_is_the_gradient_of_the_prompt(self):
        pool = make_pool()
        soft = draw_soft(pool)
        weight = torch.randn_like(soft)
        (pool.quantize(soft).prompt * weight).sum().backward()
        assert torch.equal(soft.grad, weight)
        assert pool.prompts.grad is None, "the pool is reached through the soft prompt only"

    def test_through_the_whole_method(self, monkeypatch):
        """The task loss reaches p' with exactly the gradient of p, and the pool only through p' = alpha P."""
        method, view = start_method()
        kept = {}
        quantize = PromptPool.quantize

        def spy(pool, soft, *options):
            kept["soft"], kept["quantized"] = soft, quantize(pool, soft, *options)
            soft.retain_grad()
            kept["quantized"].prompt.retain_grad()
            return kept["quantized"]

        monkeypatch.setattr(PromptPool, "quantize", spy)
        method.losses(view)["task"].backward()
        gradient = kept["quantized"].prompt.grad
        assert gradient.abs().sum() > 0
        assert torch.equal(kept["soft"].grad, gradient)
        keys = torch.nn.functional.normalize(method.pool.keys.detach(), dim=-1)
        alpha = torch.softmax(torch.einsum("bd,mnd->bmn", view.query, keys), -1)
        torch.testing.assert_close(method.pool.prompts.grad, torch.einsum("bmn,bmld->mnld", alpha, gradient))
        assert method.pool.keys.grad.abs().sum() > 0


class TestLosses:
    def test_vq_loss_moves_only_the_chosen_elements(self):
        pool, queries = make_pool(), torch.randn(BATCH, WIDTH)
        soft = soft_prompts(pool, queries)
        soft.retain_grad()
        quantized = pool.quantize(soft)
        quantized.vq.backward()
        assert soft.grad is None and pool.keys.grad is None
        expected = torch.zeros_like(pool.prompts)
        for b in range(BATCH):
            for m in range(BLOCKS):
                j = quantized.choice[b, m]
                expected[m, j] += 2 * (pool.prompts[m, j] - soft[b, m]).detach() / (BATCH * LENGTH * WIDTH)
        torch.testing.assert_close(pool.prompts.grad, expected)
        used = torch.zeros(BLOCKS, SIZE, dtype=torch.bool)
        used[torch.arange(BLOCKS).expand(BATCH, -1), quantized.choice] = True
        assert not used.all(), "some element must be left out for this test to say anything"
        assert torch.equal(pool.prompts.grad.abs().sum((2, 3)) > 0, used)

    def test_commitment_loss_takes_the_soft_prompt_s_path_only(self):
        pool, queries = make_pool(), torch.randn(BATCH, WIDTH)
        soft = soft_prompts(pool, queries)
        quantized = pool.quantize(soft)
        expected = 2 * (soft - pool.prompts[range(BLOCKS), quantized.choice]).detach() / (BATCH * LENGTH * WIDTH)
        through_soft = torch.autograd.grad(soft, [pool.keys, pool.prompts], expected, retain_graph=True)
        found = torch.autograd.grad(quantized.commitment, [pool.keys, pool.prompts])
        for a, b in zip(found, through_soft, strict=True):
            torch.testing.assert_close(a, b)
            assert a.abs().sum() > 0

    def test_values(self):
        pool = make_pool()
        soft = draw_soft(pool).detach()
        hard = pool.prompts.detach()[range(BLOCKS), pool.nearest(soft)]
        squared = ((soft - hard) ** 2).double()
        means, norms = pool.quantize(soft, reduction="mean"), pool.quantize(soft, reduction="sum")
        assert means.vq.item() == pytest.approx(sum(float(squared[:, m].mean()) for m in range(BLOCKS)), rel=1e-5)
        assert norms.vq.item() == pytest.approx(float(squared.sum()) / BATCH, rel=1e-5)
        assert torch.equal(means.vq, means.commitment) and torch.equal(norms.vq, norms.commitment)


# ---------------------------------------------------------------------------------------------- the method


def start_method(cls=VQPrompt, classes=4, **options):
    torch.manual_seed(3)
    method = cls(make_vit(), cls.Options(**options), tasks=3)
    method.start_task(TaskInfo(0, 0, classes))
    images = torch.randn(BATCH, 3, 28, 28)
    return method, View(method.vit, lambda: images, labels=torch.arange(BATCH) % classes, task=0)


def test_defaults_are_the_paper_s():
    options = VQPrompt.Options()
    assert (options.pool, options.length, options.blocks) == (10, 8, [0, 1, 2, 3, 4])
    assert (options.vq_weight, options.commitment_weight) == (0.4, 0.1)
    assert (options.tau, options.normalize_keys, options.normalize_query) == (1, True, False)
    assert (options.placement, options.loss_reduction) == ("after", "mean")
    assert (options.prompt_lr_scale, options.quantize, options.statistics) == (5, True, True)
    assert (options.rebalancing.epochs, options.rebalancing.ratio, options.rebalancing.covariance) == (
        10,
        4,
        "diagonal",
    )


def test_loss_terms_carry_their_weights():
    losses = [start_method(vq_weight=q, commitment_weight=c) for q, c in [(0.4, 0.1), (0.1, 0.4), (0.0, 1.0)]]
    ours, swapped, bare = (method.losses(view) for method, view in losses)
    assert set(ours) == {"task", "vq", "commitment"}
    distance = bare["commitment"]
    assert bare["vq"] == 0
    torch.testing.assert_close([ours["vq"], ours["commitment"]], [0.4 * distance, 0.1 * distance])
    torch.testing.assert_close([swapped["vq"], swapped["commitment"]], [0.1 * distance, 0.4 * distance])


def test_placement_and_blocks_reach_the_vit(monkeypatch):
    method, view = start_method(blocks=[1, 5], placement="before", length=4)
    seen = {}

    def encode(tokens, prompts=None, placement="after", **others):
        if prompts:
            seen.update(placement=placement, shapes={i: p.shape for i, p in prompts.items()})
        return tokens[:, 0]

    monkeypatch.setattr(method.vit, "encode", encode)
    method.logits(view)
    assert seen == {"placement": "before", "shapes": dict.fromkeys([1, 5], (BATCH, 4, TINY.width))}


@pytest.mark.parametrize(
    ("simpler", "options", "terms"),
    [
        (METHODS["vq-prompt-s"], {"statistics": False}, {"task", "vq", "commitment"}),
        (METHODS["soft-prompt"], {"statistics": False, "quantize": False}, {"task"}),
    ],
)
def test_the_simpler_forms_are_the_same_class_with_options(simpler, options, terms):
    assert issubclass(simpler, VQPrompt)
    (a, view), (b, _) = start_method(simpler), start_method(VQPrompt, **options)
    assert a.options.model_dump() == b.options.model_dump()
    assert a.statistics is None and b.statistics is None
    assert torch.equal(a.logits(view), b.logits(view))
    losses = a.losses(view)
    assert set(losses) == terms
    assert all(torch.equal(losses[name], b.losses(view)[name]) for name in terms)


def test_soft_prompt_uses_the_soft_prompt_itself():
    method, view = start_method(METHODS["soft-prompt"])
    prompts = dict(enumerate(soft_prompts(method.pool, view.query, method.options.tau).unbind(1)))
    torch.testing.assert_close(method.features(view)[0], method.vit(view.images, prompts))


def test_quantized_method_uses_the_nearest_element():
    method, view = start_method()
    choice = method.choices(view.query)
    prompts = {i: method.pool.prompts[i, choice[:, i]] for i in range(5)}
    torch.testing.assert_close(method.features(view)[0], method.vit(view.images, prompts), rtol=1e-4, atol=1e-4)


def test_gradients_stay_out_of_the_backbone_and_the_query():
    method, view = start_method()
    sum(method.losses(view).values()).backward()
    assert not view.query.requires_grad
    assert all(p.grad is None for p in method.vit.parameters())


@pytest.mark.parametrize(
    "option",
    [{"length": 7}, {"pool": 0}, {"tau": 0}, {"placement": "beside"}, {"taw": 1}, {"blocks": []}, {"blocks": [0, 0]}],
)
def test_bad_options_are_refused_by_name(option):
    with pytest.raises(UserError, match=next(iter(option))):
        Learner(make_vit(), "vq-prompt", **option)


# ---------------------------------------------------------------------------------------------- old classes


class TestOldLogits:
    def test_no_gradient_reaches_old_rows(self):
        method, view = start_method(classes=3)
        method.start_task(TaskInfo(1, 3, 2))
        view.labels = torch.arange(BATCH) % 2 + 3
        method.losses(view)["task"].backward()
        assert torch.equal(method.head.weight.grad[:3], torch.zeros(3, TINY.width))
        assert torch.equal(method.head.bias.grad[:3], torch.zeros(3))
        assert method.head.weight.grad[3:].abs().sum() > 0

    def test_masked_loss_is_cross_entropy_with_minus_infinity(self):
        method, _ = start_method(classes=3)
        method.start_task(TaskInfo(1, 3, 2))
        logits, labels = torch.randn(BATCH, 5), torch.arange(BATCH) % 2 + 3
        masked = logits.masked_fill(torch.arange(5) < 3, float("-inf"))
        torch.testing.assert_close(method.task_loss(logits, labels), torch.nn.functional.cross_entropy(masked, labels))

    def test_old_rows_of_the_head_do_not_move(self):
        """Bit for bit, through a whole task; the new rows do."""
        learner, stream = make_learner("vq-prompt-s"), make_stream(tasks=2)
        kept = {}
        for task in stream:
            if kept:
                learner.learn(task)
                new = {"weight": learner.method.head.weight[:3], "bias": learner.method.head.bias[:3]}
                assert same_tensors(kept, new)
                assert learner.method.head.out_features == 6
            else:
                learner.learn(task)
                kept = {name: p.detach().clone() for name, p in learner.method.head.named_parameters()}


class TestSpread:
    """Beyond the paper: ways to use more of the pool."""

    def grouped_queries(self) -> torch.Tensor:
        """Three groups that differ little beside the large part that all queries share."""
        generator = torch.Generator().manual_seed(0)
        centers = torch.nn.functional.one_hot(torch.arange(3), 16).float()
        return 50 + centers.repeat_interleave(20, 0) + 0.01 * torch.randn(60, 16, generator=generator)

    def test_keys_by_k_means_send_each_group_to_its_own_prompt(self):
        queries = self.grouped_queries()
        torch.manual_seed(0)
        pool = PromptPool(2, 3, 4, 16, Spread(keys="k-means"))
        pool.start_keys(queries, seed=1)
        choices = pool.nearest(soft_prompts(pool, queries, 0.1)).view(3, 20, 2)
        assert (choices == choices[:, :1]).all()  # one prompt per group
        assert all(len(set(choices[:, 0, block].tolist())) == 3 for block in range(2))
        plain = PromptPool(2, 3, 4, 16)
        assert len(plain.nearest(soft_prompts(plain, queries, 0.1)).unique(dim=0)) == 1  # without it all share one

    def test_fewer_queries_than_keys(self):
        torch.manual_seed(0)
        pool = PromptPool(1, 5, 4, 16, Spread(keys="k-means"))
        before = pool.keys.detach().clone()
        pool.start_keys(self.grouped_queries()[:2], seed=1)
        assert torch.equal(pool.keys[:, 2:], before[:, 2:]) and not torch.equal(pool.keys[:, :2], before[:, :2])

    def test_balance_is_zero_only_if_all_prompts_are_used_equally(self):
        pool = PromptPool(2, 4, 4, 16, Spread(balance=0.5))
        equal = torch.eye(4)[:, None].expand(-1, 2, -1)  # each image surely gets another prompt
        one = torch.eye(4)[:1, None].expand(8, 2, -1)
        assert pool.balance(equal)["balance"].item() == pytest.approx(0, abs=1e-6)
        assert pool.balance(one)["balance"].item() == pytest.approx(0.5 * math.log(4), abs=1e-5)

    @pytest.mark.parametrize("method", ["vq-prompt", "moving-prompts"])
    def test_a_learner_with_it_saves_and_loads(self, method, tmp_path):
        learner = make_learner(method, pool=3, spread={"keys": "k-means", "balance": 0.1}, tau=0.1)
        task = next(iter(make_stream()))
        learner.learn(task)
        assert learner.method.pool.center.abs().max() > 0
        learner.save(tmp_path)
        again = Learner.load(tmp_path, backbone=make_vit(), device="cpu", compile="off")
        images = [np.full((28, 28, 3), shade, np.uint8) for shade in (0, 100, 255)]
        assert torch.equal(again.predict_proba(images), learner.predict_proba(images))

"""The ViT against an independent float64 transformer, written here with loops, einsum and no fused attention."""

import math

import numpy as np
import pytest
import torch
from conftest import TINY, make_vit
from PIL import Image

from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.errors import UserError

SHAPES = [TINY, ViTConfig(width=48, depth=3, heads=4, patch=7, image_size=35), ViTConfig(30, 2, 5, 8, 8, mlp_ratio=2.5)]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def reference(vit, images, prompts=None, placement="after"):
    """Class-token features from the state dict alone; every token goes through every block."""
    s = {name: t.double() for name, t in vit.state_dict().items()}
    c, p, prompts = vit.config, vit.config.patch, prompts or {}
    batch, width, head = len(images), c.width, c.width // c.heads
    tiles = images.double().unfold(2, p, p).unfold(3, p, p)  # [B, 3, rows, columns, p, p]
    patches = torch.einsum("bcyxij,dcij->byxd", tiles, s["patch_embed.proj.weight"]) + s["patch_embed.proj.bias"]
    x = torch.cat([s["cls_token"].repeat(batch, 1, 1), patches.reshape(batch, -1, width)], 1) + s["pos_embed"]
    for i in range(c.depth):
        w = {name.removeprefix(f"blocks.{i}."): t for name, t in s.items() if name.startswith(f"blocks.{i}.")}
        (wq, wk, wv), (bq, bk, bv) = w["attn.qkv.weight"].split(width), w["attn.qkv.bias"].split(width)
        prompt = prompts.get(i)
        if prompt is not None:
            prompt = prompt.double().expand(batch, -1, -1)
            if placement == "tokens":
                x = torch.cat([x, prompt], 1)
        h = norm(x, w["norm1.weight"], w["norm1.bias"], c.eps)
        q, k, v = h @ wq.T + bq, h @ wk.T + bk, h @ wv.T + bv
        if prompt is not None and placement != "tokens":
            half = prompt.shape[1] // 2
            first, second = prompt[:, :half], prompt[:, half:]
            if placement == "before":
                first, second = first @ wk.T + bk, second @ wv.T + bv
            k, v = torch.cat([first, k], 1), torch.cat([second, v], 1)
        mixed = []
        for j in range(c.heads):
            part = slice(j * head, (j + 1) * head)
            scores = torch.exp(torch.einsum("bqd,bkd->bqk", q[..., part], k[..., part]) / math.sqrt(head))
            mixed.append(torch.einsum("bqk,bkd->bqd", scores / scores.sum(-1, keepdim=True), v[..., part]))
        x = x + torch.cat(mixed, -1) @ w["attn.proj.weight"].T + w["attn.proj.bias"]
        h = norm(x, w["norm2.weight"], w["norm2.bias"], c.eps) @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + h @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]
    return norm(x, s["norm.weight"], s["norm.bias"], c.eps)[:, 0]


def draw_images(config, batch=3):
    return torch.randn(batch, 3, config.image_size, config.image_size, dtype=torch.float64)


def draw_prompts(config, batch=3, length=6):
    """In the first, a middle and the last block (whose output is the class token alone)."""
    blocks = {0, config.depth // 2, config.depth - 1}
    return {i: torch.randn(batch, length, config.width, dtype=torch.float64) for i in blocks}


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: f"w{c.width}d{c.depth}h{c.heads}p{c.patch}")
class TestAgainstReference:
    def test_without_prompts(self, config):
        vit, images = make_vit(config).double(), draw_images(config)
        torch.testing.assert_close(vit(images), reference(vit, images), **TOLERANCE)

    @pytest.mark.parametrize("placement", ["after", "before", "tokens"])
    def test_with_prompts(self, config, placement):
        vit, images, prompts = make_vit(config).double(), draw_images(config), draw_prompts(config)
        expected = reference(vit, images, prompts, placement)
        torch.testing.assert_close(vit(images, prompts, placement), expected, **TOLERANCE)
        assert not torch.allclose(expected, reference(vit, images), atol=1e-2), "prompts must matter"

    @pytest.mark.parametrize("placement", ["after", "before", "tokens"])
    def test_gradient_of_prompts(self, config, placement):
        vit, images, prompts = make_vit(config).double(), draw_images(config), draw_prompts(config)
        leaves = [p.requires_grad_() for p in prompts.values()]
        weight = torch.randn(len(images), config.width, dtype=torch.float64)
        found = torch.autograd.grad((vit(images, prompts, placement) * weight).sum(), leaves)
        expected = torch.autograd.grad((reference(vit, images, prompts, placement) * weight).sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)


def test_single_precision_stays_close():
    vit, images, prompts = make_vit(), draw_images(TINY), draw_prompts(TINY)
    found = vit(images.float(), {i: p.float() for i, p in prompts.items()})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference(vit, images, prompts), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("placement", ["after", "before", "tokens"])
def test_one_prompt_serves_the_whole_batch(placement):
    vit, images = make_vit(), draw_images(TINY).float()
    shared = {i: p[:1].float() for i, p in draw_prompts(TINY).items()}
    repeated = {i: p.repeat(len(images), 1, 1) for i, p in shared.items()}
    torch.testing.assert_close(vit(images, shared, placement), vit(images, repeated, placement))


def test_last_block_computes_the_class_token_alone():
    block = make_vit(TINY).double().blocks[-1]
    x, prompt = torch.randn(2, 7, TINY.width, dtype=torch.float64), torch.randn(2, 4, TINY.width, dtype=torch.float64)
    for given in (None, prompt):
        alone = sum(block(x, prompt=given, class_token_only=True))  # tokens, and what is still to be added to them
        assert alone.shape == (2, 1, TINY.width)
        torch.testing.assert_close(alone, sum(block(x, prompt=given))[:, :1], **TOLERANCE)


def test_query_and_prompted_pass_share_the_embedding():
    vit, images, prompts = make_vit(), draw_images(TINY).float(), draw_prompts(TINY)
    tokens = vit.embed(images)
    assert tokens.shape == (3, TINY.tokens, TINY.width)
    assert torch.equal(vit.encode(tokens), vit(images))
    assert torch.equal(vit.encode(tokens, prompts), vit(images, prompts))


class TestResize:
    def grid(self, vit: ViT) -> np.ndarray:
        side = vit.config.image_size // vit.config.patch
        return vit.pos_embed.detach()[0, 1:].reshape(side, side, -1).numpy()

    def test_same_size_changes_nothing(self):
        vit = make_vit()
        before, state = vit.pos_embed, {k: v.clone() for k, v in vit.state_dict().items()}
        assert vit.resize(28) is vit
        assert vit.pos_embed is before
        assert all(torch.equal(v, state[k]) for k, v in vit.state_dict().items())

    @pytest.mark.parametrize("size", [14, 42, 70, 224])
    def test_takes_images_of_the_new_size(self, size):
        vit = make_vit().resize(size)
        assert vit.config.image_size == size
        assert vit.pos_embed.shape == (1, (size // 14) ** 2 + 1, TINY.width)
        assert torch.equal(vit.pos_embed[:, 0], make_vit().pos_embed[:, 0]), "the class token has no place in the grid"
        assert not vit.pos_embed.requires_grad
        images = draw_images(vit.config, batch=1)
        torch.testing.assert_close(vit.double()(images), reference(vit, images), **TOLERANCE)

    def test_growing_is_bicubic(self):
        vit = make_vit(ViTConfig(width=8, depth=1, heads=1, patch=14, image_size=56))
        before = self.grid(vit)
        after = self.grid(vit.resize(98))
        rows = self.cubic_weights(4, 7)
        np.testing.assert_allclose(after, np.einsum("yi,xj,ijd->yxd", rows, rows, before), atol=1e-5)

    @staticmethod
    def cubic_weights(old: int, new: int, a: float = -0.75) -> np.ndarray:
        """Keys' cubic convolution, edges repeated, written from its formula."""

        def kernel(t: float) -> float:
            t = abs(t)
            if t <= 1:
                return (a + 2) * t**3 - (a + 3) * t**2 + 1
            return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

        weights = np.zeros((new, old))
        for i in range(new):
            centre = (i + 0.5) * old / new - 0.5
            for j in range(math.floor(centre) - 1, math.floor(centre) + 3):
                weights[i, min(max(j, 0), old - 1)] += kernel(centre - j)
        return weights

    def test_shrinking_averages_as_pillow_does(self):
        vit = make_vit(ViTConfig(width=8, depth=1, heads=1, patch=14, image_size=112))
        before = self.grid(vit)
        after = self.grid(vit.resize(42))
        for d in range(8):
            expected = Image.fromarray(before[..., d]).resize((3, 3), Image.Resampling.BICUBIC)
            np.testing.assert_allclose(after[..., d], np.asarray(expected), atol=1e-4)

    @pytest.mark.parametrize(("size", "nearest"), [(30, 28), (36, 42), (5, 14), (13, 14), (225, 224)])
    def test_impossible_size_names_the_nearest(self, size, nearest):
        vit = make_vit()
        with pytest.raises(UserError, match=rf"\b{size}\b.*\b14\b.*\b{nearest}\b"):
            vit.resize(size)
        assert vit.config == TINY, "a refusal changes nothing"


def test_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"33.*2 heads"):
        ViTConfig(width=33, heads=2)


def test_image_size_of_a_config_must_fit_its_patch():
    with pytest.raises(UserError, match="nearest that does is 224"):
        ViTConfig(patch=14, image_size=220)

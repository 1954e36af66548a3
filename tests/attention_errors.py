"""How far our kernels of attention are from attention in double precision.

As a program it prints the errors that Triton's interpreter finds, which needs no GPU: TRITON_INTERPRET=1 python ...
"""

import json

import torch
from conftest import make_stream
from torch import Tensor

from vqprompt.core.backbones import vit as vit_module
from vqprompt.core.backbones.attention import attention
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.research.learner.learner import Learner
from vqprompt.research.training.settings import Training

# images, heads, tokens, rows of prompts, queries if they are others, prompts for all images, whether tokens learn
CASES = {
    "whole tiles": (1, 1, 64, 0, None, False, True),
    "tokens left over, and prompts": (2, 2, 70, 4, None, False, True),
    "less than a tile, one prompt for all": (2, 1, 26, 10, None, True, True),
    "the class token alone": (2, 1, 65, 4, 1, False, True),
    "only a prompt learns": (2, 1, 66, 3, None, False, False),
    "two tiles left over": (1, 1, 115, 40, None, False, True),
}


def plain(kv: Tensor, q: Tensor | None, prompt: Tensor | None, heads: int) -> Tensor:
    width = heads * 64
    q, k, v = kv.split(width, -1) if q is None else (q, *kv.split(width, -1))
    if prompt is not None:
        k, v = (
            torch.cat([rows.expand(len(kv), -1, -1), t], 1) for rows, t in zip(prompt.chunk(2, 1), (k, v), strict=True)
        )
    q, k, v = (t.unflatten(-1, (heads, 64)).transpose(1, 2) for t in (q, k, v))
    return ((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2)


def computed(case: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients: ours, and those in double precision."""
    images, heads, tokens, rows, queries, for_all, learn = CASES[case]
    width, generator = heads * 64, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    kv = draw(images, tokens, width * (3 if queries is None else 2))
    q = None if queries is None else draw(images, queries, width)
    prompt = draw(1 if for_all else images, 2 * rows, width) if rows else None
    upstream, results = draw(images, queries or tokens, width), []
    for compute, kind in ((attention, dtype), (plain, torch.float64)):
        given = [None if t is None else t.detach().to(kind) for t in (kv, q, prompt)]
        learning = [t.requires_grad_() for t in given if t is not None and (learn or t is given[2])]
        out = compute(*given, heads)
        results.append([out.detach(), *torch.autograd.grad(out, learning, upstream.to(kind))])
    return results[0], results[1]


def largest_error(case: str, device: str, dtype: torch.dtype) -> float:
    """Of outputs and gradients, relative to their size."""
    ours, exact = computed(case, device, dtype)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


def learned(kernels: bool) -> Tensor:
    """Scores of a small network that learned a task with VQ-Prompt, with our kernels in every block or without."""
    vit_module.has_kernels = lambda *_: kernels
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=64, depth=3, heads=1, patch=14, image_size=28))
    learner = Learner(vit, training=Training(epochs=1, batch_size=8, lr=0.01), device="cpu", blocks=[0, 1])
    task = next(iter(make_stream()))
    learner.learn(task)
    return learner.logits(task.test)


if __name__ == "__main__":
    from triton.runtime.interpreter import _LangPatchScope

    set_attribute = _LangPatchScope.set_attr  # numpy no longer takes an array of one number for a whole number

    def whole(scope: object, owner: object, name: str, value: object) -> None:
        number = name == "__index__"
        set_attribute(scope, owner, name, (lambda tensor: int(tensor.handle.data.item())) if number else value)

    _LangPatchScope.set_attr = whole
    errors = {case: largest_error(case, "cpu", torch.float32) for case in CASES}
    scores, exact = learned(True), learned(False)
    print(json.dumps({**errors, "a network that learns": float((scores - exact).norm() / exact.norm())}))

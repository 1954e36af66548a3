"""The fast path (compiled, bf16, recorded) is held to the plain one (eager, fp32)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, make_stream, make_vit

from vqprompt.core.backbones.vit import ViT, ViTConfig, gelu
from vqprompt.core.data.images import Images
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Task
from vqprompt.core.data.views import random_boxes, render
from vqprompt.core.runtime.device import Runtime
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.runs.costs import forget_peak, memory_used
from vqprompt.research.training.cuda_graph import GraphedStep
from vqprompt.research.training.settings import Training

needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
def test_compiled_blocks_compute_what_plain_ones_do():
    plain, compiled = make_vit(), make_vit().compile_blocks()
    images = torch.randn(4, 3, TINY.image_size, TINY.image_size)
    prompts = {block: torch.rand(4, 8, TINY.width) for block in range(2)}
    torch.testing.assert_close(compiled(images, prompts), plain(images, prompts), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(compiled(images), compiled(images, prompts), atol=1e-3), "the prompts must matter"
    fewer, their = images[:3], {block: prompt[:3] for block, prompt in prompts.items()}
    with torch._dynamo.config.patch(error_on_recompile=True):  # one compilation serves batches of every size
        torch.testing.assert_close(compiled(fewer, their), plain(fewer, their), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_compiled_rendering_draws_what_the_plain_one_does():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=generator)
    boxes = random_boxes(torch.linspace(0.5, 2, 6), generator)
    flips = torch.tensor([True, False] * 3)
    plain = render(pixels, boxes, flips, TINY)
    torch.testing.assert_close(render(pixels, boxes, flips, TINY, compiled=True), plain, rtol=1e-4, atol=1e-4)


def test_gelu_in_bf16_is_within_two_steps_of_the_exact_one():
    x = torch.linspace(-6, 6, 4001)
    ours = gelu(x.bfloat16()).float()
    exact = torch.nn.functional.gelu(x.bfloat16().double()).float()
    spacing = torch.maximum(exact.abs(), torch.tensor(0.25)) * 2**-7  # of bf16 numbers of that size
    assert ((ours - exact).abs() <= 2 * spacing).all()
    assert torch.equal(gelu(x), torch.nn.functional.gelu(x)), "in fp32 it is the exact one"


@needs_cuda
def test_a_run_is_not_charged_for_the_memory_of_the_run_before():
    device, million = torch.device("cuda"), 1 << 20
    before = torch.zeros(100 * million, dtype=torch.uint8, device=device)
    circle = [before]
    circle.append(circle)
    assert memory_used(device) >= 100 * million
    del before, circle
    forget_peak(device)
    assert memory_used(device) < 100 * million


def test_the_memory_of_a_run_is_measured_from_its_start(monkeypatch):
    forgotten = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    for name in ("cpu", "cuda:1"):
        forget_peak(torch.device(name))
    assert forgotten == [torch.device("cuda:1")]


@needs_cuda
@pytest.mark.parametrize("method", ["vq-prompt", "ft", "lwf"])
def test_recorded_and_compiled_bf16_learns_what_plain_fp32_does(method):
    settings = Training(epochs=6, batch_size=8, lr=1e-3 if method == "vq-prompt" else 1e-4)
    learners = [
        Learner(make_vit(), method, training=settings, device="cuda", precision=precision, compile=compile)
        for precision, compile in (("fp32", "off"), ("bf16", "on"))
    ]
    scores = []
    for learner in learners:
        stream = make_stream()
        for task in stream:
            learner.learn(task)
        scores.append(learner.logits(stream.tasks[0].test))
    plain, fast = scores
    assert (plain - fast).abs().mean() < 0.2 * plain.std()


@needs_cuda
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_the_same_bits_twice(method):
    def learned():
        learner = Learner(make_vit(), method, training=Training(epochs=2, batch_size=8), device="cuda", compile="off")
        stream = make_stream(tasks=1 if METHODS[method].joint else 3)
        for task in stream:
            learner.learn(task)
        answers = learner.test(stream.tasks)
        return {**learner.method.state_dict(), "guesses": answers.guesses, "probability": answers.probability}

    first, second = learned(), learned()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_attention_is_that_of_double_precision_in_an_interpreter():
    pytest.importorskip("triton")
    program = Path(__file__).with_name("attention_errors.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 7 and max(errors.values()) < 1e-5, errors


@needs_cuda
def test_attention_on_the_gpu_is_within_the_rounding_of_bf16_and_repeats_its_bits():
    from attention_errors import CASES, computed, largest_error

    CASES["as long as that of 224 px"] = (8, 6, 257, 4, None, False, True)
    for case in CASES:
        assert largest_error(case, "cuda", torch.bfloat16) < 4e-3, case
        first, again = (computed(case, "cuda", torch.bfloat16)[0] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), case


@needs_cuda
def test_the_gradient_of_long_attention_is_the_same_bits_every_time():
    """PyTorch's, where our kernels do not compute it. As long as that of 224 px: short ones fit into one tile, and are
    the same anyway."""
    cuda = torch.device("cuda")
    q, k, v = (torch.randn(64, 6, n, 64, device=cuda, dtype=torch.bfloat16) for n in (257, 261, 261))
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def gradients():
        return torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v))

    with Runtime(cuda).repeatable():
        first = gradients()
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(gradients(), first, strict=True))
    assert not torch.are_deterministic_algorithms_enabled(), "it is left as it was"


@needs_cuda
@pytest.mark.parametrize("compile", ["off", "on"])
def test_long_sequences_give_the_same_bits_every_time(compile):
    vit = ViT(ViTConfig(width=128, depth=5, heads=2, patch=14, image_size=224))
    pixels = np.random.default_rng(0).integers(0, 256, (128, 3, 256, 256), dtype=np.uint8)
    images = Images(Store(pixels, np.ones(len(pixels)), ""), np.arange(len(pixels)), np.arange(len(pixels)) % 2)

    def learned_and_seen():
        settings = Training(epochs=2, batch_size=32)
        learner = Learner(vit, "vq-prompt", training=settings, device="cuda", compile=compile)
        learner.learn(Task(0, ["a", "b"], images, images))
        features = [learner.features(images) for _ in range(5)]
        return [*learner.method.pool.parameters(), *learner.method.head.parameters(), *features]

    first, second = learned_and_seen(), learned_and_seen()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(features, first[-1]) for features in first[-5:])


@needs_cuda
def test_recorded_losses_are_those_of_each_step(monkeypatch):
    """A replay writes over what the last one returned."""
    found = []
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(GraphedStep, "__call__", lambda self, inputs: self.step(inputs))
        settings = Training(epochs=3, batch_size=4, lr=1e-3)
        learner = Learner(make_vit(), "vq-prompt", training=settings, device="cuda", precision="fp32", compile="off")
        for task in make_stream():
            found += [(recorded, epoch.losses) for epoch in learner.epochs(task)]
    replayed, plain = ([losses for r, losses in found if r is kind] for kind in (True, False))
    assert [len(losses["task"]) for losses in replayed] == [4] * 9
    for a, b in zip(replayed, plain, strict=True):
        assert {name: pytest.approx(values, rel=1e-3, abs=1e-4) for name, values in a.items()} == b

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Attention on Nvidia GPUs in bf16, with prompts among keys and values; its gradient, too. Written in Triton.

What is notable about this implementation:
- queries, keys and values are read where the projection left them, and prompts from their own tensor; gradients are
  written the same way, so nothing is transposed, joined or copied
- a few hundred tokens fill large tiles badly (257 = 4 × 64 + 1): what is left over gets a small tile of its own, which
  tokens and prompts share
- every sum has one order, so the same numbers give the same bits every time
- where only a prompt learns, nothing is computed for the tokens
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

WIDTH = tl.constexpr(64)  # of a head
SCALE = tl.constexpr(64**-0.5)
LOG2_SCALE = tl.constexpr(64**-0.5 * 1.4426950408889634)  # exp2 is faster than exp
LARGE, SMALL = 64, 32  # rows of tiles: those that a program keeps, and those that pass by; measured on an H200

# q, k, v, grad point to one head of one image, pk and pv to its prompt; q_step, k_step, width: from row to row.
# queries, keys, prompts: numbers of rows; left: of those that fill no whole tile. whole: a tile that needs no mask.
# lse: for each query, the log2 of its sum of powers of 2. delta: the sum of its outputs times their gradients.


@triton.jit
def _at(base, first, rows: tl.constexpr, step):
    return base + (first + tl.arange(0, rows))[:, None] * step + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(base, first, rows: tl.constexpr, step, end, whole: tl.constexpr):
    """Rows from `first` on, of 64 numbers each; zeros from row `end` on."""
    at = _at(base, first, rows, step)
    return tl.load(at) if whole else tl.load(at, mask=(first + tl.arange(0, rows) < end)[:, None], other=0.0)


@triton.jit
def _store(base, first, rows: tl.constexpr, step, end, whole: tl.constexpr, values):
    at, values = _at(base, first, rows, step), values.to(base.dtype.element_ty)
    if whole:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(first + tl.arange(0, rows) < end)[:, None])


@triton.jit
def _load_rest(tokens, prompt, first, left, prompts: tl.constexpr, rows: tl.constexpr, step, width):
    """The tokens that are left, then the rows of the prompt, then zeros."""
    values = _load(tokens, first, rows, step, first + left, False)
    if prompts > 0:
        row = tl.arange(0, rows) - left
        own = ((row >= 0) & (row < prompts))[:, None]
        values += tl.load(_at(prompt, -left, rows, width), mask=own, other=0.0)
    return values


@triton.jit
def _place(tiles, heads: tl.constexpr):
    """Which tile, head and image this program works on."""
    number = tl.program_id(0)
    return number % tiles, number // tiles % heads, (number // tiles // heads).to(tl.int64)


@triton.jit
def _attend_keys(q, k, v, best, total, mixed, valid, whole: tl.constexpr):
    """Add some keys to a running softmax: the best score so far, the sum of powers of 2, the mix of values."""
    score = tl.dot(q, tl.trans(k))
    if not whole:
        score = tl.where((tl.arange(0, k.shape[0]) < valid)[None, :], score, float("-inf"))
    new = tl.maximum(best, tl.max(score, 1) * LOG2_SCALE)
    weight, fade = tl.exp2(score * LOG2_SCALE - new[:, None]), tl.exp2(best - new)
    mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None])
    return new, total * fade + tl.sum(weight, 1), mixed


@triton.jit
def _add_keys(q, grad, k, v, lse, delta, grad_q, valid, whole: tl.constexpr):
    """Add what some keys contribute to the gradient of queries."""
    weight = tl.exp2(tl.dot(q, tl.trans(k)) * LOG2_SCALE - lse[:, None])
    if not whole:
        weight = tl.where((tl.arange(0, k.shape[0]) < valid)[None, :], weight, 0.0)
    grad_score = weight * (tl.dot(grad, tl.trans(v)) - delta[:, None])
    return tl.dot(grad_score.to(k.dtype), k, grad_q)


@triton.jit
def _query_tile(q, k, v, pk, pv, out, lse, grad, delta, grad_q, first, queries, keys, prompts: tl.constexpr, q_step,
                k_step, width, rows: tl.constexpr, small: tl.constexpr, rest: tl.constexpr, forward: tl.constexpr,
                learns: tl.constexpr, whole: tl.constexpr):  # fmt: skip
    left, row = keys % small, first + tl.arange(0, rows)
    best, total = tl.full([rows], float("-inf"), tl.float32), tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, WIDTH], tl.float32)  # the mix of values, or the gradient of queries
    if not forward:
        incoming = _load(grad, first, rows, width, queries, whole)
        best = tl.load(lse + row, mask=row < queries, other=0.0)
        total = tl.sum(_load(out, first, rows, width, queries, whole).to(tl.float32) * incoming.to(tl.float32), 1)
        tl.store(delta + row, total, mask=row < queries)
    if learns:
        query = _load(q, first, rows, q_step, queries, whole)
        if rest > 0:  # loaded before the loop, which hides the wait
            rest_k = _load_rest(k, pk, keys - left, left, prompts, rest, k_step, width)
            rest_v = _load_rest(v, pv, keys - left, left, prompts, rest, k_step, width)
        for n in tl.range(0, keys // small, num_stages=3):
            key = _load(k, n * small, small, k_step, keys, True)
            value = _load(v, n * small, small, k_step, keys, True)
            if forward:
                best, total, result = _attend_keys(query, key, value, best, total, result, small, True)
            else:
                result = _add_keys(query, incoming, key, value, best, total, result, small, True)
        if rest > 0:
            if forward:
                best, total, result = _attend_keys(query, rest_k, rest_v, best, total, result, left + prompts, False)
            else:
                result = _add_keys(query, incoming, rest_k, rest_v, best, total, result, left + prompts, False)
        if forward:
            _store(out, first, rows, width, queries, whole, result / total[:, None])
            tl.store(lse + row, best + tl.log2(total), mask=row < queries)
        else:
            _store(grad_q, first, rows, q_step, queries, whole, result * SCALE)


@triton.jit(do_not_specialize=["queries", "keys"])
def _queries(q, kv, prompt, out, lse, grad, delta, grad_q, prompt_step, queries, keys, heads: tl.constexpr,
             prompts: tl.constexpr, q_step: tl.constexpr, k_step: tl.constexpr, large: tl.constexpr, last: tl.constexpr,
             small: tl.constexpr, rest: tl.constexpr, forward: tl.constexpr, learns: tl.constexpr):  # fmt: skip
    """Outputs, or `delta` and the gradient of queries. A program takes some queries of one head, and all keys. learns:
    whether more than `delta` is wanted."""
    width: tl.constexpr = heads * WIDTH
    tile, head, image = _place(tl.cdiv(queries, large), heads)
    q, grad_q = q + image * queries * q_step + head * WIDTH, grad_q + image * queries * q_step + head * WIDTH
    k = kv + image * keys * k_step + k_step - 2 * width + head * WIDTH
    pk = prompt + image * prompt_step + head * WIDTH
    v, pv = k + width, pk + prompts * width
    out, grad = out + image * queries * width + head * WIDTH, grad + image * queries * width + head * WIDTH
    lse, delta = lse + (image * heads + head) * queries, delta + (image * heads + head) * queries
    if tile < queries // large:
        _query_tile(q, k, v, pk, pv, out, lse, grad, delta, grad_q, tile * large, queries, keys, prompts, q_step,
                    k_step, width, large, small, rest, forward, learns, True)  # fmt: skip
    elif last > 0:
        _query_tile(q, k, v, pk, pv, out, lse, grad, delta, grad_q, tile * large, queries, keys, prompts, q_step,
                    k_step, width, last, small, rest, forward, learns, False)  # fmt: skip


@triton.jit
def _add_queries(k, v, q, grad, lse, delta, grad_k, grad_v):
    weight = tl.exp2(tl.dot(k, tl.trans(q)) * LOG2_SCALE - lse[None, :])
    grad_v = tl.dot(weight.to(grad.dtype), grad, grad_v)
    grad_score = weight * (tl.dot(v, tl.trans(grad)) - delta[None, :])
    return tl.dot(grad_score.to(q.dtype), q, grad_k), grad_v


@triton.jit
def _key_tile(k, v, q, grad, lse, delta, queries, q_step, width, small: tl.constexpr, last: tl.constexpr):
    """The gradients of some keys and values."""
    left = queries % small
    grad_k, grad_v = tl.zeros(k.shape, tl.float32), tl.zeros(k.shape, tl.float32)
    if last > 0:
        row = queries - left + tl.arange(0, last)
        rest_q = _load(q, queries - left, last, q_step, queries, False)
        rest_grad = _load(grad, queries - left, last, width, queries, False)
        rest_lse = tl.load(lse + row, mask=row < queries, other=float("inf"))  # then the weight is 0
        rest_delta = tl.load(delta + row, mask=row < queries, other=0.0)
    for n in tl.range(0, queries // small, num_stages=3):
        at = n * small + tl.arange(0, small)
        query = _load(q, n * small, small, q_step, queries, True)
        incoming = _load(grad, n * small, small, width, queries, True)
        grad_k, grad_v = _add_queries(
            k, v, query, incoming, tl.load(lse + at), tl.load(delta + at), grad_k, grad_v
        )  # fmt: skip
    if last > 0:
        grad_k, grad_v = _add_queries(k, v, rest_q, rest_grad, rest_lse, rest_delta, grad_k, grad_v)
    return grad_k * SCALE, grad_v


@triton.jit(do_not_specialize=["queries", "keys"])
def _key_gradient(q, kv, prompt, grad, lse, delta, grad_kv, grad_prompt, prompt_step, queries, keys,
                  heads: tl.constexpr, prompts: tl.constexpr, q_step: tl.constexpr, k_step: tl.constexpr,
                  large: tl.constexpr, rest: tl.constexpr, small: tl.constexpr, last: tl.constexpr,
                  learns: tl.constexpr):  # fmt: skip
    """A program takes some keys and values of one head, and all queries. learns: not only the prompt does."""
    width: tl.constexpr = heads * WIDTH
    left, full = keys % large, keys // large
    tile, head, image = _place((full if learns else 0) + (rest > 0), heads)
    q, grad = q + image * queries * q_step + head * WIDTH, grad + image * queries * width + head * WIDTH
    lse, delta = lse + (image * heads + head) * queries, delta + (image * heads + head) * queries
    start = image * keys * k_step + k_step - 2 * width + head * WIDTH
    k, v, own_k, own_v = kv + start, kv + start + width, grad_kv + start, grad_kv + start + width
    if learns and tile < full:
        key = _load(k, tile * large, large, k_step, keys, True)
        value = _load(v, tile * large, large, k_step, keys, True)
        grad_k, grad_v = _key_tile(key, value, q, grad, lse, delta, queries, q_step, width, small, last)
        _store(own_k, tile * large, large, k_step, keys, True, grad_k)
        _store(own_v, tile * large, large, k_step, keys, True, grad_v)
    elif rest > 0:
        pk = prompt + image * prompt_step + head * WIDTH
        rest_k = _load_rest(k, pk, keys - left, left, prompts, rest, k_step, width)
        rest_v = _load_rest(v, pk + prompts * width, keys - left, left, prompts, rest, k_step, width)
        rest_grad_k, rest_grad_v = _key_tile(rest_k, rest_v, q, grad, lse, delta, queries, q_step, width, small, last)
        if learns:
            _store(own_k, keys - left, rest, k_step, keys, False, rest_grad_k)
            _store(own_v, keys - left, rest, k_step, keys, False, rest_grad_v)
        if prompts > 0:
            row = tl.arange(0, rest) - left
            at = _at(grad_prompt + image * 2 * prompts * width + head * WIDTH, -left, rest, width)
            own = ((row >= 0) & (row < prompts))[:, None]
            tl.store(at, rest_grad_k.to(grad_prompt.dtype.element_ty), mask=own)
            tl.store(at + prompts * width, rest_grad_v.to(grad_prompt.dtype.element_ty), mask=own)


# ------------------------------------------------------------------------------------------------------ PyTorch


def _rows(count: int) -> int:
    """Rows of the smallest tile with room for so many."""
    return max(16, 1 << (count - 1).bit_length()) if count else 0


def _given(kv: Tensor, q: Tensor | None, prompt: Tensor | None, heads: int) -> tuple[list[Tensor], list[int]]:
    """What all kernels get: tensors, then a distance and sizes."""
    kv = kv.contiguous()
    q = kv if q is None else q.contiguous()
    if prompt is not None and prompt.stride()[1:] != (prompt.shape[2], 1):
        prompt = prompt.contiguous()
    step, prompts = (0, 0) if prompt is None else (prompt.stride(0) * (len(prompt) > 1), prompt.shape[1] // 2)
    sizes = [step, q.shape[1], kv.shape[1], heads, prompts, q.shape[2], kv.shape[2]]
    return [q, kv, kv if prompt is None else prompt], sizes


def _attention(kv: Tensor, q: Tensor | None, prompt: Tensor | None, heads: int) -> list[Tensor]:
    tensors, sizes = _given(kv, q, prompt, heads)
    _, queries, keys, _, prompts, *_ = sizes
    out, lse = _room_for_outputs(kv, q, prompt, heads)
    tiles = [LARGE, _rows(queries % LARGE), SMALL, _rows(keys % SMALL + prompts)]
    unused = [out, lse, out]  # in place of gradients
    _queries[(-(-queries // LARGE) * len(kv) * heads,)](
        *tensors, out, lse, *unused, *sizes, *tiles, True, True, num_warps=4, maxnreg=96
    )  # fmt: skip
    return [out, lse]


def _attention_gradient(
    grad: Tensor, kv: Tensor, q: Tensor | None, prompt: Tensor | None, out: Tensor, lse: Tensor, heads: int,
    learns: bool,
) -> list[Tensor]:  # fmt: skip
    tensors, sizes = _given(kv, q, prompt, heads)
    _, queries, keys, _, prompts, *_ = sizes
    grad, delta = grad.contiguous(), torch.empty_like(lse)
    gradients = _room_for_gradients(grad, kv, q, prompt, out, lse, heads, learns)
    tiles = [LARGE, _rows(queries % LARGE), SMALL, _rows(keys % SMALL + prompts), False, learns]
    _queries[(-(-queries // LARGE) * len(kv) * heads,)](
        *tensors, out, lse, grad, delta, gradients[0 if q is None else 1], *sizes, *tiles, num_warps=4, maxnreg=96
    )  # fmt: skip
    rest = _rows(keys % LARGE + prompts)
    tiles = [LARGE, rest, SMALL, _rows(queries % SMALL), learns]
    _key_gradient[((keys // LARGE * learns + (rest > 0)) * len(kv) * heads,)](
        *tensors, grad, lse, delta, gradients[0], gradients[2], *sizes, *tiles, num_warps=4, maxnreg=128
    )  # fmt: skip
    return gradients


def _room_for_outputs(kv: Tensor, q: Tensor | None, prompt: Tensor | None, heads: int) -> list[Tensor]:
    queries = (kv if q is None else q).shape[1]
    lse = kv.new_empty(kv.shape[0], heads, queries, dtype=torch.float32)
    return [kv.new_empty(kv.shape[0], queries, heads * 64), lse]


def _room_for_gradients(
    grad: Tensor, kv: Tensor, q: Tensor | None, prompt: Tensor | None, out: Tensor, lse: Tensor, heads: int,
    learns: bool,
) -> list[Tensor]:  # fmt: skip
    """A prompt of all images gets a gradient from each of them."""
    shapes = [kv.shape, *(None if t is None else (kv.shape[0], *t.shape[1:]) for t in (q, prompt))]
    wanted = [learns, learns and q is not None, prompt is not None]
    return [kv.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True)]  # type: ignore[arg-type]


def _keep(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    kv, q, prompt, out, lse = ctx.saved_tensors
    learns = any(ctx.needs_input_grad[:2])
    gradients = torch.ops.vqprompt.attention_gradient(grads[0], kv, q, prompt, out, lse, ctx.heads, learns)
    if prompt is not None and prompt.shape[0] == 1:
        gradients[2] = gradients[2].sum(0, keepdim=True)
    return *(own if needed else None for own, needed in zip(gradients, ctx.needs_input_grad, strict=False)), None


# operators of PyTorch, so that its compiler leaves them as they are
_library = torch.library.Library("vqprompt", "DEF")
_library.define("attention(Tensor kv, Tensor? q, Tensor? prompt, int heads) -> Tensor[]")
_library.define(
    "attention_gradient(Tensor grad, Tensor kv, Tensor? q, Tensor? prompt, Tensor out, Tensor lse, int heads, "
    "bool learns) -> Tensor[]"
)
for _name, _compute, _room in (
    ("attention", _attention, _room_for_outputs),
    ("attention_gradient", _attention_gradient, _room_for_gradients),
):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vqprompt::{_name}", _room, lib=_library)
torch.library.register_autograd("vqprompt::attention", _backward, setup_context=_keep, lib=_library)


def _flops(kv: Any, q: Any, prompt: Any, heads: int, **_: Any) -> int:
    queries, rows = kv[1] if q is None else q[1], 0 if prompt is None else prompt[1] // 2
    return int(4 * kv[0] * queries * (kv[1] + rows) * heads * 64)


register_flop_formula(torch.ops.vqprompt.attention)(_flops)
register_flop_formula(torch.ops.vqprompt.attention_gradient)(
    lambda grad, kv, q, prompt, out, lse, heads, learns, **_: 2 * _flops(kv, q, prompt, heads)
)


def attention(kv: Tensor, q: Tensor | None, prompt: Tensor | None, heads: int) -> Tensor:
    """Attention [B, queries, D] of heads of width 64.

    kv: keys and values of tokens [B, L, 2 D], or with their queries before them [B, L, 3 D]. q: other queries
    [B, queries, D]. prompt: rows that join the keys, then as many that join the values [B or 1, 2 P, D].
    """
    out: Tensor = torch.ops.vqprompt.attention(kv, q, prompt, heads)[0]
    return out

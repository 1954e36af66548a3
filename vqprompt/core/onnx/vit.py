"""The Vision Transformer of backbones/vit.py as an ONNX graph: squashed pixels in, class tokens of the last blocks out.

What is notable about this implementation:
- the graph itself crops, resamples and normalizes (the formulas are those of data/views.py), so that Python, a browser
  and an exported file cannot differ in it
- weights are numpy arrays under timm's names; a graph is made in milliseconds, for any size and any trained network
- weights that are int8 in their file can stay so in the graph, which is then a quarter of the size and computes the
  same, in fp32
- the last block computes only the class token
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vqprompt.core.backbones.config import ViTConfig
from vqprompt.core.backbones.weights import Weights
from vqprompt.core.errors import UserError
from vqprompt.core.onnx.graph import TYPES, Array, Graph


def class_tokens_graph(
    weights: Weights, side: int, crop: float, blocks: int, prompts: Mapping[int, Array] | None = None,
    mirrored: bool = False, packed: bool = False, in_digits: bool = False,
) -> tuple[Graph, list[str]]:  # fmt: skip
    """A graph with the inputs `pixels` (uint8 [n, side, side, 3]: whole images, squashed) and `aspect` (float32 [n]:
    width / height), and the names in it of the class tokens [n, D] of the last blocks, the last block last.

    crop: side of the central crop, as a fraction of the short side; 0: the whole image. prompts: rows [L_p, D] by
    block, half of them extra keys and half extra values. mirrored: then come n more class tokens, of mirrored images.
    packed: store weights as int8 that are int8 in their file; a run then takes a little longer. in_digits: compute with
    integers there, see `_Network.product_of_digits`.
    """
    if weights.config.particular:
        what = ", ".join(weights.config.particular)
        raise UserError(
            f"the backbone has {what}, which no ONNX graph computes here; take another (vqprompt backbones)"
        )
    graph = Graph()
    images = draw(graph, weights.config, side, crop)
    if mirrored:
        backwards = [graph.integers(number) for number in (-1, -(2**31), 3, -1)]  # from, to, axis, step
        images = graph.op("Concat", images, graph.op("Slice", images, *backwards), axis=0)
    return graph, _Network(graph, weights, prompts or {}, packed, in_digits).class_tokens(images, blocks)


def draw(graph: Graph, config: ViTConfig, side: int, crop: float) -> str:
    """The central crop of squashed pixels, resampled and normalized [n, 3, S, S]."""
    op, constant, integers = graph.op, graph.constant, graph.integers
    pixels, aspect = graph.input("pixels", "uint8", "n", side, side, 3), graph.input("aspect", "float32", "n")
    size, one, half = config.image_size, constant(1.0), constant(0.5)

    def resampling(reach: str) -> str:
        """Rows of weights [n, S, side] that resample the interval 0.5 - reach .. 0.5 + reach of `side` pixels."""
        low = op("Sub", half, reach)
        extent = op("Sub", op("Add", half, reach), low)
        low, extent = (op("Unsqueeze", value, integers(1)) for value in (low, extent))
        steps = op("Mul", constant((np.arange(size) + 0.5) / size), extent)
        centers = op("Sub", op("Mul", op("Add", low, steps), constant(side)), half)
        distance = op("Abs", op("Sub", constant(np.arange(side)), op("Unsqueeze", centers, integers(2))))
        support = op("Max", op("Mul", extent, constant(side / size)), one)
        triangle = op("Relu", op("Sub", one, op("Div", distance, op("Unsqueeze", support, integers(2)))))
        return op("Div", triangle, op("ReduceSum", triangle, integers(2), keepdims=1))

    if crop:
        ratios = op("Div", one, aspect), aspect
        reach_x, reach_y = (op("Mul", constant(crop / 2), op("Min", ratio, one)) for ratio in ratios)
    else:
        reach_x = reach_y = op("Expand", half, op("Shape", aspect))
    planes = op("Transpose", op("Cast", pixels, to=TYPES["float32"]), perm=[0, 3, 1, 2])
    across = op("Transpose", resampling(reach_x), perm=[0, 2, 1])
    rows = op("MatMul", op("Reshape", planes, integers(-1, 3 * side, side)), across)
    rows = op("Reshape", rows, integers(-1, 3, side, size))
    images = op("MatMul", op("Unsqueeze", resampling(reach_y), integers(1)), rows)
    mean, std = (np.asarray(values, np.float32).reshape(3, 1, 1) * 255 for values in (config.mean, config.std))
    return op("Div", op("Sub", images, constant(mean)), constant(std))


class _Network:
    """Tokens are rows [n · L, D] where they meet weights, and [n, L, D] where they meet each other."""

    def __init__(
        self, graph: Graph, weights: Weights, prompts: Mapping[int, Array], packed: bool, in_digits: bool
    ) -> None:
        self.graph, self.config, self.prompts, self.in_digits = graph, weights.config, prompts, in_digits
        self.weights, self.int8 = (weights.plain, weights.int8) if packed or in_digits else (weights.arrays, {})

    def class_tokens(self, images: str, blocks: int) -> list[str]:
        x, tokens = self.embed(images), []
        for i in range(self.config.depth):
            last = i == self.config.depth - 1
            x = self.block(i, x, last)
            if i >= self.config.depth - blocks:
                tokens.append(self.norm("norm", x if last else self.first_rows(x)))
        return tokens

    def embed(self, images: str) -> str:
        op, integers, config = self.graph.op, self.graph.integers, self.config
        patch, patches, width = config.patch, config.image_size // config.patch, config.width
        x = op("Reshape", images, integers(-1, 3, patches, patch, patches, patch))
        x = op("Reshape", op("Transpose", x, perm=[0, 2, 4, 1, 3, 5]), integers(-1, 3 * patch * patch))
        x = op("Reshape", self.linear("patch_embed.proj", x), integers(-1, patches**2, width))
        positions = self.weights["pos_embed"]
        x = op("Add", x, self.graph.weight("positions", positions[:, 1:]))
        return self.rows(self.before("class_token", self.weights["cls_token"] + positions[:, :1], x))

    def block(self, i: int, x: str, class_token_only: bool) -> str:
        op, name, width = self.graph.op, f"blocks.{i}", self.config.width
        h = self.norm(f"{name}.norm1", x)
        if class_token_only:
            x = self.first_rows(x)
            q = self.linear(f"{name}.attn.qkv", self.first_rows(h), slice(0, width))
            k, v = self.split(self.linear(f"{name}.attn.qkv", h, slice(width, None)), 2)
        else:
            q, k, v = self.split(self.linear(f"{name}.attn.qkv", h), 3)
        x = op("Add", x, self.linear(f"{name}.attn.proj", self.attention(i, q, k, v, class_token_only)))
        h = op("Gelu", self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.norm2", x)))
        return op("Add", x, self.linear(f"{name}.mlp.fc2", h))

    def attention(self, i: int, q: str, k: str, v: str, class_token_only: bool) -> str:
        heads = {"q_num_heads": self.config.heads, "kv_num_heads": self.config.heads}
        q, k, v = self.tokens(q, class_token_only), self.tokens(k), self.tokens(v)
        if i in self.prompts:
            extra = np.split(self.prompts[i][None], 2, axis=1)
            k, v = (self.before(f"prompt.{i}.{j}", extra[j], t) for j, t in enumerate((k, v)))
        return self.rows(self.graph.op("Attention", q, k, v, **heads))

    def before(self, name: str, extra: Array, tokens: str) -> str:
        """Extra rows [1, m, D], the same for each image, in front of the tokens [n, L, D]."""
        op, integers = self.graph.op, self.graph.integers
        count = op("Shape", tokens, start=0, end=1)
        repeated = op("Expand", self.graph.weight(name, extra), op("Concat", count, integers(*extra.shape[1:]), axis=0))
        return op("Concat", repeated, tokens, axis=1)

    def linear(self, name: str, x: str, part: slice = slice(None)) -> str:
        """Rows [m, D_in] to [m, D_out]. part: which of the layer's outputs."""
        graph, label = self.graph, f"{name}.{part.start}"
        bias = self.weights[f"{name}.bias"][part]
        if f"{name}.weight" in self.int8:
            whole, scale = self.int8[f"{name}.weight"][part], self.int8[f"{name}.weight.scale"][part]
            whole = whole.reshape(len(whole), -1)
            if self.in_digits:
                return self.product_of_digits(label, x, whole, scale, bias)
            names = graph.weight(f"{label}.weight", whole), graph.weight(f"{label}.scale", scale)
            factor = graph.op("DequantizeLinear", *names, axis=0)
        else:
            weight = self.weights[f"{name}.weight"][part]
            factor = graph.weight(f"{label}.weight", weight.reshape(len(weight), -1))
        return graph.op("Gemm", x, factor, graph.weight(f"{label}.bias", bias), transB=1)

    def product_of_digits(self, label: str, x: str, whole: Array, scale: Array, bias: Array) -> str:
        """x is rounded to 8 bits, and what is left of it to 8 bits again: two products of integers, which processors
        with VNNI compute four times as fast. The result differs from that in fp32 by 2e-4."""
        graph, op, kind = self.graph, self.graph.op, "MatMulIntegerToFloat"
        weight, scale_name = graph.weight(f"{label}.weight", whole.T), graph.weight(f"{label}.scale", scale)
        digits, step, zero = graph.split("DynamicQuantizeLinear", x, parts=3)
        rest = op("Sub", x, op("DequantizeLinear", digits, step, zero))
        bias_name = graph.weight(f"{label}.bias", bias)
        first = op(kind, digits, weight, step, scale_name, zero, "", bias_name)
        digits, step, zero = graph.split("DynamicQuantizeLinear", rest, parts=3)
        return op("Add", first, op(kind, digits, weight, step, scale_name, zero))

    def norm(self, name: str, x: str) -> str:
        scale, bias = (
            self.graph.weight(f"{name}.{part}", self.weights[f"{name}.{part}"]) for part in ("weight", "bias")
        )
        return self.graph.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.config.eps)

    def rows(self, tokens: str) -> str:
        return self.graph.op("Reshape", tokens, self.graph.integers(-1, self.config.width))

    def tokens(self, rows: str, class_token_only: bool = False) -> str:
        count = 1 if class_token_only else self.config.tokens
        return self.graph.op("Reshape", rows, self.graph.integers(-1, count, self.config.width))

    def first_rows(self, rows: str) -> str:
        """The class tokens [n, D] among the rows [n · L, D]."""
        return self.rows(self.graph.op("Slice", self.tokens(rows), *map(self.graph.integers, (0, 1, 1))))

    def split(self, x: str, parts: int) -> list[str]:
        return self.graph.split("Split", x, parts=parts, axis=1, num_outputs=parts)

"""Computes features of images on CPUs with ONNX Runtime. PyTorch is not needed.

What is notable about this implementation:
- Each core computes one image at a time. That is as fast as batches and needs little memory.
- Features are those of PyTorch up to rounding: a model may be taught with the one and asked with the other.
- The graph crops and normalizes, so that an exported model does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, partial

import numpy as np

from vqprompt.core.backbones.weights import Weights
from vqprompt.core.data.decode import stored_side
from vqprompt.core.onnx.graph import COLUMNS, Graph, Session
from vqprompt.core.onnx.vit import class_tokens_graph
from vqprompt.core.runtime.cores import cores, has_vnni, parallel
from vqprompt.product.model.efforts import Trained, check_trained, linear_weight
from vqprompt.product.model.extractor import Array, joined_blocks, try_load
from vqprompt.product.model.pictures import Picture

TOKEN_LENGTH = 20.0  # of a class token of a trained network (research/methods/base.py)


class OnnxFeatures:
    """An `Extractor`. weights: of the backbone. size: of images; None: the backbone's own. crop: side of the central
    crop, as a fraction of the short side; 0: the whole image, squashed. trained: what changes the network, if anything
    was trained. precision: None: int8, if the processor has products of 8-bit integers and the weights are int8 too. To
    ask for int8 elsewhere gives fp32."""

    def __init__(
        self, weights: Weights, size: int | None, crop: float, trained: Trained | None = None,
        precision: str | None = "fp32",
    ) -> None:  # fmt: skip
        self.weights, self.crop, self.fingerprint = weights, crop, weights.fingerprint
        resized, in_digits = weights.resized(size), precision != "fp32" and has_vnni()
        self.size, self.side = resized.config.image_size, stored_side(resized.config.image_size)
        self._graph, features, self.width = features_graph(resized, crop, trained, in_digits=in_digits)
        self._graph.output(features, "features", "n", self.width)
        self.precision, self.at_once = "int8" if self._graph.has_integers else "fp32", cores()

    @cached_property
    def _on_several_cores(self) -> Session:
        return Session(self._graph, max(1, min(cores(), self.weights.config.width // COLUMNS)))

    @cached_property
    def _on_one_core(self) -> Session:
        return Session(self._graph)

    def of(self, pictures: Iterable[Picture]) -> Iterator[Array | Exception]:
        return parallel(partial(self._features, self._on_one_core), pictures)

    def of_one(self, picture: Picture) -> Array | Exception:
        return self._features(self._on_several_cores, picture)

    def _features(self, session: Session, picture: Picture) -> Array | Exception:
        loaded = try_load(picture, self.side)
        if isinstance(loaded, Exception):
            return loaded
        pixels, aspect = loaded
        image = np.ascontiguousarray(pixels.transpose(1, 2, 0))[None]
        features: Array = session.run(pixels=image, aspect=np.array([aspect], np.float32))[0][0]
        return features


def features_graph(
    weights: Weights, crop: float, trained: Trained | None, packed: bool = False, in_digits: bool = False
) -> tuple[Graph, str, int]:
    """A graph from squashed pixels and aspect ratios to features, the name of the features [n, D] in it, and D.
    packed, in_digits: see `class_tokens_graph`."""
    config, side = weights.config, stored_side(weights.config.image_size)
    blocks = joined_blocks(config)
    if trained is None:
        graph, tokens = class_tokens_graph(weights, side, crop, blocks, packed=packed, in_digits=in_digits)
        return graph, graph.op("Concat", *tokens, axis=1), blocks * config.width
    check_trained(trained, config)
    mirrored = bool(trained.options.get("mirror", True))
    pool, changed = trained.tensors.get("pool.prompts"), changed_weights(weights, trained)
    prompts = {} if pool is None else dict(zip(trained.options["blocks"], pool[:, 0], strict=True))
    graph, tokens = class_tokens_graph(changed, side, crop, blocks, prompts, mirrored, packed, in_digits)
    tokens = [graph.op("Mul", graph.op("LpNormalization", t, axis=1), graph.constant(TOKEN_LENGTH)) for t in tokens]
    features = graph.op("Concat", *tokens, axis=1)
    if mirrored:  # the average over an image and its mirror image
        halves = graph.split("Split", features, parts=2, axis=0, num_outputs=2)
        features = graph.op("Div", graph.op("Add", *halves), graph.constant(2.0))
    return graph, features, blocks * config.width


def changed_weights(weights: Weights, trained: Trained) -> Weights:
    """The network's weights after training: low-rank changes of the linear layers, other weights as they are now."""
    tensors = trained.tensors
    new = {name.removeprefix("vit."): tensor for name, tensor in tensors.items() if name.startswith("vit.")}
    for name in tensors:
        if up := re.fullmatch(r"up(\d+)", name):
            key = linear_weight(int(up[1]))
            new[key] = weights.arrays[key] + tensors[name] @ tensors[f"down{up[1]}"]
    return weights.with_arrays(new)

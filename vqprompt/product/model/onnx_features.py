"""Computes features of images on CPUs with ONNX Runtime. PyTorch is not needed.

What is notable about this implementation:
- Each core computes one image at a time, as in features.py. The features of an image do not depend, to the last bit, on
  the other images or on the number of cores.
- In fp32, features are those of PyTorch up to rounding. With activations of 16 bits they differ from them by about
  0.02 %, and are faster where the processor multiplies integers fast.
- The graph crops and normalizes, so that an exported model does the same.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from vqprompt.core.backbones.weights import Weights
from vqprompt.core.data import decode as decoding
from vqprompt.core.errors import UserError
from vqprompt.core.onnx.graph import Array, Graph, Session
from vqprompt.core.onnx.vit import Precision, class_tokens_graph
from vqprompt.product.model.efforts import Trained
from vqprompt.product.model.extractor import measure_seconds
from vqprompt.product.model.pictures import Picture

T = TypeVar("T")
BLOCKS = 2  # whose class tokens make a feature
AHEAD = 4  # images per worker that may wait
TOKEN_LENGTH = 20.0  # of a class token of a trained network (research/methods/moving.py)
LINEAR = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # in the order of a low-rank change's numbers


class OnnxFeatures:
    """An `Extractor`. crop: side of the central crop, as a fraction of the short side; 0: the whole image, squashed.
    trained: what changes the network, if anything was trained."""

    def __init__(
        self, weights: Weights, crop: float, precision: Precision = "fp32", trained: Trained | None = None
    ) -> None:
        self.crop, self.precision = crop, precision
        self.size, self.side = weights.config.image_size, round(weights.config.image_size * 8 / 7)
        self._weights = weights
        self._graph, features, self.width = features_graph(weights, crop, precision, trained)
        self._graph.output(features, "features", "n", self.width)

    @cached_property
    def fingerprint(self) -> str:
        return self._weights.fingerprint()

    @cached_property
    def _on_all_cores(self) -> Session:
        return self._session(threads=0)

    @cached_property
    def _on_one_core(self) -> Session:
        return self._session(threads=1)

    def _session(self, threads: int) -> Session:
        return Session(self._graph, threads, repack=self.precision == "int16")  # there it takes little time and memory

    def of(self, pictures: Iterable[Picture]) -> Iterator[Array | Exception]:
        """Features [D] of each image in order, or the exception that its `open` or its decoding raised."""
        return parallel(partial(self._features, self._on_one_core), pictures)

    def of_one(self, picture: Picture) -> Array | Exception:
        """Features [D] of one image, on all cores, or the exception that opening it raised."""
        return self._features(self._on_all_cores, picture)

    def seconds_per_image(self) -> float:
        return measure_seconds(self, self.side, cores())

    def _features(self, session: Session, picture: Picture) -> Array | Exception:
        try:
            pixels, aspect = load(picture, self.side)
        except Exception as error:  # the caller decides whether to stop
            return error
        image = np.ascontiguousarray(pixels.transpose(1, 2, 0))[None]
        features: Array = session.run(pixels=image, aspect=np.array([aspect], np.float32))[0][0]
        return features


def features_graph(
    weights: Weights, crop: float, precision: Precision, trained: Trained | None
) -> tuple[Graph, str, int]:
    """A graph from squashed pixels and aspect ratios to features, the name of the features [n, D] in it, and D."""
    config, side = weights.config, round(weights.config.image_size * 8 / 7)
    blocks = min(BLOCKS, config.depth)
    if trained is None:
        graph, tokens = class_tokens_graph(weights.arrays, config, side, crop, blocks, precision)
        return graph, graph.op("Concat", *tokens, axis=1), blocks * config.width
    blocks, mirrored = trained.options["class_tokens"], trained.options["mirror"]
    arrays, prompts = changed(weights, trained), prompts_of(trained)
    graph, tokens = class_tokens_graph(arrays, config, side, crop, blocks, precision, prompts, mirrored)
    tokens = [graph.op("Mul", graph.op("LpNormalization", t, axis=1), graph.constant(TOKEN_LENGTH)) for t in tokens]
    features = graph.op("Concat", *tokens, axis=1)
    if mirrored:  # the average over an image and its mirror image
        halves = graph.split("Split", features, parts=2, axis=0, num_outputs=2)
        features = graph.op("Div", graph.op("Add", *halves), graph.constant(2.0))
    return graph, features, blocks * config.width


def changed(weights: Weights, trained: Trained) -> dict[str, Array]:
    """The network's weights after training: low-rank changes of the linear layers, other weights as they are now."""
    arrays, tensors = dict(weights.arrays), trained.tensors
    arrays |= {name.removeprefix("vit."): tensor for name, tensor in tensors.items() if name.startswith("vit.")}
    for name in tensors:
        if found := re.fullmatch(r"up(\d+)", name):
            block, layer = divmod(int(found[1]), len(LINEAR))
            key = f"blocks.{block}.{LINEAR[layer]}.weight"
            arrays[key] = arrays[key] + tensors[name] @ tensors[f"down{found[1]}"]
    return arrays


def prompts_of(trained: Trained) -> dict[int, Array]:
    pool = trained.tensors.get("pool.prompts")
    if pool is None:
        return {}
    if pool.shape[1] != 1:
        raise UserError("this model selects among several prompts per block, which needs PyTorch: pip install torch")
    return dict(zip(trained.options["blocks"], pool[:, 0], strict=True))


def load(picture: Picture, side: int) -> tuple[Array, float]:
    """uint8 pixels [3, side, side], squashed, and the true width / height."""
    if picture.decoded is not None:
        return picture.decoded()
    content = picture.open()
    if isinstance(content, bytes):
        return decoding.decode_pixels(content, picture.where, side)
    return decoding.load_pixels(content, side)


def parallel(work: Callable[[T], Any], items: Iterable[T]) -> Iterator[Any]:
    """`map` over threads, in order, with few items in work at a time."""
    waiting, todo, workers = deque[Future[Any]](), iter(items), min(cores(), 16)
    pool = ThreadPoolExecutor(workers)
    try:
        for item in islice(todo, workers * AHEAD):
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()
            for item in islice(todo, 1):
                waiting.append(pool.submit(work, item))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def cores() -> int:
    return os.cpu_count() or 1

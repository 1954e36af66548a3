"""The part of a model's ONNX graph that comes after the features: probabilities, and how familiar an image is."""

from __future__ import annotations

import numpy as np

from vqprompt.core.onnx.graph import Graph
from vqprompt.core.statistics.discriminant import Discriminant
from vqprompt.product.model.knowledge import Solution

NEVER = -1e30  # a score that takes no part in a sum of exponentials


def add_answers(graph: Graph, features: str, solution: Solution) -> None:
    """Add the outputs `probabilities` [n, classes] and `familiarity` [n]: below 0 is unknown. features: [n, D] in the
    graph."""
    op, constant = graph.op, graph.constant
    discriminant, calibration, background = solution.discriminant, solution.calibration, solution.background
    scores = _scores(graph, features, discriminant)
    tempered = op("Div", scores, constant(calibration.temperature))
    shares, logs = op("Softmax", tempered, axis=1), op("LogSoftmax", tempered, axis=1)
    classes = int(discriminant.owners.max()) + 1
    best = op("ReduceMax", scores, graph.integers(1), keepdims=0)
    if not solution.knows_unknown:
        familiar = op("ReduceMax", op("Ceil", shares), graph.integers(1), keepdims=0)  # 1 for every image
    else:
        spread, slope = graph.weight("spread", background.matrix), graph.weight("slope", background.vector)
        distance = op("ReduceSum", op("Mul", op("MatMul", features, spread), features), graph.integers(1), keepdims=0)
        nearness = op("Add", op("Add", distance, op("MatMul", features, slope)), constant(background.constant))
        nearness = op("Add", nearness, op("Mul", best, constant(2.0)))
        if calibration.weighing.certainty == "largest":
            certainty = op("ReduceMax", logs, graph.integers(1), keepdims=0)
        else:
            certainty = op("ReduceSum", op("Mul", shares, logs), graph.integers(1), keepdims=0)
        certain = _standardized(graph, certainty, calibration.certainty)
        near = _standardized(graph, nearness, calibration.nearness)
        weighing = calibration.weighing
        far = op("Min", op("Add", near, constant(weighing.far)), constant(0.0))
        familiar = op("Add", certain, op("Mul", near, constant(weighing.nearness)))
        familiar = op("Add", familiar, op("Mul", far, constant(weighing.steep)))
        familiar = op("Sub", familiar, constant(calibration.threshold))
    if (against := solution.against) is not None:
        weights, bias = graph.weight("against", against.weights), graph.weight("against_bias", against.bias)
        rival = op("ReduceMax", op("Gemm", features, weights, bias, transB=1), graph.integers(1), keepdims=0)
        ahead = op("Div", op("Sub", best, rival), constant(calibration.temperature))
        familiar = op("Min", familiar, ahead)
    graph.output(shares, "probabilities", "n", classes)
    graph.output(familiar, "familiarity", "n")


def _scores(graph: Graph, features: str, discriminant: Discriminant) -> str:
    """Of classes [n, C]: where a class has several modes, the average of their exponentials, as a logarithm."""
    weights, bias = graph.weight("weights", discriminant.weights), graph.weight("bias", discriminant.bias)
    scores = graph.op("Gemm", features, weights, bias, transB=1)
    counts = np.bincount(discriminant.owners)
    if counts.max() == 1:
        return scores
    steps, starts = np.arange(counts.max()), np.cumsum(counts) - counts
    places = np.minimum(starts[:, None] + steps, counts.sum() - 1)  # modes of a class follow each other
    hidden = np.where(steps < counts[:, None], 0.0, NEVER)
    modes = graph.op("Gather", scores, graph.constant(places, "int64"), axis=1)
    summed = graph.op("ReduceLogSumExp", graph.op("Add", modes, graph.constant(hidden)), graph.integers(2), keepdims=0)
    return graph.op("Sub", summed, graph.constant(np.log(counts)))


def _standardized(graph: Graph, values: str, average_and_spread: tuple[float, float]) -> str:
    average, spread = average_and_spread
    return graph.op("Div", graph.op("Sub", values, graph.constant(average)), graph.constant(spread))

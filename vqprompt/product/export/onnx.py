"""A model as one ONNX graph that does everything: the central crop, normalization, the backbone with what was trained,
the classifier, its temperature, and the score that decides what is unknown. PyTorch is not needed.

The caller only reads an image and resizes it to a square, which every language can do. PREPARE says how, in the file's
metadata and in a JSON file beside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.onnx.graph import Graph
from vqprompt.core.statistics.discriminant import Discriminant
from vqprompt.product.model.calibration import Rivals, Solution
from vqprompt.product.model.model import Model
from vqprompt.product.model.network import open_weights
from vqprompt.product.model.onnx_features import features_graph
from vqprompt.product.model.predicting import note_about, solution_of

NEVER = -1e30  # a score that takes no part in a sum of exponentials
PREPARE = {
    "pixels": "uint8 [n, side, side, 3]: the whole image, upright, in RGB, on white where it is transparent, resized "
    "to side x side with a cubic filter (Pillow: BICUBIC); the graph crops and normalizes",
    "aspect": "float32 [n]: width / height before it was resized",
    "probabilities": "float32 [n, classes]",
    "familiarity": "float32 [n]: below 0 is unknown",
}


def onnx_file(model: Model) -> tuple[bytes, dict[str, Any]]:
    """The file, and what a program must know about it. Weights that are int8 in the backbone's file stay so."""
    known, backbone = model.knowledge, model.backbone
    solution = solution_of(known)
    model.extractor_of(known)  # refuses a backbone that the model was not taught with
    weights = open_weights(model.weights).resized(backbone.size)
    graph, features, _ = features_graph(weights, backbone.crop, known.trained, packed=True)
    add_answers(graph, features, solution)
    about = {
        "classes": list(known.classes),
        "notes": [note_about(known, name) for name in known.classes],  # to show instead of percentages
        "side": backbone.side,
        "prepare": PREPARE,
        "unknown": "familiarity below 0" if solution.knows_unknown else "not calibrated",
        "backbone": asdict(replace(backbone, name=Path(backbone.name).name)),
        "made_by": f"vqprompt {__version__}",
    }
    texts = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in about.items()}
    return graph.file(texts), about


def add_answers(graph: Graph, features: str, solution: Solution) -> None:
    """Add the outputs `probabilities` [n, classes] and `familiarity` [n]: below 0 is unknown. features: [n, D] in the
    graph."""
    op, constant = graph.op, graph.constant
    discriminant, calibration, background = solution.discriminant, solution.calibration, solution.background
    weights, bias = graph.weight("weights", discriminant.weights), graph.weight("bias", discriminant.bias)
    modes = op("Gemm", features, weights, bias, transB=1)
    scores = _join_modes(graph, modes, discriminant)
    tempered = op("Div", scores, constant(calibration.temperature))
    shares, logs = op("Softmax", tempered, axis=1), op("LogSoftmax", tempered, axis=1)
    classes = int(discriminant.owners.max()) + 1
    best = op("ReduceMax", scores, graph.integers(1), keepdims=0)
    if not solution.knows_unknown:
        familiar = op("ReduceMax", op("Ceil", shares), graph.integers(1), keepdims=0)  # 1 for every image
    else:
        spread, slope = graph.weight("spread", background.matrix), graph.weight("slope", background.vector)
        scaled = op("MatMul", features, spread)
        distance = op("ReduceSum", op("Mul", scaled, features), graph.integers(1), keepdims=0)
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
        if solution.rivals is not None:
            ahead = _ahead(graph, features, scaled, modes, solution.rivals, background.share)
            behind = op("Mul", op("Min", ahead, constant(0.0)), constant(weighing.steeper / calibration.ahead[1]))
            more = op("Mul", _standardized(graph, ahead, calibration.ahead), constant(weighing.world))
            familiar = op("Add", familiar, op("Add", more, behind))
        familiar = op("Sub", familiar, constant(calibration.threshold))
    if (against := solution.against) is not None:
        weights, bias = graph.weight("against", against.weights), graph.weight("against_bias", against.bias)
        rival = op("ReduceMax", op("Gemm", features, weights, bias, transB=1), graph.integers(1), keepdims=0)
        ahead = op("Div", op("Sub", best, rival), constant(calibration.temperature))
        familiar = op("Min", familiar, ahead)
    graph.output(shares, "probabilities", "n", classes)
    graph.output(familiar, "familiarity", "n")


def _ahead(graph: Graph, features: str, scaled: str, modes: str, rivals: Rivals, share: float) -> str:
    """By how much the best class is ahead of the best rival [n], as `Rivals.ahead`. scaled: features times the
    background's matrix. modes: scores [n, M]."""
    op, constant, apart, (center, toward) = graph.op, graph.constant, rivals.apart, rivals.center
    weights = graph.weight("rivals", (apart / (share - 1)).astype(np.float32))
    products = op("Gemm", scaled, weights, constant(-apart @ toward), transB=1)
    best = op("ArgMax", modes, axis=1, keepdims=0)
    kept = op("Unsqueeze", op("Gather", constant(rivals.reliance), best), graph.integers(1))
    on_line, middle = apart @ rivals.line, constant(-float(center @ rivals.line))
    along = op("Mul", op("Add", op("MatMul", features, constant(rivals.line[:, None])), middle), constant(on_line))
    less = op("Mul", op("Mul", kept, kept), constant(0.5 * (rivals.norms[rivals.left] - on_line**2)))
    beside = op("Sub", op("Mul", kept, op("Sub", products, along)), less)
    on_it = op("Sub", along, constant(0.5 * on_line**2))
    rival = op("ReduceMax", op("Add", beside, on_it), graph.integers(1), keepdims=0)
    middle = op("Sub", op("MatMul", features, constant(toward)), constant(0.5 * float(center @ toward)))
    above = op("Sub", op("ReduceMax", modes, graph.integers(1), keepdims=0), middle)
    return op("Sub", above, rival)


def _join_modes(graph: Graph, scores: str, discriminant: Discriminant) -> str:
    """Of classes [n, C]: where a class has several modes, the average of their exponentials, as a logarithm."""
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


def check_target(target: Path) -> None:
    if target.exists() and not target.is_file():
        raise UserError(f"{target} is a folder or a special file; give the name of a file, such as garden.onnx")


def export_onnx(model: Model, target: str | Path) -> Path:
    """Also writes TARGET.json, which says in words and numbers how to use the file."""
    target = Path(target)
    check_target(target)
    graph, about = onnx_file(model)
    write_atomically(target, graph)
    write_atomically(target.with_name(f"{target.name}.json"), json.dumps(about, ensure_ascii=False, indent=2) + "\n")
    return target

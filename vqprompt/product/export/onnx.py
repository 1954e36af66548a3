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

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.product.export.answers import add_answers
from vqprompt.product.model.model import Model
from vqprompt.product.model.network import open_weights
from vqprompt.product.model.onnx_features import features_graph

PREPARE = {
    "pixels": "uint8 [n, side, side, 3]: the whole image, upright, in RGB, on white where it is transparent, resized "
    "to side x side with a cubic filter (Pillow: BICUBIC); the graph crops and normalizes",
    "aspect": "float32 [n]: width / height before it was resized",
    "probabilities": "float32 [n, classes]",
    "familiarity": "float32 [n]: below 0 is unknown",
}


def onnx_file(model: Model) -> tuple[bytes, dict[str, Any]]:
    """The file, and what a program must know about it. Weights that are int8 in the backbone's file stay so."""
    model.check_taught()
    known, backbone = model.knowledge, model.backbone
    assert known.solution is not None
    model.extractor_of(known)  # refuses a backbone that the model was not taught with
    weights = open_weights(model.weights).resized(backbone.size)
    graph, features, _ = features_graph(weights, backbone.crop, known.trained, packed=True)
    add_answers(graph, features, known.solution)
    about = {
        "classes": list(known.classes),
        "side": backbone.side,
        "prepare": PREPARE,
        "unknown": "familiarity below 0" if known.solution.knows_unknown else "not calibrated",
        "backbone": asdict(replace(backbone, name=Path(backbone.name).name)),
        "made_by": f"vqprompt {__version__}",
    }
    texts = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in about.items()}
    return graph.file(texts), about


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

"""A model as an ONNX file: image in; probabilities and familiarity out; any number of images at once.

The file does everything: the central crop, normalization, the backbone with what was trained, the classifier, the
temperature and the score that decides what is unknown. The caller only reads an image and resizes it to a square, which
every language can do:

    image: uint8 [n, side, side, 3], the whole picture in RGB, resized to side × side (Pillow: BICUBIC)
    aspect: float32 [n], width / height of the picture before it was resized
    probabilities: float32 [n, classes]
    familiarity: float32 [n]; below 0 is unknown

The classes, the side and the backbone are in the file's metadata.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vqprompt.core.data import decode as decoding
from vqprompt.core.data.views import _draw, central_boxes
from vqprompt.core.errors import UserError
from vqprompt.product.model.features import Features
from vqprompt.product.model.knowledge import Knowledge
from vqprompt.product.model.model import Model

OPSET = 18


class Whole(nn.Module):
    """A model from pixels to answers, in one graph."""

    mean: Tensor
    deviation: Tensor
    weights: Tensor
    bias: Tensor
    places: Tensor
    hidden: Tensor
    log_counts: Tensor
    spread: Tensor
    slope: Tensor

    def __init__(self, features: Features, known: Knowledge) -> None:
        super().__init__()
        solution = known.solution
        assert solution is not None
        self.vit, self.crop, self.side = features.vit, float(features.crop), int(features.side)
        self.encode = features.encode  # with the prompts or the change that was trained
        config = self.vit.config
        for name, values in (("mean", config.mean), ("deviation", config.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1) * 255)
        discriminant, background = solution.discriminant, solution.background
        self.calibration, self.background = solution.calibration, float(background.constant)
        self.temperature = float(self.calibration.temperature)
        self.register_buffer("weights", torch.from_numpy(discriminant.weights.copy()))
        self.register_buffer("bias", torch.from_numpy(discriminant.bias.copy()))
        owners = np.asarray(discriminant.owners)
        counts = np.bincount(owners, minlength=len(known.classes))
        self.several = bool(counts.max() > 1)
        starts = np.concatenate([[0], counts.cumsum()[:-1]])
        steps = np.arange(counts.max())
        places = np.minimum(starts[:, None] + steps, len(owners) - 1)
        hidden = np.where(steps < counts[:, None], 0.0, -1e30)
        self.register_buffer("places", torch.from_numpy(places.reshape(-1)))
        self.register_buffer("hidden", torch.from_numpy(hidden).float())
        self.register_buffer("log_counts", torch.from_numpy(np.log(counts)).float())
        self.most = int(counts.max())
        self.knows_unknown = solution.knows_unknown
        self.register_buffer("spread", torch.from_numpy(background.matrix.copy()))
        self.register_buffer("slope", torch.from_numpy(background.vector.copy()))

    def forward(self, image: Tensor, aspect: Tensor) -> tuple[Tensor, Tensor]:
        pixels = image.permute(0, 3, 1, 2)
        boxes = central_boxes(aspect, self.crop)
        seen = _draw(pixels, boxes, None, self.vit.config.image_size, self.mean, self.deviation, torch.float32)
        x = self.encode(seen)
        scores = x @ self.weights.T + self.bias
        if self.several:
            parts = scores.index_select(1, self.places).unflatten(1, (-1, self.most)) + self.hidden
            scores = torch.logsumexp(parts, dim=2) - self.log_counts
        shares = torch.softmax(scores / self.temperature, dim=1)
        if not self.knows_unknown:
            return shares, torch.ones_like(shares[:, 0])
        near = ((x @ self.spread) * x).sum(1) + x @ self.slope + self.background + 2 * scores.max(dim=1).values
        calibration, logs = self.calibration, torch.log_softmax(scores / self.temperature, dim=1)
        weighing = calibration.weighing
        sure = logs.max(dim=1).values if weighing.certainty == "largest" else (shares * logs).sum(1)
        familiar = (sure - calibration.certainty[0]) / calibration.certainty[1]
        nearer = (near - calibration.nearness[0]) / calibration.nearness[1]
        familiar = familiar + weighing.nearness * nearer
        familiar = familiar + weighing.steep * torch.clamp(nearer + weighing.far, max=0.0)
        return shares, familiar - calibration.threshold


def export_onnx(model: Model, target: str | Path, *, int8: bool = False) -> Path:
    """Write a model as ONNX. int8: weights of the matrix products in 8 bits, a quarter of the size."""
    onnx, _ = _libraries()
    target = Path(target)
    model.check_taught()
    whole = Whole(model.network, model.knowledge).eval().cpu()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".onnx-") as folder:
        plain = Path(folder) / "plain.onnx"
        _trace(whole, plain)
        if int8:
            small = Path(folder) / "int8.onnx"
            config = whole.vit.config
            _quantize(plain, small, config.width, int(config.width * config.mlp_ratio))
            plain = small
        graph = onnx.load(plain)
        for name, text in _metadata(model, whole, int8).items():
            entry = graph.metadata_props.add()
            entry.key, entry.value = name, text
        onnx.checker.check_model(graph)
        partial = Path(folder) / "ready.onnx"
        onnx.save_model(graph, partial)
        os.replace(partial, target)
    return target


def _trace(whole: Whole, target: Path) -> None:
    import logging

    image = torch.zeros(2, whole.side, whole.side, 3, dtype=torch.uint8)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about torchvision, which is not needed
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        batch = torch.export.Dim("batch", min=1, max=4096)
        torch.onnx.export(
            whole, (image, torch.ones(2)), str(target), input_names=["image", "aspect"],
            output_names=["probabilities", "familiarity"], dynamic_shapes={"image": {0: batch}, "aspect": {0: batch}},
            opset_version=OPSET, dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip


def _quantize(source: Path, target: Path, width: int, hidden: int) -> None:
    """Put the matrix products inside the backbone's blocks into 8 bits. The layers before and after stay as they are:
    they take little time, and 8 bits there would cost accuracy. width, hidden: of a block and of its perceptron."""
    import logging

    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    onnx, _ = _libraries()
    logging.getLogger().setLevel(logging.ERROR)
    prepared = source.with_name("prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    graph = onnx.load(prepared).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    chosen = [
        node.name for node in graph.node
        if node.op_type == "MatMul" and (shape := shapes.get(node.input[1])) is not None and len(shape) == 2
        and shape[0] in (width, hidden)
    ]  # fmt: skip
    if not chosen:
        raise RuntimeError("no matrix product to quantize was found in the exported graph")
    quantize_dynamic(
        str(prepared), str(target), weight_type=QuantType.QInt8, per_channel=True, nodes_to_quantize=chosen,
        op_types_to_quantize=["MatMul"], extra_options={"MatMulConstBOnly": True},
    )  # fmt: skip


def _metadata(model: Model, whole: Whole, int8: bool) -> dict[str, str]:
    from vqprompt._version import __version__

    return {
        "classes": json.dumps(list(model.classes), ensure_ascii=False),
        "side": str(whole.side),
        "backbone": json.dumps(vars(model.backbone)),
        "unknown": "familiarity below 0" if whole.knows_unknown else "not calibrated",
        "weights": "int8" if int8 else "float32",
        "made_by": f"vqprompt {__version__}",
    }


def prepared(images: list[decoding.ImageLike], side: int) -> dict[str, np.ndarray]:
    """Images as the exported graph takes them."""
    opened = [decoding.open_image(image) for image in images]
    return {
        "image": np.stack([decoding.to_pixels(image, side).transpose(1, 2, 0) for image in opened]),
        "aspect": np.array([image.width / image.height for image in opened], np.float32),
    }


def open_session(path: str | Path, threads: int = 0) -> Any:
    """An onnxruntime session on CPUs. threads: 0 takes all cores."""
    _, runtime = _libraries()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs more packages ({error.name} is missing): pip install 'vqprompt[onnx]'") from None
    return onnx, onnxruntime

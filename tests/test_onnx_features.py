"""Features without PyTorch: the same network as an ONNX graph, for any size and whatever was trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vqprompt.core.backbones.load import fingerprint, load_backbone, save_backbone
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.backbones.weights import Weights, read_weights
from vqprompt.core.onnx.graph import Session
from vqprompt.core.statistics.discriminant import probabilities
from vqprompt.product.export.graph import add_answers
from vqprompt.product.model.calibration import familiarity, solve
from vqprompt.product.model.efforts import TRAINING, Trained
from vqprompt.product.model.features import Features
from vqprompt.product.model.onnx_features import OnnxFeatures, features_graph, load
from vqprompt.product.model.pictures import Picture
from vqprompt.product.model.records import ClassRecord, gram_of, to_fixed_point
from vqprompt.product.model.trained import build, with_trained
from vqprompt.research.methods import find_method

pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(0)
SMALL = ViTConfig(width=48, depth=3, heads=4, patch=8, image_size=64, std=(0.3, 0.2, 0.1))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_backbone(ViT(SMALL), path)
    return path


def pictures(*sizes: tuple[int, int]) -> list[Picture]:
    def picture(width: int, height: int) -> Picture:
        pixels = RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Picture("noise", "noise", lambda: pixels)

    return [picture(*size) for size in sizes]


SEEN = pictures((70, 70), (200, 90), (40, 300), (64, 64))


def features(extractor: Any) -> np.ndarray:
    return np.stack(list(extractor.of(SEEN)))


def training(effort: str, vit: ViT) -> Trained:
    """As after a teaching, with random values."""
    settings = TRAINING[effort]
    options = find_method(settings.method).Options(statistics=False, **settings.options)
    torch.manual_seed(1)
    method, _ = build(vit, Trained(effort, settings.method, options.model_dump(mode="json"), {}))
    kept = {
        name: (tensor + 0.1 * torch.randn(tensor.shape)).numpy()
        for name, tensor in method.state_dict().items()
        if method.saved(name) and not name.startswith(("head.", "pool.keys"))
    }
    return Trained(effort, settings.method, method.options.model_dump(mode="json"), kept)


@pytest.mark.parametrize(("size", "crop"), [(64, 0.875), (64, 0.0), (40, 1.0), (104, 0.875)])
def test_without_pytorch_features_are_the_same_at_every_size_and_crop(file: Path, size: int, crop: float) -> None:
    expected = features(Features(load_backbone(file, size), crop))
    found = features(OnnxFeatures(read_weights(file).resized(size), crop))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("effort", ["good", "best"])
def test_without_pytorch_features_of_a_trained_network_are_the_same(file: Path, effort: str) -> None:
    plain = Features(load_backbone(file), 0.875)
    trained = training(effort, plain.vit)
    expected = features(with_trained(plain, trained))
    assert np.abs(expected - features(plain)).max() > 0.1, "training changed nothing, so nothing is compared"
    found = features(OnnxFeatures(read_weights(file), 0.875, "fp32", trained))
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_backbone_has_the_same_fingerprint_without_pytorch(file: Path) -> None:
    for backbone in (file, "vit-s14"):
        assert read_weights(backbone).fingerprint() == fingerprint(load_backbone(backbone))


def test_activations_of_16_bits_are_as_good_as_floats_and_do_not_depend_on_company() -> None:
    """With weights that are int8 in their file, as those of the package."""
    weights = read_weights("vit-s14").resized(112)
    floats, whole = (OnnxFeatures(weights, 0.875, precision) for precision in ("fp32", "int16"))
    expected, found = features(floats), features(whole)
    assert 0 < np.linalg.norm(found - expected, axis=1).max() < 1e-3 * np.linalg.norm(expected, axis=1).min()
    assert np.array_equal(np.stack([whole.of_one(picture) for picture in SEEN]), found)


def test_other_weights_are_not_rounded_for_activations_of_16_bits(file: Path) -> None:
    weights = read_weights(file)
    floats, whole = (features(OnnxFeatures(weights, 0.875, precision)) for precision in ("fp32", "int16"))
    np.testing.assert_allclose(whole, floats, atol=1e-5)


def test_an_image_that_cannot_be_read_gives_its_error_in_its_place(file: Path) -> None:
    damaged = Picture("damaged.jpg", "x", lambda: b"not an image")
    first, second, third = OnnxFeatures(read_weights(file), 0.875).of([SEEN[0], damaged, SEEN[1]])
    assert "damaged.jpg" in str(second)
    assert isinstance(first, np.ndarray) and isinstance(third, np.ndarray)


@pytest.mark.parametrize("modes", [1, 2])
def test_a_graph_of_the_whole_model_answers_as_the_model_does(file: Path, modes: int) -> None:
    weights = read_weights(file)
    graph, named, width = features_graph(weights, 0.875, "fp32", None)
    records = []
    for number in range(5):
        centers = RNG.normal(size=(modes, width)) * 6
        points = np.concatenate([center + RNG.normal(size=(20, width)) for center in centers])
        records.append(ClassRecord.of(np.arange(len(points), dtype=np.uint64) + 1000 * number, to_fixed_point(points)))
    solved = solve(records, sum(gram_of(record) for record in records))
    assert len(solved.discriminant.owners) == 5 * modes
    add_answers(graph, named, solved.discriminant, solved.calibration, solved.background)
    x = features(OnnxFeatures(weights, 0.875))
    scores = solved.discriminant.scores(x)
    shares = probabilities(scores, solved.calibration.temperature)
    nearness = solved.background.scores(x) + 2 * scores.max(1)
    expected = familiarity(shares, nearness, solved.calibration) - solved.calibration.threshold
    loaded = [load(picture, 73) for picture in SEEN]
    pixels = np.stack([image.transpose(1, 2, 0) for image, _ in loaded])
    found = Session(graph).run(pixels=pixels, aspect=np.array([aspect for _, aspect in loaded], np.float32))
    np.testing.assert_allclose(found[0], shares, atol=1e-4)
    np.testing.assert_allclose(found[1], expected, rtol=1e-3, atol=1e-3)


def test_asking_imports_neither_pytorch_nor_scipy() -> None:
    program = """
import sys
from vqprompt.core.backbones.weights import read_weights
from vqprompt.product.model.onnx_features import OnnxFeatures
from vqprompt.product.model.pictures import find_pictures
import numpy as np
picture = find_pictures([np.zeros((50, 60, 3), np.uint8)], "picture")[0][0]
assert OnnxFeatures(read_weights("vit-s14"), 0.875).of_one(picture).shape == (768,)
print(sorted({"torch", "scipy", "sklearn", "onnx", "matplotlib", "huggingface_hub"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_resized_positions_are_those_of_pytorch(file: Path) -> None:
    for size in (16, 40, 56, 72, 200):
        expected = load_backbone(file, size).pos_embed.numpy()
        found: Weights = read_weights(file).resized(size)
        np.testing.assert_allclose(found.arrays["pos_embed"], expected, atol=1e-5)

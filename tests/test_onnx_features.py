"""Features without PyTorch: the same network as an ONNX graph, for any size and whatever was trained."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import command_environment
from drawings import write_drawings

from vqprompt import Model
from vqprompt.core.backbones.load import fingerprint, load_backbone, save_backbone
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.backbones.weights import Weights, read_weights
from vqprompt.core.onnx.graph import COLUMNS, Session
from vqprompt.core.runtime.cores import has_vnni
from vqprompt.product.model import network
from vqprompt.product.model.efforts import TRAINING, Trained
from vqprompt.product.model.extractor import load
from vqprompt.product.model.features import Features
from vqprompt.product.model.file import ModelError
from vqprompt.product.model.onnx_features import OnnxFeatures, features_graph
from vqprompt.product.model.pictures import Picture, find_pictures
from vqprompt.product.model.records import STEP
from vqprompt.product.model.trained import with_trained
from vqprompt.research.methods import find_method
from vqprompt.research.migration import EARLIER_OPTIONS

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
    kind = find_method(settings.method)
    options = kind.Options(**{**EARLIER_OPTIONS[settings.method], "statistics": False, **settings.options})
    torch.manual_seed(1)
    method: Any = kind(copy.deepcopy(vit), options, 1)
    kept = {
        name: (tensor + 0.1 * torch.randn(tensor.shape)).numpy()
        for name, tensor in method.state_dict().items()
        if method.saved(name) and not name.startswith(("head.", "pool.keys"))
    }
    return Trained(effort, settings.method, method.options.model_dump(mode="json"), kept)


@pytest.mark.parametrize(("size", "crop"), [(64, 0.875), (64, 0.0), (40, 1.0), (104, 0.875)])
def test_without_pytorch_features_are_the_same_at_every_size_and_crop(file: Path, size: int, crop: float) -> None:
    expected = features(Features(load_backbone(file, size), crop))
    found = features(OnnxFeatures(read_weights(file), size, crop))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("effort", ["good", "best"])
def test_without_pytorch_features_of_a_trained_network_are_the_same(file: Path, effort: str) -> None:
    plain = Features(load_backbone(file), 0.875)
    trained = training(effort, plain.vit)
    expected = features(with_trained(plain, trained))
    assert np.abs(expected - features(plain)).max() > 0.1, "training changed nothing, so nothing is compared"
    found = features(OnnxFeatures(read_weights(file), None, 0.875, trained))
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_backbone_has_the_same_fingerprint_without_pytorch(file: Path) -> None:
    for backbone in (file, "vit-s14"):
        assert read_weights(backbone).fingerprint == fingerprint(load_backbone(backbone))


def test_features_do_not_depend_on_company_nor_on_the_number_of_cores() -> None:
    extractor = OnnxFeatures(read_weights("vit-s14"), 112, 0.875)
    together, picture = features(extractor), SEEN[1]
    assert np.array_equal(np.stack([extractor.of_one(seen) for seen in SEEN]), together)
    for threads in range(2, extractor.weights.config.width // COLUMNS + 1):
        assert np.array_equal(extractor._features(Session(extractor._graph, threads), picture), together[1])


@pytest.mark.skipif(not has_vnni(), reason="this processor has no fast products of 8-bit integers")
def test_features_from_products_of_integers_are_those_in_fp32_up_to_rounding() -> None:
    plain, quick = (OnnxFeatures(read_weights("vit-s14"), 112, 0.875, precision=p) for p in ("fp32", None))
    assert (plain.precision, quick.precision) == ("fp32", "int8")
    expected, taught = features(plain), features(quick)
    assert 0 < np.linalg.norm(taught - expected) < 1e-3 * np.linalg.norm(expected)
    np.testing.assert_allclose(taught, expected, atol=4 * STEP)
    assert np.array_equal(np.stack([quick.of_one(seen) for seen in SEEN]), taught), "it depends on cores or company"


def test_weights_that_are_not_int8_are_computed_with_as_they_are(file: Path) -> None:
    plain, wanted = (OnnxFeatures(read_weights(file), None, 0.875, precision=p) for p in ("fp32", "int8"))
    assert wanted.precision == "fp32"
    assert np.array_equal(features(wanted), features(plain))


@pytest.mark.skipif(not has_vnni(), reason="this processor has no fast products of 8-bit integers")
def test_a_model_is_asked_with_the_features_it_was_taught_with_and_elsewhere_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = {precision: Model(size=56, device="cpu", precision=precision) for precision in ("fp32", "int8")}
    images = [np.random.default_rng(i).integers(0, 256, (60, 60, 3), dtype=np.uint8) for i in range(6)]
    for precision, model in taught.items():
        model.learn(images, ["noise", "sound"] * 3)
        model.save(tmp_path / f"{precision}.vqp")
        again = Model.load(tmp_path / f"{precision}.vqp", device="cpu")
        assert again.backbone.precision == again.extractor.precision == precision
        assert np.array_equal(again.embed(images), model.embed(images))
    assert not np.array_equal(taught["fp32"].embed(images), taught["int8"].embed(images))

    monkeypatch.setattr("vqprompt.product.model.onnx_features.has_vnni", lambda: False)
    monkeypatch.setattr(network, "_open_onnx", network._open_onnx.__wrapped__)  # nothing is open there
    elsewhere = Model.load(tmp_path / "int8.vqp", device="cpu")
    with pytest.warns(UserWarning, match="taught with features in int8.* computes them in fp32") as told:
        assert np.array_equal(elsewhere.embed(images), taught["fp32"].embed(images))
        elsewhere.predict(images)
    assert len(told) == 1
    elsewhere.learn(images[0][::-1].copy(), "noise")
    assert elsewhere.backbone.precision == "int8", "the others were taught in it"


def test_weights_that_are_int8_in_their_file_can_stay_so_in_the_graph() -> None:
    weights = read_weights("vit-s14").resized(42)
    (packed, name, width), (plain, _, _) = (features_graph(weights, 0.875, None, packed) for packed in (True, False))
    packed.output(name, "features", "n", width)
    assert len(packed.file()) < 0.3 * len(plain.file())
    pixels, aspect = load(SEEN[0], 48)
    found = Session(packed).run(pixels=pixels.transpose(1, 2, 0)[None].copy(), aspect=np.array([aspect], np.float32))
    np.testing.assert_allclose(found[0][0], OnnxFeatures(weights, None, 0.875).of_one(SEEN[0]), atol=1e-4)


def test_an_image_that_cannot_be_read_gives_its_error_in_its_place(file: Path) -> None:
    damaged = Picture("damaged.jpg", "x", lambda: b"not an image")
    first, second, third = OnnxFeatures(read_weights(file), None, 0.875).of([SEEN[0], damaged, SEEN[1]])
    assert "damaged.jpg" in str(second)
    assert isinstance(first, np.ndarray) and isinstance(third, np.ndarray)


ALONE = """
import json, sys
from importlib.machinery import PathFinder
from vqprompt.__main__ import main

large, find = {"torch", "scipy", "sklearn", "onnx", "matplotlib", "huggingface_hub"}, PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in large else find(name, *rest)
for words in json.loads(sys.argv.pop()):
    sys.argv = ["vqprompt", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def alone(home: Path, *commands: list[object], status: int = 0) -> subprocess.CompletedProcess[str]:
    """Commands in one process, in which the large packages cannot be imported."""
    words = [sys.executable, "-c", ALONE, json.dumps([[str(word) for word in command] for command in commands])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=command_environment(home))
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("effort", ["instant", "good"])
def test_asking_on_a_cpu_imports_nothing_large_and_answers_as_pytorch_does(
    effort: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRAINING, "good", replace(TRAINING["good"], epochs=1))
    folder = write_drawings(tmp_path / "drawn", ["apple", "bicycle", "cactus"], range(8))
    model = Model(size=42, device="cpu", precision="fp32")
    model.learn(folder, effort=effort)
    path, images = model.save(tmp_path / "m.vqp"), sorted(folder.rglob("*.png"))
    done = alone(home, ["predict", path, *images, "--json", "--no-unknown", "--top", 3])
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert model.effort == effort
    shares, _ = model.judge(np.stack(list(model.network.of(find_pictures(images, "any")[0]))))
    found = np.array([[answer["classes"][name] for name in model.classes] for answer in answers])
    assert np.array_equal(found.argmax(1), shares.argmax(1))
    np.testing.assert_allclose(found, shares, atol=1e-4)


def test_everything_that_trains_nothing_works_without_the_large_packages(tmp_path: Path, home: Path) -> None:
    folder = write_drawings(tmp_path / "drawn", ["apple", "bicycle", "cactus"], range(6))
    more = write_drawings(tmp_path / "more", ["apple", "car"], range(8, 12))
    path = tmp_path / "m.vqp"
    done = alone(
        home, ["learn", path, folder, "--size", 42], ["learn", path, more], ["predict", path, folder / "cactus"],
        ["test", path, folder, "--out", tmp_path / "tested"], ["check", more, "--out", tmp_path / "checked"],
        ["rename", path, "car", "automobile"], ["undo", path], ["forget", path, "car"], ["show", path, "--json"],
        ["export", path, "--onnx", tmp_path / "m.onnx"], ["cache"], ["backbones"],
    )  # fmt: skip
    assert "learned 18 images" in done.stdout and (tmp_path / "m.onnx").is_file(), done.stdout
    assert Model.load(path).counts == {"apple": 10, "bicycle": 6, "cactus": 6}
    for words in (["demo"], ["learn", path, more, "--effort", "good"]):
        assert "pip install 'vqprompt[train]'" in alone(home, words, status=2).stderr


def test_a_model_of_another_size_that_was_taught_with_pytorch_still_opens(file: Path, tmp_path: Path) -> None:
    """Its fingerprint was taken after PyTorch had resized the network."""
    model = Model(file, size=40, device="cpu")
    model.learn(write_drawings(tmp_path / "drawn", ["apple", "bicycle"], range(4)))
    assert model.backbone.fingerprint == read_weights(file).fingerprint
    for size in (40, 48):
        backbone = replace(model.backbone, fingerprint=fingerprint(load_backbone(file, size)))
        older = copy.copy(model)
        older._stored = replace(model._stored, backbone=backbone)
        if size == 40:
            assert older.predict_proba(SEEN[0].open()).shape == (2,)
        else:
            with pytest.raises(ModelError, match="has other weights"):
                older.predict(SEEN[0].open())


def test_resized_positions_are_those_of_pytorch(file: Path) -> None:
    for size in (16, 40, 56, 72, 200):
        expected = load_backbone(file, size).pos_embed.numpy()
        found: Weights = read_weights(file).resized(size)
        np.testing.assert_allclose(found.arrays["pos_embed"], expected, atol=1e-5)

"""Elsewhere: ONNX gives the same answers; the hub's folder is a model like any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, make_vit
from drawings import write_drawings
from PIL import Image

from vqprompt import Model
from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.statistics.discriminant import Discriminant

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from vqprompt.product.export.onnx import Whole, export_onnx, open_session, prepared

NAMES = ["apple", "bicycle", "cactus", "car"]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    folder = write_drawings(tmp_path_factory.mktemp("test"), NAMES, range(80, 90))
    Image.open(folder / "car" / "80.png").resize((90, 40)).save(folder / "car" / "wide.png")
    return sorted(folder.rglob("*.png"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """A tiny backbone of random weights; every block of it takes seconds to export."""
    home = tmp_path_factory.mktemp("taught")
    save_backbone(make_vit(replace(TINY, depth=3)), home / "tiny.safetensors")
    found = Model(home / "tiny.safetensors", device="cpu")
    folder = write_drawings(home / "first", NAMES, range(20))
    found.learn(folder)
    found.save(home / "drawings.vqp")
    return found


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> Path:
    return export_onnx(model, tmp_path_factory.mktemp("onnx") / "drawings.onnx")


def ask(path: Path, images: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    session = open_session(path, threads=1)
    side = int(session.get_modelmeta().custom_metadata_map["side"])
    return session.run(["probabilities", "familiarity"], prepared(list(images), side))


def test_answers_are_the_same_for_any_number_of_images(model, exported, images):
    shares, familiar = model.judge(model.embed(images))
    for count in (1, 5, len(images)):
        got, score = ask(exported, images[:count])
        assert got.shape == (count, 4) and score.shape == (count,)
        np.testing.assert_allclose(got, shares[:count], atol=1e-3)
        assert np.array_equal(got.argmax(1), shares[:count].argmax(1))
        np.testing.assert_allclose(score, familiar[:count], atol=1e-2, rtol=1e-3)
    assert np.array_equal(score < 0, familiar < 0)


def test_several_kinds_of_a_class_are_one_column(model, images):
    first = model.knowledge.solution.discriminant
    two = Discriminant(
        np.concatenate([first.weights[:1] * 0.9, first.weights]),
        np.concatenate([first.bias[:1] * 0.9, first.bias]),
        np.array([0, 0, 1, 2, 3]),
    )  # fmt: skip
    solution = replace(model.knowledge.solution, discriminant=two)
    whole = Whole(model.network, replace(model.knowledge, solution=solution)).eval()
    given = {name: torch.from_numpy(value) for name, value in prepared(list(images), whole.side).items()}
    with torch.no_grad():
        got, familiar = whole(**given)
    shares, expected = solution.judge(model.embed(images))
    np.testing.assert_allclose(got.numpy(), shares, atol=1e-4)
    np.testing.assert_allclose(familiar.numpy(), expected, atol=1e-2, rtol=1e-3)


def test_metadata_tells_what_is_needed(model, exported):
    told = open_session(exported).get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == list(model.classes) and told["weights"] == "float32"
    assert json.loads(told["backbone"])["fingerprint"] == model.show()["backbone"]["fingerprint"]


def test_int8_is_smaller_and_close(model, exported, images, tmp_path):
    small = export_onnx(model, tmp_path / "small.onnx", int8=True)
    assert small.stat().st_size < exported.stat().st_size
    got, _ = ask(small, images)
    shares, _ = model.judge(model.embed(images))
    assert np.abs(got.sum(1) - 1).max() < 1e-3 and np.abs(got - shares).mean() < 0.1


def test_command(model, tmp_path, command):
    status, out, err = command("export", model.path, "--onnx", tmp_path / "a" / "drawings.onnx")
    assert status == 0 and "drawings.onnx" in out, err
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["drawings.onnx"]
    assert "--onnx" in command("export", model.path)[2]
    assert "no such" in command("export", tmp_path / "none.vqp", "--onnx", tmp_path / "x.onnx")[2].lower()

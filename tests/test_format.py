"""docs/format.md is enough to read a model: with safetensors, json and NumPy alone."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drawings import drawings, write_drawings
from safetensors import safe_open

from vqprompt import Model

NAMES = ["apple", "bicycle", "cactus"]
OLD = Path(__file__).parent / "data" / "older-models"
DOCUMENT = Path(__file__).parent.parent / "docs" / "format.md"


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    home = tmp_path_factory.mktemp("format")
    model = Model(size=56, device="cpu")  # the smallest size for which there is a world
    folder = write_drawings(home / "images", NAMES, range(12))
    model.learn(folder)
    model.rename("cactus", "kaktus")
    return model, model.save(home / "garden.vqp"), sorted(folder.rglob("*.png"))


def test_the_documents_own_code_gives_the_models_probabilities(taught, tmp_path):
    model, path, images = taught
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code
    features = model.embed(images)
    np.save(tmp_path / "x.npy", features)
    script = code[1].replace("garden.vqp", str(path)) + (
        "\nimport sys\n"
        f"np.save({str(tmp_path / 'p.npy')!r}, probabilities(np.load({str(tmp_path / 'x.npy')!r})))\n"
        "assert not any(name.startswith(('vqprompt', 'torch')) for name in sys.modules)\n"
        "print(json.dumps(classes))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == list(model.classes)
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), model.judge(features)[0], atol=1e-6)


def read(path: Path):
    with safe_open(path, "np") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_metadata_tensors_and_records_are_as_described(taught):
    model, path, _ = taught
    metadata, tensors = read(path)
    assert metadata["format"] == "vqprompt-model" and metadata["version"] == "4"
    described = json.loads(metadata["model"])
    width, records = described["backbone"]["width"], described["records"]
    images, kept = sum(r["images"] for r in records), sum(r["kept"] for r in records)
    modes, world = len(tensors["owners"]), len(tensors["rivals_left"])
    expected = {
        "ids": ("uint64", (images,)), "totals": ("int64", (len(records), width)), "kept": ("int16", (kept, width)),
        "modes": ("uint8", (kept,)), "gram": ("float64", (width * (width + 1) // 2,)),
        "weights": ("float32", (modes, width)), "bias": ("float32", (modes,)), "owners": ("int32", (modes,)),
        "spread": ("float32", (width + 1, width)),
        "world_codes": ("int8", (2, world, width)), "world_scales": ("float32", (2, world)),
        "rivals_left": ("uint8", (world,)), "rivals_center": ("float32", (2, width)),
        "rivals_norms": ("float32", (world,)), "rivals_reliance": ("float32", (modes,)),
    }  # fmt: skip
    assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == expected
    documented = re.findall(r"^\| `(\w+)` \| (?:u?int|float)\d+ \|", DOCUMENT.read_text(), re.MULTILINE)
    assert set(documented) == set(expected)
    now = described["versions"][-1]
    assert list(now["classes"]) == ["apple", "bicycle", "kaktus"] == list(model.classes)
    assert [v["number"] for v in described["versions"]] == [0, 1, 2] and described["latest"] == 2
    assert [e["what"] for e in now["history"]] == ["learned", "renamed"]


def test_ids_sums_and_gram_are_as_described(taught):
    model, path, images = taught
    _, tensors = read(path)
    ids = {int.from_bytes(hashlib.sha256(p.read_bytes()).digest()[:8], "little") for p in images}
    assert {int(n) for n in tensors["ids"]} == ids
    kept = tensors["kept"].astype(np.float64)
    gram = (kept.T @ kept)[np.triu_indices(kept.shape[1])]
    np.testing.assert_array_equal(gram, tensors["gram"])
    assert np.array_equal(kept.sum(0), tensors["totals"].sum(0))
    assert np.abs(model.embed(images).sum(0) - kept.sum(0) / 1024).max() < len(images) / 1024


def test_the_unknown_is_as_described(taught):
    model, path, images = taught
    metadata, t = read(path)
    solution = json.loads(metadata["model"])["solution"]
    x = model.embed(images)
    shares, margin = model.judge(x)
    scores = x @ t["weights"].T + t["bias"]
    assert len(t["owners"]) == len(model.classes)
    nearness = np.einsum("nd,de,ne->n", x, t["spread"][:-1], x) + x @ t["spread"][-1] + solution["background"]
    nearness = nearness + 2 * scores.max(1)
    certainty = (shares * np.log(np.maximum(shares, 1e-12))).sum(1)
    (sure, spread), (near, apart) = solution["certainty"], solution["nearness"]
    m, w = (nearness - near) / apart, solution["weighing"]
    assert w["certainty"] == "entropy"
    familiarity = (certainty - sure) / spread + w["nearness"] * m + w["steep"] * np.minimum(m + w["far"], 0)
    assert "familiarity = c + w.nearness · m + w.steep · min(m + w.far, 0)" in DOCUMENT.read_text()
    (o, z), reliance = t["rivals_center"], t["rivals_reliance"][scores.argmax(1)][:, None]
    left, line = t["rivals_left"] > 0, t.get("rivals_line", np.zeros(len(o)))
    apart = (t["world_codes"][0] * t["world_scales"][0][:, None] - o)[left]
    products = (x @ t["spread"][:-1] / (solution["share"] - 1) - z) @ apart.T
    places, along = apart @ line, np.outer((x - o) @ line, apart @ line)
    rivals = reliance * (products - along) - 0.5 * reliance**2 * (t["rivals_norms"][left] - places**2)
    rivals += along - 0.5 * places**2
    ahead = scores.max(1) - (x @ z - 0.5 * o @ z) - rivals.max(1)
    mean, deviation = solution["ahead"]
    familiarity += w["world"] * (ahead - mean) / deviation + w["steeper"] * np.minimum(ahead, 0) / deviation
    assert "`w.world · (a − mean) / deviation + w.steeper · min(a, 0) / deviation`" in DOCUMENT.read_text()
    np.testing.assert_allclose(familiarity - solution["threshold"], margin, atol=1e-3)


@pytest.mark.parametrize("file", ["instant", "good", "best", "no-weighing", "instant-3", "good-3"])
def test_kept_files_of_formats_3_and_4_open_answer_the_same_and_are_written_as_format_4(file, tmp_path, monkeypatch):
    monkeypatch.chdir(OLD)  # their backbone is named without a folder
    answers, name = np.load("answers.npz"), file.removesuffix("-3")
    drawn, stored = list(drawings()[0][:6, 80:82].reshape(-1, 28, 28)), read(Path(f"{file}.vqp"))[1]
    old = Model.load(f"{file}.vqp", device="cpu")
    new = Model.load(old.save(tmp_path / "new.vqp"), device="cpu")
    for model in (old, new):
        x = model.embed(drawn)
        np.testing.assert_allclose(x, answers[f"{name}.features"], atol=1e-4)
        np.testing.assert_allclose(model.judge(x)[0], answers[f"{name}.probabilities"], atol=1e-4)
        # from the same features to rounding: other processors add up in another order, but nothing is solved again
        shares, margin = model.judge(answers[f"{name}.features"])
        assert np.array_equal(shares.argmax(1), answers[f"{name}.probabilities"].argmax(1))
        np.testing.assert_allclose(shares, answers[f"{name}.probabilities"], atol=1e-4)
        np.testing.assert_allclose(margin, answers[f"{name}.familiarity"], rtol=1e-3, atol=0.02)
        solved = model.knowledge.solution.discriminant
        assert np.array_equal(solved.weights, stored["weights"]) and np.array_equal(solved.bias, stored["bias"])
    assert [e.detail for e in new.history if e.what != "learned"] == ["airplane → renamed", "apple"]
    assert read(tmp_path / "new.vqp")[0]["version"] == "4"
    new.undo(2)
    assert new.knowledge.version == len(old.versions) - 2 and new.judge(new.embed(drawn))[0].shape == (12, 5)


def test_the_checksum_is_as_described(taught):
    metadata, tensors = read(taught[1])
    digest = hashlib.sha256()
    for key in ("format", "version", "model"):
        digest.update(key.encode() + b"\0" + metadata[key].encode() + b"\0")
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name}\0{t.dtype}\0{list(t.shape)}\0".encode() + t.tobytes())
    assert digest.hexdigest() == metadata["checksum"]

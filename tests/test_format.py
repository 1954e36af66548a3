"""docs/format.md is enough to read a model: with safetensors, json and NumPy alone."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawings import write_drawings
from safetensors import safe_open

from vqprompt import Model
from vqprompt.product.model import calibration
from vqprompt.product.model import file as files

NAMES = ["apple", "bicycle", "cactus"]
DOCUMENT = Path(__file__).parent.parent / "docs" / "format.md"


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    home = tmp_path_factory.mktemp("format")
    model = Model(size=28, device="cpu")
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
    assert metadata["format"] == "vqprompt-model" and metadata["version"] == "1"
    described = json.loads(metadata["model"])
    width, records = described["backbone"]["width"], described["records"]
    images, kept = sum(r["images"] for r in records), sum(r["kept"] for r in records)
    modes = len(tensors["owners"])
    expected = {
        "names": ("uint64", (images,)), "totals": ("int64", (len(records), width)), "kept": ("int16", (kept, width)),
        "modes": ("uint8", (kept,)), "gram": ("float64", (width * (width + 1) // 2,)),
        "weights": ("float32", (modes, width)), "bias": ("float32", (modes,)), "owners": ("int32", (modes,)),
        "spread": ("float32", (width + 1, width)),
    }  # fmt: skip
    assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == expected
    documented = re.findall(r"^\| `(\w+)` \| (?:u?int|float)\d+ \|", DOCUMENT.read_text(), re.MULTILINE)
    assert set(documented) == set(expected)
    now = described["versions"][-1]
    assert list(now["classes"]) == ["apple", "bicycle", "kaktus"] == list(model.classes)
    assert len(described["versions"]) == 2 and [e["what"] for e in now["history"]] == ["learned", "renamed"]


def test_names_sums_and_gram_are_as_described(taught):
    model, path, images = taught
    _, tensors = read(path)
    names = {int.from_bytes(hashlib.sha256(p.read_bytes()).digest()[:8], "little") for p in images}
    assert {int(n) for n in tensors["names"]} == names
    kept = tensors["kept"].astype(np.float64)
    gram = (kept.T @ kept)[np.triu_indices(kept.shape[1])]
    np.testing.assert_array_equal(gram, tensors["gram"])
    assert np.array_equal(kept.sum(0), tensors["totals"].sum(0))
    assert np.abs(model.embed(images).sum(0) - kept.sum(0) / 1024).max() < len(images) / 1024


def test_the_unknown_is_as_described(taught):
    model, path, images = taught
    metadata, t = read(path)
    facts = json.loads(metadata["model"])["versions"][-1]["facts"]
    x = model.embed(images)
    shares, margin = model.judge(x)
    scores = x @ t["weights"].T + t["bias"]
    assert len(t["owners"]) == len(model.classes)
    nearness = np.einsum("nd,de,ne->n", x, t["spread"][:-1], x) + x @ t["spread"][-1] + facts["background"]
    nearness = nearness + 2 * scores.max(1)
    certainty = (shares * np.log(np.maximum(shares, 1e-12))).sum(1)
    (sure, spread), (near, apart) = facts["certainty"], facts["nearness"]
    m, w = (nearness - near) / apart, facts["weighing"]
    assert w["certainty"] == "entropy"
    familiarity = (certainty - sure) / spread + w["nearness"] * m + w["steep"] * np.minimum(m + w["far"], 0)
    assert "familiarity = c + w.nearness · m + w.steep · min(m + w.far, 0)" in DOCUMENT.read_text()
    np.testing.assert_allclose(familiarity - facts["threshold"], margin, atol=1e-3)


def test_a_file_from_before_weighings_were_written_means_what_it_meant(taught, tmp_path):
    """It lacks the fact; its certainty is that of the largest probability, and the weights are those of then."""
    model, path, images = taught
    stored, _ = files.read(path)
    facts = {name: fact for name, fact in stored.content.facts.items() if name != "weighing"}
    old = tmp_path / "old.vqp"
    files.write(old, replace(stored, content=replace(stored.content, facts=facts)))
    x = model.embed(images)
    shares, margin = Model.load(old, device="cpu").judge(x)
    near = calibration.Background(*_background(stored)).scores(x) + 2 * stored.content.solved.scores(x).max(1)
    c = (np.log(shares.max(1)) - facts["certainty"][0]) / facts["certainty"][1]
    m = (near - facts["nearness"][0]) / facts["nearness"][1]
    expected = c + 0.35 * m + 5 * np.minimum(m + 4, 0) - facts["threshold"]
    np.testing.assert_allclose(margin, expected, atol=1e-6)
    assert not np.allclose(margin, model.judge(x)[1])


def _background(stored):
    return stored.content.spread[:-1], stored.content.spread[-1], stored.content.facts["background"]


def test_the_checksum_is_as_described(taught):
    metadata, tensors = read(taught[1])
    digest = hashlib.sha256()
    for key in ("format", "version", "model"):
        digest.update(key.encode() + b"\0" + metadata[key].encode() + b"\0")
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name}\0{t.dtype}\0{list(t.shape)}\0".encode() + t.tobytes())
    assert digest.hexdigest() == metadata["checksum"]

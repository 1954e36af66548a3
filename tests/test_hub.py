"""The hub: a folder that is a model, a card that the hub accepts, and uploads that need no network to be tested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import make_vit
from drawings import write_drawings
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.repocard import metadata_load

from vqprompt import Model
from vqprompt.core.backbones.load import save_backbone

NAMES = ["apple", "bicycle", "cactus"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("hub")
    save_backbone(make_vit(), home / "tiny.safetensors")
    return home


@pytest.fixture(scope="module")
def images(home) -> list[Path]:
    return sorted(write_drawings(home / "images", NAMES, range(10)).rglob("*.png"))


@pytest.fixture(scope="module")
def model(home, images) -> Model:
    found = Model(home / "tiny.safetensors", device="cpu")
    found.learn(home / "images")
    found.learn([np.full((28, 28), 9, np.uint8)], ["a|b <i>odd</i>"])
    found.learn([np.full((28, 28), 99, np.uint8)], ["secret"])
    found.forget("secret")
    return found


def test_there_and_back(model, images, home, tmp_path):
    folder = model.save_pretrained(tmp_path / "garden", repo_id="somebody/garden")
    assert {p.name for p in folder.iterdir()} == {"model.vqp", "config.json", "README.md"}
    again = Model.from_pretrained(folder, device="cpu", backbone=home / "tiny.safetensors")
    np.testing.assert_array_equal(again.predict_proba(images), model.predict_proba(images))
    again.learn([np.full((28, 28), 200, np.uint8)], ["more"])
    assert "more" in again.classes and model.path is None


def test_nothing_private_goes_along(model, home, tmp_path):
    folder = model.save_pretrained(tmp_path)
    told = b"".join(p.read_bytes() for p in folder.iterdir())
    assert str(home).encode() not in told
    with pytest.raises(ValueError, match="nothing to undo"):
        Model.from_pretrained(folder).undo()


def test_the_card_is_filled_in_and_the_hub_accepts_it(model, tmp_path):
    folder = model.save_pretrained(tmp_path, repo_id="somebody/garden", licence="mit")
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit" and card.data.pipeline_tag == "image-classification"
    data = metadata_load(folder / "README.md")
    assert data["library_name"] == "vqprompt"
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == pytest.approx(model.accuracy, abs=1e-4)
    text = card.text
    assert 'from_pretrained("somebody/garden")' in text and "| apple | 10 |" in text and "## Limits" in text
    assert "a\\|b &lt;i&gt;odd&lt;/i&gt;" in text and "tiny.safetensors" in text and "licence" in text
    config = json.loads((folder / "config.json").read_text())
    assert config["classes"]["apple"] == 10 and config["backbone"]["name"] == "tiny.safetensors"


def test_push(model, monkeypatch):
    done = {}

    class Made(str):
        repo_id = "somebody/garden"

    def create(self, repo_id, **settings):
        done["made"] = repo_id
        return Made(f"https://huggingface.co/{repo_id}")

    def upload(self, *, repo_id, folder_path, **settings):
        done["files"] = {p.name for p in Path(folder_path).iterdir() if p.name in settings["allow_patterns"]}

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert model.push_to_hub("somebody/garden") == "https://huggingface.co/somebody/garden"
    assert done == {"made": "somebody/garden", "files": {"model.vqp", "config.json", "README.md"}}


def test_from_the_hubs_cache(model, images, home, tmp_path, monkeypatch):
    """What hf_hub_download returns is a path, whoever fetched it."""
    folder = model.save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file, **settings: str(folder / file))
    found = Model.from_pretrained("somebody/garden", device="cpu", backbone=home / "tiny.safetensors")
    assert found.classes == model.classes and found.path is None


@pytest.mark.parametrize("name", ["no such name!", "a/b/c", "-x"])
def test_names_that_the_hub_refuses(model, name, tmp_path):
    with pytest.raises(ValueError, match="cannot be the name of a repository"):
        model.push_to_hub(name)
    with pytest.raises(ValueError, match="neither a folder nor"):
        Model.from_pretrained(name)


def test_bad_input_in_words(model, tmp_path):
    with pytest.raises(ValueError, match="learned nothing"):
        Model(device="cpu").save_pretrained(tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no model\.vqp"):
        Model.from_pretrained(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="a file"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be downloaded"):
        Model.from_pretrained("somebody/garden", local_files_only=True, cache_dir=tmp_path / "cache")


def test_command(model, tmp_path, command, home):
    path = model.save(tmp_path / "garden.vqp")
    model.path = None
    status, _, err = command("export", path, "--hub-folder", tmp_path / "hub")
    assert status == 0 and (tmp_path / "hub" / "README.md").is_file(), err

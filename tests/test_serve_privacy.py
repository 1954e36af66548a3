"""What is left of a class that was forgotten for good: nothing, on the disk or in any answer of the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import Client, drawn, serving, until

from vqprompt import Model
from vqprompt.core.data.content import ContentHashes
from vqprompt.product.serve.images import Gallery
from vqprompt.product.serve.jobs import Jobs

NAME, FILE = "grey heron", "IMG-7731"


def traces(folder: Path, sought: list[bytes]) -> list[str]:
    """Files below a folder that contain, or are called, something of the class."""
    matches = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        matches += [f"{path}: {s[:20]!r}" for s in sought if s in content or s in path.name.encode()]
    return matches


def answers(client: Client) -> str:
    """All that the server says."""
    about = ["/models", "/models/m", "/jobs", "/metrics", "/models/m/confusion", "/models/m/card", "/v2/models/m"]
    return "\n".join(client.get(path).text for path in about)


def features_of(model: Model, name: str) -> list[bytes]:
    record = model.knowledge.classes[name]
    return [record.ids[:1].tobytes(), record.kept[0].tobytes(), record.total.tobytes()]


@pytest.fixture
def scene(tmp_path, monkeypatch) -> Path:
    """Everything that the product writes is below this folder."""
    for place in ("models", "temporary", "home"):
        (tmp_path / place).mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setenv("VQPROMPT_HOME", str(tmp_path / "home"))
    return tmp_path


def images(folder: Path) -> list[Path]:
    """Drawings with the names of photographs, and one that cannot be read."""
    (folder / NAME).mkdir()
    made = [p.rename(folder / NAME / f"{FILE}-{p.name}") for p in drawn(folder, "fish", range(5))]
    (folder / "fish").rmdir()
    broken = folder / NAME / f"{FILE}-broken.png"
    broken.write_bytes(b"\x89PNG nothing")
    return [*made, broken]


def test_nothing_is_left_of_a_class_that_was_forgotten_for_good(scene, tmp_path_factory, command):
    path, pictures = scene / "models" / "m.vqp", tmp_path_factory.mktemp("pictures")
    birds = images(pictures)
    with serving(path) as client:
        for other in ("apple", "car"):
            assert client.teach(drawn(pictures, other, range(5)), other)["state"] == "done"
        taught = client.teach(birds, NAME)
        assert taught["state"] == "done" and FILE in json.dumps(taught)
        assert client.change("rename", old="car", new="lorry")["state"] == "done"
        assert client.change("onnx")["state"] == "done" and client.get("/models/m/onnx").status_code == 200
        checked = client.wait(client.send("uploads", birds[:2], NAME))
        cell = {"label": NAME, "answer": NAME}
        (image, *_) = [
            i for c in (NAME, "apple", "lorry")
            for i in client.get("/models/m/confusion/images", params={**cell, "answer": c}).json()["images"]
        ]  # fmt: skip
        ContentHashes(pictures).of([f"{NAME}/{bird.name}" for bird in birds])  # as research commands do
        sought = [NAME.encode(), FILE.encode(), *features_of(Model.load(path), NAME)]
        places = {Path(trace.split(":")[0]).relative_to(scene).parts[0] for trace in traces(scene, sought)}
        assert places == {"models", "temporary"}
        assert NAME in answers(client) and FILE in answers(client)

        job = client.change("forget", name=NAME, for_good=True)
        assert job["state"] == "done"
        assert traces(scene, sought) == []
        told = answers(client) + client.get(f"/jobs/{job['id']}").text
        assert NAME not in told and FILE not in told
        for gone in (
            f"/models/m/thumbnails/{image}",
            "/models/m/onnx",
            f"/jobs/{taught['id']}",
            f"/jobs/{checked['id']}",
        ):
            assert client.get(gone).status_code == 404, gone
        assert client.post("/models/m/return", json={"version": 3}).status_code == 404, "it was taught then"
        assert list(client.server.state.folder.iterdir()) == [], "uploads and exported files"

        # the same with the command line, while the model is served
        assert client.teach(birds, NAME)["state"] == "done" and NAME in answers(client)
        assert command("forget", path, NAME, "--for-good")[0] == 0
        until(lambda: len(client.about()["classes"]) == 2)
        assert traces(scene, sought) == [] and NAME not in answers(client) and FILE not in answers(client)

        # what was undone is not shown either
        assert client.teach(birds, NAME)["state"] == "done"
        assert client.server.state.gallery.get("m", image) is not None
        assert client.change("undo", steps=1)["state"] == "done"
        assert client.get(f"/models/m/thumbnails/{image}").status_code == 404 and FILE not in client.get("/jobs").text


def test_what_a_model_has_forgotten_is_deleted_before_the_new_model_is_shown(tmp_path, monkeypatch):
    """Whoever sees that a class is gone may rely on it that nothing else is left."""
    plain, shown = Gallery.keep_only, []
    with serving(tmp_path / "m.vqp") as client:
        for name in ("apple", "car"):
            client.teach(drawn(tmp_path, name, range(3)), name)

        def keep_only(*given):
            shown.append([c["name"] for c in Client(client.url).about()["classes"]])
            plain(*given)

        monkeypatch.setattr(Gallery, "keep_only", keep_only)
        assert client.change("forget", name="car", for_good=True)["state"] == "done"
        assert shown == [["apple", "car"]] and len(client.about()["classes"]) == 1


def test_a_file_made_of_a_model_that_has_forgotten_a_class_meanwhile_is_not_kept(tmp_path, monkeypatch):
    with serving(tmp_path / "m.vqp") as client:
        for name in ("apple", "car"):
            client.teach(drawn(tmp_path, name, range(3)), name)
        plain = Jobs._hand_over

        def forget_after(*given):
            update = plain(*given)
            other = Model.load(tmp_path / "m.vqp", device="cpu")  # another program
            other.forget("car", for_good=True)
            other.save()
            return update

        monkeypatch.setattr(Jobs, "_hand_over", forget_after)
        job = client.change("onnx")
        assert job["state"] == "failed" and "forgotten something meanwhile" in job["error"]
        assert client.get("/models/m/onnx").status_code == 404
        assert list(client.server.state.folder.iterdir()) == []

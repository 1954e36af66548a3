"""`vqprompt serve` as programs see it: teach, ask, change, follow, and the Open Inference Protocol."""

from __future__ import annotations

import base64
import io
import json
import multiprocessing
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image
from serving import SIZE, Client, drawn, serving, until

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.core.progress import Progress, Stage
from vqprompt.product.model.file import checksum, parse_metadata
from vqprompt.product.model.left_out import left_out_answers
from vqprompt.product.serve import jobs
from vqprompt.product.serve.batching import Batcher
from vqprompt.product.serve.changes import Outcome
from vqprompt.product.serve.jobs import Jobs, _do
from vqprompt.product.serve.models import ModelFolder
from vqprompt.product.serve.settings import Limits


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("apple", "bicycle", "car", "house"):
        drawn(folder, name, range(14))
    return folder


def of(pictures: Path, name: str, rows=range(8)) -> list[Path]:
    return [pictures / name / f"{row}.png" for row in rows]


@pytest.fixture(scope="session")
def taught(pictures, tmp_path_factory) -> Path:
    """A model of two classes, to be copied."""
    path = tmp_path_factory.mktemp("taught") / "m.vqp"
    model = Model(size=SIZE, device="cpu")
    for name in ("apple", "bicycle"):
        model.learn([str(p) for p in of(pictures, name)], [name] * 8)
    model.save(path)
    return path


@pytest.fixture(scope="module")
def client(tmp_path_factory, taught) -> Client:
    """One server for tests that leave the model as they found it."""
    path = tmp_path_factory.mktemp("served") / "m.vqp"
    shutil.copy(taught, path)
    with serving(path) as client:
        yield client


class TestAsking:
    def test_answers_are_those_of_the_model_itself(self, client, taught, pictures):
        model = Model.load(taught)
        for image in [*of(pictures, "apple", range(8, 14)), *of(pictures, "house", range(3))]:
            (expected,) = model.answers(str(image), top=2)
            told = client.predict(image)
            assert told["name"] == expected.name and told["unknown"] == (expected.name == "unknown")
            assert {c["name"]: c["probability"] for c in told["classes"]} == expected.shares
            sure = client.predict(image, strictness=-100)["classes"]
            assert [(c["name"], c["probability"]) for c in sure] == list(expected.classes)
            assert told["familiarity"] == expected.familiarity

    def test_a_form_does_as_well_as_a_body(self, client, pictures):
        image = of(pictures, "apple", [9])[0]
        answer = client.post("/predict", files={"file": image.read_bytes()}, params={"model": "m", "top": 1})
        assert answer.json() == {**client.predict(image, top=1)} and len(answer.json()["classes"]) == 1

    def test_strictness_moves_the_threshold(self, client, pictures):
        image = of(pictures, "apple", [9])[0]
        assert client.predict(image, strictness=100)["name"] == "unknown"
        assert client.predict(image, strictness=-100)["name"] in ("apple", "bicycle")

    def test_many_at_once_each_get_their_own(self, client, taught, pictures, monkeypatch):
        images = [p for name in ("apple", "bicycle", "house") for p in of(pictures, name, range(14))]
        expected = [a.classes for a in Model.load(taught).answers([str(p) for p in images], top=2)]
        answer, first = Batcher._answer, [True]

        def answer_when_seven_more_wait(batcher, batch):
            if first and first.pop():
                until(lambda: len(batcher.waiting) >= 7)
            return answer(batcher, batch)

        def answered() -> tuple[float, float]:
            text = client.get("/metrics").text
            return _metric(text, "vqprompt_batch_images_sum"), _metric(text, "vqprompt_batch_images_count")

        images_before, batches_before = answered()
        with monkeypatch.context() as patch, ThreadPoolExecutor(32) as pool:  # more than two batches
            patch.setattr(Batcher, "_answer", answer_when_seven_more_wait)
            predictions = list(pool.map(lambda p: Client(client.url).predict(p, strictness=-100), images))
        for told, best in zip(predictions, expected, strict=True):  # up to rounding: products of several rows at once
            assert {c["name"]: c["probability"] for c in told["classes"]} == pytest.approx(dict(best), abs=1e-5)
        images_after, batches_after = answered()
        assert images_after - images_before == len(images)
        assert batches_after - batches_before <= len(images) - 6, "requests that wait together are answered together"

    def test_attention_is_told_for_the_part_of_an_image_that_the_network_sees(self, client, pictures):
        def attention(image: bytes) -> dict:
            return client.post("/models/m/attention", data=image).json()

        told = attention(of(pictures, "apple", [9])[0].read_bytes())
        shares = np.array(told["patches"])
        assert shares.shape == (2, 2) and (shares > 0).all() and 0 < shares.sum() < 1, "some is the class token's own"
        assert told["prompt"] == 0 and told["box"] == [0.0625, 0.0625, 0.9375, 0.9375]
        wide = io.BytesIO()
        Image.new("RGB", (80, 40)).save(wide, "PNG")
        assert attention(wide.getvalue())["box"] == [0.28125, 0.0625, 0.71875, 0.9375]
        broken = client.post("/models/m/attention", data=b"no image at all")
        assert broken.status_code == 415 and "not an image" in broken.json()["error"]

    def test_faults_are_told(self, client):
        for body, status, words in (
            (b"", 415, "empty"),
            (b"no image at all", 415, "not an image"),
            (b"\x89PNG\r\n\x1a\n broken", 415, "replace the file"),
            (b"PK\x03\x04 a zip", 415, "a zip archive"),
        ):
            answer = client.post("/models/m/predict", data=body)
            assert answer.status_code == status and words in answer.json()["error"], answer.text
            assert "image 1" not in answer.json()["error"]
        answer = client.post("/models/heron/predict", data=b"x")
        assert answer.status_code == 404 and "no model 'heron'; the models are m" in answer.json()["error"]
        answer = client.post("/models/m/predict?top=0", data=b"x")
        assert answer.status_code == 422 and "top" in answer.json()["error"]
        assert client.get("/nothing").status_code == 404


class TestTheOpenInferenceProtocol:
    def test_a_triton_client_works(self, client, taught, pictures):
        triton = pytest.importorskip("tritonclient.http")
        asked = triton.InferenceServerClient(client.url.removeprefix("http://"))
        assert asked.is_server_live() and asked.is_server_ready() and asked.is_model_ready("m")
        about = asked.get_model_metadata("m")
        assert about["inputs"][0]["name"] == "image" and about["versions"] == ["0", "1", "2"]
        files = [p.read_bytes() for p in of(pictures, "apple", [9, 10])]
        given = triton.InferInput("image", [2], "BYTES")
        given.set_data_from_numpy(np.array(files, object))
        result = asked.infer("m", [given])
        model = Model.load(taught)
        assert result.as_numpy("class").tolist() == [name.encode() for name in model.predict(files)]
        assert np.allclose(result.as_numpy("probabilities"), model.predict_proba(files))
        only = asked.infer("m", [given], outputs=[triton.InferRequestedOutput("familiarity", binary_data=False)])
        assert len(only.get_response()["outputs"]) == 1 and only.as_numpy("familiarity").shape == (2,)
        pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 30, 3), dtype=np.uint8)
        raw = triton.InferInput("image", [3, 40, 30, 3], "UINT8")
        raw.set_data_from_numpy(pixels)
        assert np.allclose(asked.infer("m", [raw]).as_numpy("probabilities"), model.predict_proba(list(pixels)))
        with pytest.raises(triton.InferenceServerException, match="no model"):
            asked.infer("other", [given])

    def test_plain_json_works(self, client, taught, pictures):
        image = of(pictures, "apple", [9])[0].read_bytes()
        body = {
            "id": "7",
            "inputs": [
                {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(image).decode()]}
            ],
        }
        told = client.post("/v2/models/m/infer", json=body).json()
        assert told["id"] == "7" and told["model_version"] == "2"
        outputs = {o["name"]: o for o in told["outputs"]}
        assert outputs["class"]["data"] == [Model.load(taught).predict(image)]
        assert outputs["probabilities"]["shape"] == [1, 2]
        assert client.post("/v2/models/m/versions/2/infer", json=body).json() == told
        older = client.post("/v2/models/m/versions/1/infer", json=body).json()
        assert older["model_version"] == "1" and older["outputs"][2]["shape"] == [1, 1], "it knew apples only"
        assert outputs["note"]["data"] == [""] and "knows no other class" in older["outputs"][4]["data"][0]
        for version in ("9", "x", "9" * 5000):
            assert client.post(f"/v2/models/m/versions/{version}/infer", json=body).status_code == 404

    @pytest.mark.parametrize(
        "given",
        [
            {}, {"inputs": []}, {"inputs": [3]}, {"inputs": [{"name": "image"}]}, [],
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [2], "data": ["aGk="]}]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["%%%"]}]},
            {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 2, 2, 3], "data": [0] * 12}]},
            {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [300] * 12}]},
            {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 9, 9, 3], "data": [3] * 12}]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}], "outputs": ["x"]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="], "parameters": "x"}]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}], "parameters": [1]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}],
             "outputs": [{"name": "class", "parameters": 3}]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}],
             "outputs": [{"name": ["class"]}]},
            {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}], "id": "\ud800"},
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_told(self, client, given):
        answer = client.post("/v2/models/m/infer", json=given)
        assert answer.status_code in (400, 415) and answer.json()["error"]

    def test_json_that_takes_long_to_read_is_refused_by_its_length(self, client):
        for value in (b"{},", b"[[]],", b"1," * 5):
            answer = client.post("/v2/models/m/infer", data=b'{"inputs": [' + value * 110_000 + b"1]}")
            assert answer.status_code == 413 and "pixels in binary" in answer.json()["error"]

    def test_binary_tensors_that_lie_about_their_length(self, client):
        head = json.dumps({"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1],
                                       "parameters": {"binary_data_size": 8}}]}).encode()  # fmt: skip
        for tensor in (b"\xff\xff\xff\x7fabcd", b"\x01\x00\x00\x00ab\x00\x00"):
            answer = client.post(
                "/v2/models/m/infer",
                data=head + tensor,
                headers={"Inference-Header-Content-Length": str(len(head))},
            )
            assert answer.status_code == 400 and "ends in the middle" in answer.json()["error"]
        for length in ("99999", "-1", "9" * 5000):
            answer = client.post("/v2/models/m/infer", data=head, headers={"Inference-Header-Content-Length": length})
            assert answer.status_code == 400


def _metric(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


class TestLooking:
    def test_openapi_describes_every_route(self, client):
        told = client.get("/openapi.json").json()
        assert {"/predict", "/models/{name}/teach", "/models/{name}/state", "/v2/models/{name}/infer"} <= set(
            told["paths"]
        )
        assert "/static/docs.js" in client.get("/docs").text

    def test_the_page_and_its_files_come_from_here_alone(self, client):
        page = client.get("/").text
        assert "http://" not in page and "https://" not in page and "<script>" not in page and "style=" not in page
        for name in ("app.js", "api.js", "style.css", "icon.svg"):
            assert client.get(f"/static/{name}").status_code == 200

    def test_what_it_confuses_adds_up_to_its_accuracy(self, client, taught):
        told = client.get("/models/m/confusion").json()
        model = Model.load(taught)
        shares = []
        for c in range(2):
            row = {b: n for a, b, n in told["cells"] if a == c}
            shares.append(row.get(c, 0) / sum(row.values()))
        assert np.isclose(np.mean(shares), model.accuracy) and told["tested"] == 16
        assert left_out_answers(Model(size=SIZE).knowledge).images.size == 0

    def test_card_and_file_can_be_downloaded(self, client, taught):
        assert client.get("/models/m/file").content == taught.read_bytes()
        assert "| apple | 8 |" in client.get("/models/m/card").text
        assert client.get("/models/m/onnx").status_code == 404

    def test_metrics(self, client):
        text = client.get("/metrics").text
        assert _metric(text, 'vqprompt_model_classes{model="m"}') == 2
        assert 'vqprompt_requests_total{method="GET",status="200"}' in text


@pytest.mark.spawns
def test_the_story_of_a_model(tmp_path, pictures):
    """From nothing: look through, teach, ask, correct, rename, forget, undo, return."""
    with serving(tmp_path / "m.vqp") as client:
        assert client.about()["classes"] == [] and client.get("/v2/models/m/ready").status_code == 400
        answer = client.post("/models/m/predict", data=of(pictures, "apple")[0].read_bytes())
        assert answer.status_code == 409 and "learned nothing yet" in answer.json()["error"]

        broken = tmp_path / "broken.png"
        broken.write_bytes(b"\x89PNG nothing")
        images = [*of(pictures, "apple"), of(pictures, "apple")[0], broken]
        answer = client.send("uploads", images, "apple")
        upload, job = answer.json()["upload"], client.wait(answer)
        kinds = {f["image"]: f["kind"] for f in job["result"]["findings"]}
        assert job["state"] == "done" and kinds[9] == "unreadable" and kinds[8] == "same"
        told = json.dumps(job)
        assert str(tmp_path) not in told and "vqprompt-serve" not in told, "no path of the server is told"
        job = client.change("teach", upload=upload, leave_out=[8, 9])
        assert job["state"] == "done" and job["result"]["classes"] == [{"name": "apple", "images": 8, "new": True}]
        assert client.post("/models/m/teach", json={"upload": upload}).status_code == 404, "taught uploads are deleted"

        job = client.teach(of(pictures, "bicycle"), "bicycle")
        assert job["result"]["accuracy"] is not None and client.about()["version"] == 2
        cell = client.get("/models/m/confusion/images", params={"label": "apple", "answer": "apple"}).json()
        assert cell["images"]
        thumbnail = client.get(f"/models/m/thumbnails/{cell['images'][0]}")
        assert thumbnail.headers["content-type"] == "image/jpeg" and thumbnail.content[:2] == b"\xff\xd8"

        job = client.teach(of(pictures, "house", [0]), "house")  # "Wrong? It is …"
        assert job["result"]["classes"][0]["new"] and len(client.about()["classes"]) == 3
        assert client.change("rename", old="house", new="<b>home</b>")["state"] == "done"
        assert [c["name"] for c in client.about()["classes"]] == ["<b>home</b>", "apple", "bicycle"]
        assert client.change("forget", name="apple")["state"] == "done"
        with_home = client.about()
        numbers = [version["number"] for version in with_home["versions"]]
        assert with_home["version"] == 5 and numbers == [0, 1, 2, 3, 4, 5] and with_home["can_undo"] == 5
        assert "forgot apple" in with_home["versions"][-1]["description"]

        # an older version answers, and can be returned to; that can be undone
        old = client.get("/v2/models/m/versions/2").json()
        assert old["parameters"]["classes"] == ["apple", "bicycle"]
        assert client.change("return", version=2)["state"] == "done"
        assert [c["name"] for c in client.about()["classes"]] == ["apple", "bicycle"]
        assert client.change("undo", steps=2)["state"] == "done"
        assert [c["name"] for c in client.about()["classes"]] == ["<b>home</b>", "apple", "bicycle"]
        assert client.change("return", version=5)["state"] == "done", "also to one that was undone"
        assert [c["name"] for c in client.about()["classes"]] == ["<b>home</b>", "bicycle"]
        steps = client.about()["can_undo"]
        assert client.change("undo", steps=steps)["state"] == "done", "to before the first teaching"
        assert client.about()["classes"] == [] and client.about()["can_undo"] == 0
        assert client.get("/models/m/file").status_code == 409
        job = client.teach(of(pictures, "car"), "car")
        assert client.about()["backbone"]["size"] == SIZE

        assert client.change("forget", name="car", for_good=True)["state"] == "done"
        assert "car" not in json.dumps(client.about())
        again = client.change("forget", name="car", for_good=True)
        assert again["state"] == "failed" and "knows no class" in again["error"]

        for path, body, status, words in (
            ("undo", {"steps": 50}, 409, "can be undone"),
            ("rename", {"old": "heron", "new": "x"}, 400, "knows no class"),
            ("return", {"version": 77}, 404, "no other version"),
            ("teach", {"upload": "x"}, 404, "no such upload"),
            ("teach", {"surprise": 1}, 400, "surprise"),
            ("forget", {}, 422, "name"),
        ):
            answer = client.post(f"/models/m/{path}", json=body)
            assert answer.status_code == status and words in answer.json()["error"], (path, answer.text)


def test_the_first_lesson_of_a_model_has_a_preview_too(tmp_path, pictures):
    with serving(tmp_path / "m.vqp") as client:
        files = [("files", (p.name, p.read_bytes())) for p in of(pictures, "apple")]
        asked = client.post("/models/m/teach", files=files, data={"label": "apple", "preview": "true"})
        job = client.wait(asked)
        assert job["state"] == "done" and job["result"]["images"] == 8, job
        assert client.about()["classes"] == [] and not (tmp_path / "m.vqp").exists()


def test_what_people_decide_about_images_that_wait_is_kept(client, pictures):
    images = of(pictures, "house", range(4))
    told = client.send("uploads", [*images, images[0]], "barn").json()
    path = f"/models/m/uploads/{told['upload']}"
    client.get(f"/jobs/{told['job']['id']}", params={"wait": 60})
    (waiting,) = client.get("/models/m/state").json()["uploads"]
    assert waiting["upload"] == told["upload"] and waiting["check"] == told["job"]["id"] and waiting["images"] == 5
    assert sum(i["left_out"] for i in client.get(path).json()["images"]) == 1, "the copy, until a person decides"

    def decide(**decision):
        return client.session.patch(client.url + path, json=decision, timeout=60)

    assert decide(images=[0, 1], label="shed", left_out=False).status_code == 200
    now = client.get(path).json()
    assert [i["label"] for i in now["images"]] == ["shed", "shed", "barn", "barn", "barn"]
    assert now["revision"] > waiting["revision"]
    for wrong, status, words in (
        ({"images": [5], "left_out": True}, 404, "it has 5"),
        ({"images": [0], "label": "Apple"}, 400, "apple"),
        ({"images": [0], "colour": "red"}, 422, "colour"),
    ):
        refused = decide(**wrong)
        assert refused.status_code == status and words in refused.json()["error"], refused.text
    assert client.get(f"{path}/images/2").headers["content-type"] == "image/jpeg"
    assert client.get(f"{path}/images/7").status_code == 404
    job = client.change("teach", upload=told["upload"], leave_out=[4])
    assert {c["name"]: c["images"] for c in job["result"]["classes"]} == {"shed": 2, "barn": 2}
    assert client.get("/models/m/state").json()["uploads"] == []
    client.change("undo")


def test_a_job_can_be_followed_live_and_cancelled(tmp_path, taught, pictures):
    path = tmp_path / "m.vqp"
    shutil.copy(taught, path)
    before = path.read_bytes()
    with serving(path) as client:
        images = [p for name in ("car", "house") for p in of(pictures, name, range(14))]
        files = [("files", (f"{n}.png", images[n % 28].read_bytes() + bytes([n // 28]))) for n in range(700)]
        long = client.post("/models/m/teach", files=files, data={"label": "many"}).json()
        queued = client.post("/models/m/rename", json={"old": "apple", "new": "pear"}).json()
        assert client.post(f"/jobs/{queued['id']}/cancel").json()["state"] == "cancelled"
        states = []
        while not states or states[-1]["state"] in ("queued", "running"):
            now = client.get("/models/m/state").json()
            states.append(next(job for job in now["jobs"] if job["id"] == long["id"]))
            if states[-1]["stage"] == "learning" and states[-1]["done"] > 2:
                client.post(f"/jobs/{long['id']}/cancel")
        assert states[-1]["state"] == "cancelled" and now["version"] == 2
        learning = [s for s in states if s["stage"] == "learning"]
        assert learning and learning[-1]["total"] == 700 and learning[-1]["remaining"] > 0
        assert path.read_bytes() == before and client.about()["version"] == 2, "the model is as it was"
        assert client.teach(of(pictures, "car"), "car")["state"] == "done", "and can be taught"


def test_what_other_programs_do_to_a_model_is_noticed(tmp_path, taught, pictures):
    path = tmp_path / "m.vqp"
    shutil.copy(taught, path)
    with serving(tmp_path) as client:  # a folder of models
        client.model = "m"
        shutil.copy(taught, tmp_path / "another one.vqp")
        (tmp_path / "broken.vqp").write_bytes(b"no model")
        until(lambda: len(client.get("/models").json()["models"]) == 2)
        answer = client.post("/predict", data=b"x")
        assert answer.status_code == 400 and "there are several models; name one of" in answer.json()["error"]
        image = of(pictures, "apple", [9])[0].read_bytes()
        assert client.post("/models/another one/predict", data=image).status_code == 200
        model = Model.load(path)
        model.forget("apple")
        model.save()
        until(lambda: len(client.about()["classes"]) == 1)
        (tmp_path / "another one.vqp").unlink()
        until(lambda: len(client.get("/models").json()["models"]) == 1)


def with_right_checksum(path: Path, description: dict) -> bytes:
    """The model's file with parts of its description replaced."""
    data = path.read_bytes()
    header, tensors = parse_metadata(data, path), safetensors.numpy.load(data)
    header["model"] = json.dumps({**json.loads(header["model"]), **description})
    header["checksum"] = checksum(header, tensors)
    return safetensors.numpy.save(tensors, metadata=header)


def test_a_bad_file_is_a_problem_of_one_model_alone(tmp_path, taught, pictures, capsys):
    good = taught.read_bytes()
    nonsense = with_right_checksum(taught, {"records": []})
    shutil.copy(taught, tmp_path / "m.vqp")
    (tmp_path / "bad.vqp").write_bytes(nonsense)
    os.mkfifo(tmp_path / "pipe.vqp")

    def models() -> set[str]:
        return {model["name"] for model in client.get("/models").json()["models"]}

    with serving(tmp_path) as client:
        client.model = "m"
        assert models() == {"m"}
        told = capsys.readouterr().err
        assert "bad.vqp" in told and "pipe.vqp: " in told and "Traceback" not in told
        for path in ("/models/bad", "/v2/models/pipe", "/models/bad/file"):
            answer = client.get(path)
            assert answer.status_code == 409 and "cannot be used" in answer.json()["error"]
            assert str(tmp_path) not in answer.text
        assert client.post("/models/bad/undo", json={}).status_code == 409
        assert client.teach(of(pictures, "car"), "car")["state"] == "done"

        (tmp_path / "bad.vqp").write_bytes(good)
        until(lambda: "bad" in models())
        (tmp_path / "bad.vqp").write_bytes(nonsense)
        until(lambda: "bad.vqp" in capsys.readouterr().err)
        image = of(pictures, "apple", [9])[0].read_bytes()
        assert client.post("/models/bad/predict", data=image).status_code == 200, "the model before answers"
        job = client.wait(client.post("/models/bad/undo", json={}))
        assert job["state"] == "failed" and str(tmp_path) not in job["error"]
        assert client.teach(of(pictures, "house"), "house")["state"] == "done", "later jobs run"
        (tmp_path / "bad.vqp").unlink()
        until(lambda: models() == {"m"})
        assert client.get("/models/bad").status_code == 404


def test_nothing_ends_the_thread_that_does_the_jobs(tmp_path, taught, pictures, monkeypatch):
    path = tmp_path / "m.vqp"
    shutil.copy(taught, path)
    broken = threading.Event()

    def breaks(*given):
        broken.set()
        raise IndexError("of some model")

    with serving(path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(ModelFolder, "look_again", breaks)
            assert broken.wait(60)
            patch.setattr(Jobs, "_hand_over", breaks)
            assert client.teach(of(pictures, "car"), "car")["state"] == "failed"
        assert client.teach(of(pictures, "car"), "car")["state"] == "done"


def test_limits_are_checked():
    assert Limits.parse(["upload_mb=7", "thumbnails=0"]) == Limits(upload_mb=7, thumbnails=0)
    for given, words in (("heron=3", "upload_images=2000"), ("upload_mb", "valid number"), ("jobs=0", "equal to 1")):
        with pytest.raises(UserError, match=words):
            Limits.parse([given])


def test_bytes_of_a_file_are_an_image(taught, pictures):
    model, image = Model.load(taught), of(pictures, "apple", [9])[0]
    assert model.predict(image.read_bytes()) == model.predict(image)
    assert model.predict([image.read_bytes(), image]) == model.predict([image] * 2)
    model.learn([p.read_bytes() for p in of(pictures, "car")], "car")
    assert model.counts["car"] == 8


def test_the_ten_lines_in_the_docs_do_what_they_say(tmp_path, pictures, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = page.partition("<!-- tested by tests/test_serve.py -->\n```python\n")[2].partition("```")[0]
    assert 5 < len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    for name, image in zip("abcd", of(pictures, "apple"), strict=False):
        shutil.copy(image, tmp_path / f"{name}.png")
    with serving(tmp_path / "garden.vqp") as client:
        exec(code.replace("http://127.0.0.1:8000", client.url), {})
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "done None" and told[1].split()[0] in ("kestrel", "unknown")


def test_progress_crosses_the_pipe_at_most_ten_times_a_second(monkeypatch):
    """With a clock of its own, that goes on by a 64th of a second from event to event."""
    (ours, theirs), clock = multiprocessing.Pipe(), [100.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))

    def do(change, tell):
        for number in range(200):
            clock[0] += 1 / 64
            tell(Progress(Stage.LEARNING, number + 1, 200))
        return Outcome("done")

    assert _do(SimpleNamespace(body=SimpleNamespace(do=do)), theirs).state == "done"
    sent = []
    while ours.poll():
        sent.append(ours.recv().done)
    assert sent == [*range(1, 200, 7), 200]

"""Elsewhere: an ONNX file and a page in a browser give the model's answers, without this package."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from browser import Browser
from conftest import TINY, make_vit
from drawings import write_drawings
from PIL import Image

from vqprompt import Model
from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.errors import UserError
from vqprompt.core.onnx.graph import Graph, Session
from vqprompt.core.statistics.discriminant import Discriminant
from vqprompt.product.export import web_page
from vqprompt.product.export.onnx import add_answers, export_onnx
from vqprompt.product.export.web_page import fetch_runtime
from vqprompt.product.model import efforts

NAMES = ["apple", "bicycle", "cactus", "car"]
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = write_drawings(tmp_path_factory.mktemp("test"), NAMES, range(80, 90))
    Image.open(folder / "car" / "80.png").resize((90, 40)).save(folder / "car" / "wide.png")
    return sorted(folder.rglob("*.png"))


@pytest.fixture(scope="session")
def runtime() -> Path:
    """The npm package onnxruntime-web."""
    try:
        return fetch_runtime()
    except UserError as error:
        pytest.skip(str(error))


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/index.html"
    finally:
        server.shutdown()
        server.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module", params=["instant", "good", "best"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    home = tmp_path_factory.mktemp("taught")
    save_backbone(make_vit(replace(TINY, depth=3)), home / "tiny.safetensors")
    found = Model(home / "tiny.safetensors", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        for effort, settings in efforts.TRAINING.items():
            brief = replace(settings, epochs=2)
            patch.setitem(efforts.TRAINING, effort, brief)
        found.learn(write_drawings(home / "first", NAMES, range(20)), effort=request.param)
    found.save(home / "drawings.vqp")
    return found


def prepared(images: list[Path], side: int) -> dict[str, Any]:
    opened = [Image.open(path).convert("RGB") for path in images]
    squares = [np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)) for image in opened]
    aspects = [image.width / image.height for image in opened]
    return {"pixels": np.stack(squares), "aspect": np.array(aspects, np.float32)}


def test_the_onnx_file_gives_the_models_answers_for_any_number_of_images(
    model: Model, images: list[Path], tmp_path: Path
) -> None:
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path / "drawings.onnx"))
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == list(model.classes) and "cubic" in told["prepare"]
    about = json.loads((tmp_path / "drawings.onnx.json").read_text(encoding="utf-8"))
    assert told == {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in about.items()}
    inputs_and_outputs = {value.name for value in (*session.get_inputs(), *session.get_outputs())}
    assert about["prepare"].keys() == inputs_and_outputs
    backbone = json.loads(told["backbone"])
    assert backbone["fingerprint"] == model.backbone.fingerprint
    assert backbone["name"] == "tiny.safetensors", "folders are private"
    shares, familiar = model.judge(model.embed(images))
    for count in (1, 5, len(images)):
        got, score = session.run(["probabilities", "familiarity"], prepared(images[:count], int(told["side"])))
        assert got.shape == (count, 4) and score.shape == (count,)
        np.testing.assert_allclose(got, shares[:count], atol=1e-3)
        np.testing.assert_allclose(score, familiar[:count], atol=1e-2, rtol=1e-3)
    assert np.array_equal(got.argmax(1), shares.argmax(1)) and np.array_equal(score < 0, familiar < 0)


@pytest.mark.parametrize("model", ["instant"], indirect=True)
def test_several_kinds_of_a_class_are_one_column_and_counterexamples_none(model: Model, images: list[Path]) -> None:
    solution = model.knowledge.solution
    assert solution is not None
    first = solution.discriminant
    two = Discriminant(
        np.concatenate([first.weights[:1] * 0.9, first.weights]),
        np.concatenate([first.bias[:1] * 0.9, first.bias]),
        np.array([0, 0, 1, 2, 3]),
    )  # fmt: skip
    graph, features = Graph(), model.embed(images)
    rare = Discriminant(first.weights[2:] * 1.1, first.bias[2:], np.arange(2))
    changed = replace(solution, discriminant=two, against=rare)
    add_answers(graph, graph.input("features", "float32", "n", features.shape[1]), changed)
    got, familiar = Session(graph).run(features=features)
    shares, expected = changed.judge(features)
    np.testing.assert_allclose(got, shares, atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(familiar, expected, atol=1e-2, rtol=1e-3)
    without = replace(changed, against=None).judge(features)[1]
    assert (without != expected).any() and (expected <= without).all() and got.shape[1] == 4


def test_the_documented_program_answers_without_this_package(
    model: Model,
    images: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export_onnx(model, tmp_path / "garden.onnx")
    Image.open(images[0]).convert("RGB").save(tmp_path / "photo.png")
    (program,) = re.findall(r"```python\n(import json\n.*?)```", (DOCS / "trust.md").read_text(), re.S)
    assert "vqprompt" not in program
    monkeypatch.chdir(tmp_path)
    exec(program.replace("photo.jpg", "photo.png"), {})
    assert capsys.readouterr().out.split()[0] == model.predict(tmp_path / "photo.png")


def test_the_command_refuses_before_it_works(model: Model, tmp_path: Path, command: Any) -> None:
    target = tmp_path / "a" / "drawings.onnx"
    status, out, err = command("export", model.path, "--onnx", target)
    assert status == 0 and "drawings.onnx" in out, err
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["drawings.onnx", "drawings.onnx.json"]
    assert "--onnx" in command("export", model.path)[2]
    assert "no such" in command("export", tmp_path / "none.vqp", "--onnx", tmp_path / "x.onnx")[2].lower()
    assert "is a folder" in command("export", model.path, "--onnx", tmp_path)[2]
    assert "special file" in command("export", model.path, "--onnx", "/dev/null")[2]
    assert "folder" in command("export", tmp_path, "--onnx", tmp_path / "x.onnx")[2]
    assert "--web" in command("export", model.path, "--onnx", tmp_path / "x.onnx", "--ort", target)[2]
    assert "npm package" in command("export", model.path, "--web", tmp_path / "page", "--ort", target)[2]
    assert "other files" in command("export", model.path, "--web", tmp_path / "a", "--ort", target)[2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_runtime_that_cannot_be_downloaded_is_asked_for(
    model: Model, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "URL", "http://127.0.0.1:9/runtime.tgz")
    status, _, err = command("export", model.path, "--web", tmp_path / "page")
    assert status == 2 and "npm pack" in err and "--ort" in err and not (tmp_path / "page").exists()


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With the embedded backbone, small images."""
    home = tmp_path_factory.mktemp("drawings")
    model = Model(size=42, device="cpu")
    model.learn(write_drawings(home / "first", NAMES, range(10)))
    model.save(home / "m.vqp")
    return model


@pytest.mark.slow
def test_a_page_answers_in_a_browser_as_the_model_does_also_without_a_network(
    drawings: Model, tmp_path: Path, images: list[Path], runtime: Path, command: Any
) -> None:
    page = tmp_path / "page"
    status, _, err = command("export", drawings.path, "--web", page, "--ort", runtime)
    assert status == 0, err
    assert sum(file.stat().st_size for file in page.iterdir()) < 40e6
    asked = [images[0], images[-1]]
    expected = [drawings.answers(image, top=4)[0] for image in asked]
    browser = Browser()

    def ask_about_all() -> None:
        browser.wait(lambda: "4 classes" in browser.one("#state").text)
        for image, answer in zip(asked, expected, strict=True):
            browser.one("#file").send_keys(str(image))
            shown = answer.classes[0][0] if answer.name != "unknown" else "Unknown"
            browser.wait(lambda shown=shown: shown in browser.one("#state").text)
            told = browser.driver.execute_async_script(
                "const done = arguments[0];"
                "vqprompt.predict(document.getElementById('file').files[0]).then(done, (e) => done(String(e)))"
            )
            classes = dict(answer.classes)
            np.testing.assert_allclose(told["probabilities"], [classes[name] for name in drawings.classes], atol=1e-3)

    try:
        browser.driver.get((page / "index.html").as_uri())
        ask_about_all()
        with web_server(page) as address:
            browser.driver.get(address)
            browser.driver.execute_async_script("navigator.serviceWorker.ready.then(arguments[0])")
        browser.driver.get(address)  # the server is gone
        ask_about_all()
        one = Model(size=42, device="cpu")
        one.learn([str(image) for image in images[:6]], "car")
        web_page.export_page(one, tmp_path / "one", runtime)
        browser.driver.get((tmp_path / "one" / "index.html").as_uri())
        browser.wait(lambda: browser.one("#state").text.endswith("1 class"))
        browser.one("#file").send_keys(str(images[0]))
        browser.wait(lambda: browser.one("#state").text == "car (no percentage: the model knows no other class)")
        assert browser.one("#answers").text == "car"
    finally:
        browser.driver.quit()


def test_the_documented_page_answers_without_this_package(
    drawings: Model, images: list[Path], tmp_path: Path, runtime: Path
) -> None:
    (page,) = re.findall(r"```html\n(.*?)```", (DOCS / "trust.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    export_onnx(drawings, tmp_path / "garden.onnx")
    for kind, content in web_page.read_runtime(runtime).items():
        (tmp_path / web_page.RUNTIME[kind]).write_bytes(content)
    browser = Browser()
    try:
        with web_server(tmp_path) as address:
            browser.driver.get(address)
            browser.wait(lambda: browser.driver.execute_script("return !!document.getElementById('file').onchange"))
            shares, _ = drawings.judge(drawings.embed(images))
            for image in (
                images[row] for row in shares.argmax(0)
            ):  # of each class the clearest: browsers differ a little
                answer = drawings.predict(image)
                browser.one("#file").send_keys(str(image))
                browser.wait(lambda answer=answer: browser.one("#answer").text == answer)
    finally:
        browser.driver.quit()

"""The ML backend for Label Studio: what it does with odd requests, and a whole story with the real Label Studio.

The story needs Label Studio in an environment of its own, because it pins many packages:
python -m venv ls && ls/bin/pip install label-studio; LABEL_STUDIO=ls/bin/label-studio pytest tests/test_label_studio.py
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import write_entry_points
from drawings import write_drawings
from serving import serving

EXAMPLE = Path(__file__).parents[1] / "examples" / "vqprompt-label-studio"
CONFIG = """<View><Image name="picture" value="$image"/><Choices name="what" toName="picture">
<Choice value="apple"/><Choice value="bicycle"/><Choice value="car"/></Choices></View>"""
USER, PASSWORD = "a@example.org", "not-a-secret-1"
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The example package, as pip would install it: its folder can be imported from, and its entry points are found."""
    folder = tmp_path_factory.mktemp("installed")
    write_entry_points(folder, EXAMPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    return write_drawings(tmp_path_factory.mktemp("drawn"), ["apple", "bicycle", "car"], range(8))


@pytest.fixture
def connected(monkeypatch):
    monkeypatch.setenv("LABEL_STUDIO_URL", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", KEY)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served") / "m.vqp") as client:
        yield client


def written_out(image: Path) -> dict[str, Any]:
    return {"image": "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()}


def test_tasks_are_predicted_and_one_that_cannot_be_read_does_not_spoil_the_others(connected, drawn, tmp_path, capsys):
    with serving(tmp_path / "m.vqp") as client:
        assert client.get("/label-studio/m/health").json()["status"] == "UP"
        assert client.post("/label-studio/m/setup", json={"schema": CONFIG}).json() == {"model_version": "m-0"}
        data = [
            written_out(drawn / "apple" / "1.png"),
            {"image": "http://169.254.169.254/secret"},
            {"image": "data:,%"},
        ]
        asked = {"tasks": [{"id": i, "data": d} for i, d in enumerate(data)], "label_config": CONFIG}
        empty = client.post("/label-studio/m/predict", json=asked).json()["results"]
        assert [told["result"] for told in empty] == [[], [], []]
        for name in ("apple", "bicycle"):
            client.teach(sorted((drawn / name).iterdir()), name)
        first, *others = client.post("/label-studio/m/predict", json=asked).json()["results"]
        assert first["result"] == [
            {"from_name": "what", "to_name": "picture", "type": "choices", "value": {"choices": ["apple"]}}
        ]
        assert 0 < first["score"] <= 1 and first["model_version"] == "m-2"
        assert [told["result"] for told in others] == [[], []]
        assert "images are read from http://127.0.0.1:9 alone" in capsys.readouterr().err
        without = CONFIG.replace('<Choice value="apple"/>', "")
        (told,) = client.post(
            "/label-studio/m/predict", json={"tasks": asked["tasks"][:1], "label_config": without}
        ).json()["results"]
        assert told["result"] == [], "a class that may not be chosen there"


@pytest.mark.parametrize("config", [None, "<View", "<View><Text name='t' value='$t'/></View>"])
def test_a_project_that_has_no_classes_for_images_is_refused(connected, untaught, config):
    answer = untaught.post("/label-studio/m/setup", json={"schema": config})
    assert answer.status_code == 400 and "labelling interface" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("webhook", {"action": "ANNOTATION_CREATED", "task": {"id": 1}}, "project.id"),
        ("webhook", {"action": "ANNOTATION_CREATED", "project": {}, "task": {"id": 1}}, "project.id"),
        ("webhook", {"action": "START_TRAINING", "project": {"id": []}}, "project.id"),
        ("webhook", {"action": "ANNOTATION_UPDATED", "project": {"id": 1}, "task": "x"}, "task"),
        ("webhook", [], "body"),
        ("predict", {"label_config": CONFIG, "tasks": [{"id": 1}]}, "data"),
        ("predict", {"label_config": CONFIG, "tasks": [{"id": 1, "data": None}]}, "data"),
        ("predict", {"tasks": []}, "labelling interface"),
    ],
)
def test_a_body_that_lacks_something_is_refused_with_the_name_of_it(connected, untaught, path, body, told):
    answer = untaught.post(f"/label-studio/m/{path}", json=body)
    assert answer.status_code in (400, 422) and told in answer.json()["error"]


def test_what_label_studio_answers_may_be_anything_and_the_tasks_wait(connected, monkeypatch, tmp_path, capsys):
    import vqprompt_label_studio

    monkeypatch.setattr(vqprompt_label_studio.LabelStudio, "request", lambda self, path: b"<html>")
    with serving(tmp_path / "m.vqp") as client:
        event = {"action": "ANNOTATION_CREATED", "project": {"id": 1}, "task": {"id": 2}}
        for _ in range(2):
            assert client.post("/label-studio/m/webhook", json=event).status_code == 201
            assert wait_for(lambda: "trying again with the next annotation" in capsys.readouterr().err)
        (waiting,) = vqprompt_label_studio._waiting.values()
        assert waiting.annotated == {(1, 2)} and not waiting.teaching.locked()


def test_without_an_address_the_way_out_is_told_and_a_token_fits_into_the_url(monkeypatch, tmp_path):
    monkeypatch.delenv("LABEL_STUDIO_URL", raising=False)
    with serving(tmp_path / "m.vqp", token="a-long-secret-token") as client:
        host = client.url.removeprefix("http://")
        assert client.post("/label-studio/m/setup", json={"schema": CONFIG}).status_code == 401
        for password, status in (("a-long-secret-token", 400), ("another-secret-token", 401)):
            url = f"http://label-studio:{password}@{host}/label-studio/m/setup"
            answer = requests.post(url, json={"schema": CONFIG}, timeout=60)
            assert answer.status_code == status
        assert (
            requests.get(f"http://{host}/models", headers={"Authorization": "Basic %"}, timeout=60).status_code == 401
        )
        answer = client.post(
            "/label-studio/m/setup", json={"schema": CONFIG}, headers={"Authorization": "Bearer a-long-secret-token"}
        )
        assert "needs LABEL_STUDIO_URL and LABEL_STUDIO_API_KEY" in answer.json()["error"]


class Studio:
    """A Label Studio that runs, through its own API."""

    def __init__(self, url: str) -> None:
        self.url, self.session = url, requests.Session()

    def log_in(self) -> str:
        """As a person does, who then makes a personal access token. Returns it."""
        self.session.get(f"{self.url}/user/login/", timeout=60)
        form = {"email": USER, "password": PASSWORD, "csrfmiddlewaretoken": self.session.cookies["csrftoken"]}
        self.session.post(f"{self.url}/user/login/", data=form, headers={"Referer": self.url}, timeout=60)
        token = self.ask("POST", "/api/token/", 201, headers={"X-CSRFToken": self.session.cookies["csrftoken"]})[
            "token"
        ]
        access = self.ask("POST", "/api/token/refresh/", json={"refresh": token})["access"]
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {access}"
        return str(token)

    def ask(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        answer = self.session.request(method, self.url + path, timeout=120, **more)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json() if answer.content else None


def wait_for(what: Callable[[], Any], seconds: float = 120) -> Any:
    until = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < until:
        time.sleep(0.5)
    return result


@contextmanager
def label_studio(program: str, home: Path) -> Iterator[Studio]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    allow = {"ML_BLOCK_LOCAL_IP": "false", "SSRF_PROTECTION_ENABLED": "false"}  # our server is on this machine
    quiet = {"COLLECT_ANALYTICS": "false", "LABEL_STUDIO_LATEST_VERSION_CHECK": "false"}
    account = ["--username", USER, "--password", PASSWORD]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | allow | quiet | {"HOME": str(home)}
    with (
        (home / "label-studio.log").open("wb") as log,
        subprocess.Popen(
            [program, "start", "--no-browser", "--port", str(port), "--data-dir", str(home / "data"), *account],
            stdout=log, stderr=log, env=environment, cwd=home,
        ) as running,
    ):  # fmt: skip
        try:
            studio = Studio(f"http://127.0.0.1:{port}")

            def answers() -> bool:
                try:
                    return studio.session.get(f"{studio.url}/health", timeout=5).ok
                except requests.ConnectionError:
                    return running.poll() is not None

            assert wait_for(answers, 300) and running.poll() is None, (home / "label-studio.log").read_text()[-3000:]
            yield studio
        finally:
            running.terminate()


PROGRAM = os.environ.get("LABEL_STUDIO") or shutil.which("label-studio") or ""


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM, reason="Label Studio is not installed; set LABEL_STUDIO to its program")
def test_annotations_in_label_studio_teach_the_model_and_it_predicts_there(drawn, tmp_path, monkeypatch):
    with label_studio(PROGRAM, tmp_path) as studio, serving(tmp_path / "m.vqp") as client:
        monkeypatch.setenv("LABEL_STUDIO_URL", studio.url)
        monkeypatch.setenv("LABEL_STUDIO_API_KEY", studio.log_in())
        say = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: E731
        version = studio.ask("GET", "/api/version")["release"]
        project = studio.ask("POST", "/api/projects/", 201, json={"title": "drawings", "label_config": CONFIG})["id"]
        names = [(name, n) for name in ("apple", "bicycle", "car") for n in range(5)]
        for name, n in names:
            with (drawn / name / f"{n}.png").open("rb") as file:
                studio.ask("POST", f"/api/projects/{project}/import", 201, files={"file": (f"{name}-{n}.png", file)})
        tasks = studio.ask("GET", f"/api/tasks?project={project}&page_size=100")["tasks"]
        say(f"Label Studio {version}: a project with {len(tasks)} tasks, such as {tasks[0]['data']}")

        backend = {"project": project, "url": f"{client.url}/label-studio/m", "title": "vqprompt"}
        connected = studio.ask("POST", "/api/ml", 201, json=backend)
        say(f"connected the backend: state {connected['state']}, model version {connected['model_version']}")
        assert connected["state"] == "CO"

        label = {task["id"]: task["data"]["image"].rpartition("/")[2].split("-")[1] for task in tasks}
        learned = [t for t in label if label[t] != "car"][:4] + [t for t in label if label[t] == "bicycle"]
        for number in learned:
            result = {"from_name": "what", "to_name": "picture", "type": "choices"}
            body = {"result": [{**result, "value": {"choices": [label[number]]}}]}
            studio.ask("POST", f"/api/tasks/{number}/annotations/", 201, json=body)
        say(f"annotated {len(learned)} tasks: apple and bicycle")
        about = lambda: {c["name"]: c["images"] for c in client.about()["classes"]}  # noqa: E731
        assert wait_for(lambda: sum(about().values()) == len(learned)), about()
        say(f"the model has learned {about()}, version {client.about()['history'][-1]['date']}")

        chosen = {"all": False, "included": list(label)}
        studio.ask(
            "POST", f"/api/dm/actions?id=retrieve_tasks_predictions&project={project}", json={"selectedItems": chosen}
        )
        predicted = {
            p["task"]: (p["result"][0]["value"]["choices"][0], p["score"], p["model_version"])
            for p in studio.ask("GET", f"/api/predictions?project={project}")
            if p["result"]
        }
        right = [t for t in label if t in predicted and predicted[t][0] == label[t]]
        say(f"predictions in Label Studio: {len(predicted)} of {len(label)}, right: {len(right)}")
        say(f"one of them: {predicted[right[0]]}")
        assert len(right) >= len(learned) - 1
        assert all(0 < score <= 1 and made_by.startswith("m-") for _, score, made_by in predicted.values())

        (annotation,) = studio.ask("GET", f"/api/tasks/{learned[0]}/annotations/")
        changed = [{**annotation["result"][0], "value": {"choices": ["car"]}}]
        studio.ask("PATCH", f"/api/annotations/{annotation['id']}/", json={"result": changed})
        assert wait_for(lambda: about().get("car") == 1), about()
        say(f"changed the annotation of task {learned[0]}: {about()}")

        studio.ask("POST", f"/api/ml/{connected['id']}/train")
        assert sum(about().values()) == len(learned), "what it knows already is not counted again"

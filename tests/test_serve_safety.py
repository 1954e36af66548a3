"""What a server refuses: each way in which somebody could harm it, tried."""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import stat
import threading
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from drawings import drawings
from PIL import Image
from serving import SIZE, Client, serving, until
from test_images import png as png_that_claims

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.serve.batching import Batcher
from vqprompt.product.serve.changes import Outcome
from vqprompt.product.serve.guard import check_token, is_local
from vqprompt.product.serve.images import Upload, private_folder, shown_name
from vqprompt.product.serve.jobs import Jobs

TOKEN = "a secret of some length"


def png(number: int = 0) -> bytes:
    images, _ = drawings()
    packed = io.BytesIO()
    Image.fromarray(images[number % 50, number // 50]).save(packed, "PNG")
    return packed.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.vqp"
    taught = Model(size=SIZE, device="cpu")
    taught.learn([png(0), png(50), png(1), png(51)], ["airplane", "airplane", "apple", "apple"])
    taught.save(path)
    return path


@pytest.fixture(scope="module")
def client(model) -> Client:
    with serving(model, image_mb=1, upload_mb=2, upload_images=5, jobs=3, uploads=6) as client:
        yield client


@pytest.fixture(scope="module")
def impatient(model) -> Client:
    """Apart from the others, because on a busy machine they may be slow themselves."""
    with serving(model, body_seconds=1, header_seconds=1, answer_seconds=1, upload_minutes=0.01) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(model, tmp_path_factory) -> Client:
    path = tmp_path_factory.mktemp("guarded") / "m.vqp"
    shutil.copy(model, path)
    with serving(path, token=TOKEN) as client:
        yield client


# ---------------------------------------------------------------------------------------------- size


def test_a_body_that_is_too_large_is_refused_by_its_header(client):
    answer = client.post("/models/m/predict", data=b"x" * 1_000_001)
    assert answer.status_code == 413 and "1 MB" in answer.json()["error"]
    assert client.post("/models/m/teach", data=b"x" * 2_000_001).status_code == 413


def test_a_body_that_does_not_say_how_large_it_is_is_cut_off(client):
    def endless():
        for _ in range(100):
            yield b"x" * 100_000

    assert client.post("/models/m/predict", data=endless()).status_code == 413


def test_an_upload_of_too_many_images_is_refused(client):
    files = [("files", (f"{n}.png", png(n))) for n in range(6)]
    answer = client.post("/models/m/teach", files=files, data={"label": "x"})
    assert answer.status_code == 400 and "Maximum number of files is 5" in answer.json()["error"]
    files = [("files", ("a.png", png() + b"\0" * 1_000_001))]
    assert client.post("/models/m/teach", files=files, data={"label": "x"}).status_code == 413


def test_compressed_bodies_are_refused(client):
    answer = client.post("/models/m/predict", data=zlib.compress(b"0" * 10**6), headers={"Content-Encoding": "deflate"})
    assert answer.status_code == 415


@pytest.mark.parametrize("wanted", ["x", "bytes=5-2", "bytes=-", f"bytes=0-{'9' * 5000}", "pages=1-2"])
def test_a_range_that_is_none_is_refused_with_words(client, wanted):
    answer = client.get("/models/m/file", headers={"range": wanted})
    assert answer.status_code == 400 and "bytes=FIRST-LAST" in answer.json()["error"]
    part = client.get("/models/m/file", headers={"range": "bytes=2-5"})
    assert part.status_code == 206 and part.content == client.get("/models/m/file").content[2:6]


# ---------------------------------------------------------------------------------------------- content


def test_a_zip_bomb_is_refused(client):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("apple/a.png", b"\0" * 50_000_000)
    for path, more in (
        ("/models/m/predict", {"data": packed.getvalue()}),
        ("/models/m/teach", {"files": [("files", ("a.zip", packed.getvalue()))], "data": {"label": "x"}}),
    ):
        answer = client.post(path, **more)
        assert answer.status_code == 415 and "unpack it" in answer.json()["error"]


def test_an_image_of_a_billion_pixels_is_refused_by_its_header(client, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("it is decoded"))
    bomb = png_that_claims(40_000, 40_000, b"\0" * 10**6)
    answer = client.post("/models/m/predict", data=bomb)
    assert answer.status_code == 415 and "megapixels" in answer.json()["error"]


def test_a_polyglot_is_an_image_and_nothing_else(client):
    """A picture that is also a page with a script: it is read as pixels, and comes back as pixels of our own."""
    evil = png(2) + b"<html><script>alert(1)</script>"
    answer = client.post("/models/m/predict", data=evil, headers={"Content-Type": "text/html"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    job = client.wait(client.post("/models/m/teach", files=[("files", ("x.html", evil))], data={"label": "evil"}))
    assert job["state"] == "done"
    more = client.wait(client.post("/models/m/teach", files=[("files", ("y.html", png(52)))], data={"label": "evil"}))
    assert more["state"] == "done"
    told = {c["name"] for c in client.about()["classes"]}
    assert "evil" in told
    images = [
        image
        for other in told
        for image in client.get("/models/m/confusion/images", params={"label": "evil", "answer": other}).json()[
            "images"
        ]
    ]
    assert images
    for image in images:
        thumbnail = client.get(f"/models/m/thumbnails/{image}")
        assert thumbnail.headers["content-type"] == "image/jpeg" and b"script" not in thumbnail.content
        assert thumbnail.headers["x-content-type-options"] == "nosniff"
    client.change("undo", steps=2)


@pytest.mark.parametrize(
    "kind", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>"]
)
def test_formats_that_run_programs_are_not_opened(client, kind):
    assert client.post("/models/m/predict", data=kind).status_code == 415


# ---------------------------------------------------------------------------------------------- names and paths


def test_no_name_from_a_request_becomes_a_path(client, tmp_path, monkeypatch):
    state_before = {p.name for p in tmp_path.parent.iterdir()}
    for name in ("../../../../tmp/evil.png", "/etc/passwd", "..\\..\\evil", "a\0b.png", "C:\\evil.png"):
        answer = client.post("/models/m/uploads", files=[("files", (name, png(3)))], data={"label": "x"})
        if answer.status_code == 202:
            assert "/" not in answer.json()["images"][0]["name"] and "\\" not in answer.json()["images"][0]["name"]
            client.wait(answer)
            upload = answer.json()["upload"]
            assert client.session.delete(f"{client.url}/models/m/uploads/{upload}").status_code == 204
    assert {p.name for p in tmp_path.parent.iterdir()} == state_before


@pytest.mark.parametrize(
    "path",
    [
        "/models/..%2f..%2fetc%2fpasswd", "/models/%2e%2e/file", "/static/../app.py", "/static/..%2fapp.py",
        "/static/%2e%2e%2fserver.py", "/models/m/thumbnails/..%2f..%2fx", "/v2/models/..%2fm/infer", "/jobs/..%2fx",
        "/models/m/uploads/..%2f..%2fm.vqp",
    ],
)  # fmt: skip
def test_no_path_leads_out(client, path):
    connection = client.connect(f"GET {path} {client.head}Connection: close\r\n\r\n".encode())
    answer = b""
    while part := connection.recv(65536):
        answer += part
    assert answer.split(b" ")[1] in (b"404", b"405") and b"root:" not in answer and b"import" not in answer


def test_a_script_in_a_class_name_stays_a_name(client):
    name = "<script>alert(1)</script>"
    files = [("files", (f"{name}.png", png(4)))]
    job = client.wait(client.post("/models/m/teach", files=files, data={"label": name}))
    assert job["state"] == "done"
    answer = client.get("/models/m")
    assert answer.headers["content-type"] == "application/json"
    assert name in [c["name"] for c in answer.json()["classes"]]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    client.change("undo", steps=1)


@pytest.mark.parametrize("label", ["", " ", "unknown", "a\nb", "\x1b[2J", "x" * 201, "Airplane"])
def test_names_that_cannot_be_classes_are_refused_before_anything_is_kept(client, label):
    answer = client.post("/models/m/teach", files=[("files", ("a.png", png(5)))], data={"label": label})
    assert answer.status_code == 400 and answer.json()["error"]


def test_weights_and_settings_cannot_come_from_a_request(client):
    files = [("files", ("a.png", png(6)))]
    for field in ("backbone", "size", "device", "path"):
        before = client.about()["backbone"]
        client.wait(client.post("/models/m/teach", files=files, data={"label": "x", field: "/etc/passwd"}))
        assert client.about()["backbone"] == before
    client.change("undo", steps=1)
    answer = client.post("/models/m/teach", json={"upload": "x", "backbone": "/tmp/evil.safetensors"})
    assert answer.status_code == 400 and "backbone" in answer.json()["error"]
    answer = client.post("/models/m/teach", files=files, data={"label": "x", "effort": "../evil"})
    assert answer.status_code == 400 and "effort" in answer.json()["error"]


def test_names_of_files_are_fit_to_be_shown():
    assert shown_name("a/b\\c\x1b[2J.png") == "c�[2J.png" and shown_name(None) == "image"
    assert len(shown_name("x" * 1000)) <= 120


def test_the_folder_of_uploads_is_private_and_what_a_kill_left_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    left = folder.with_name(folder.name.replace(f".{os.getpid()}.", ".999999999."))
    left.mkdir()
    (left / "000000").write_bytes(b"a photograph")
    second = private_folder()
    assert not left.exists() and folder.exists() and second.exists()


def test_uploads_are_gone_when_the_server_ends(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    path = tmp_path / "m.vqp"
    shutil.copy(model, path)
    with serving(path) as client:
        client.wait(client.post("/models/m/uploads", files=[("files", ("a.png", png(3)))], data={"label": "x"}))
        assert [p for p in tmp_path.rglob("*") if p.name == "000000"]
    left = {p.name for p in tmp_path.iterdir() if not p.name.startswith("pymp-")}  # multiprocessing's own
    assert left == {"m.vqp"}


# ---------------------------------------------------------------------------------------------- too much, too slow


def closed(connection: socket.socket) -> bool:
    """Whether the server hangs up."""
    try:
        with connection:
            while connection.recv(65536):
                pass
    except ConnectionResetError:
        pass
    return True


def test_slow_clients_are_given_up_in_every_phase(impatient):
    head, upload = impatient.head, "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n"
    assert closed(impatient.connect()), "silent"
    assert closed(impatient.connect(b"GET / HTTP/1.1\r\nHost: ")), "half a header"
    later = impatient.connect(f"GET /v2/health/live {head}\r\n".encode())
    assert later.recv(65536).startswith(b"HTTP/1.1 200")
    later.sendall(b"GET / HTTP/1.1\r\nHost: ")
    assert closed(later), "half a header after a good request"
    for path, rest in (("predict", "Content-Length: 1000\r\n\r\nabc"), ("uploads", upload), ("teach", f"{upload}--x")):
        with impatient.connect(f"POST /models/m/{path} {head}{rest}".encode()) as slow:
            assert b"408" in slow.recv(65536).split(b"\r\n")[0]
    unread = impatient.connect(f"GET /models/m/file {head}\r\n".encode() * 200, receive_buffer=4096)
    until(lambda: not impatient.server.server_state.connections)
    unread.close()
    assert impatient.get("/v2/health/live").status_code == 200


def test_no_part_of_an_answer_waits_until_the_part_before_is_acknowledged(client):
    client.get("/v2/health/live")  # over a connection that stays open
    sockets = [c.transport.get_extra_info("socket") for c in client.server.server_state.connections]
    assert sockets and all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


def test_half_requests_do_not_take_the_place_of_whole_ones(model):
    with serving(model, connections=20) as client:
        half = []
        for _ in range(60):
            half.append(client.connect(f"GET /v2/health/live {client.head}\r\nGET / HT".encode()))
            assert half[-1].recv(65536).startswith(b"HTTP/1.1 200")
            half.append(client.connect(f"POST /models/m/predict {client.head}Content-Length: 9\r\n\r\nab".encode()))
        for _ in range(20):
            assert Client(client.url).get("/models/m").status_code == 200
        for connection in half:
            connection.close()


def test_clients_that_have_left_take_no_place(model, tmp_path, monkeypatch):
    path = tmp_path / "m.vqp"
    shutil.copy(model, path)
    with serving(path, connections=10) as client:
        with held(monkeypatch, Jobs, "_hand_over"):
            job = client.post("/models/m/undo", json={"steps": 1}).json()["id"]
            waiting = [client.connect(f"GET /jobs/{job}?wait=60 {client.head}\r\n".encode()) for _ in range(7)]
            until(lambda: len(client.server.server_state.tasks) == 7)
            for connection in waiting:
                connection.close()
            until(lambda: not client.server.server_state.tasks)
        client.get(f"/jobs/{job}?wait=60")


def test_uploads_that_only_announce_their_size_take_no_place(client):
    start = "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000000\r\n\r\n--x"
    idle = [client.connect(f"POST /models/m/{path} {client.head}{start}".encode()) for path in ["uploads", "teach"] * 8]
    answer = client.post("/models/m/uploads", files=[("files", ("a.png", png(3)))], data={"label": "x"})
    assert answer.status_code == 202
    client.wait(answer)
    assert client.session.delete(f"{client.url}/models/m/uploads/{answer.json()['upload']}").status_code == 204
    for connection in idle:
        connection.close()


def test_more_than_may_be_on_its_way_is_refused(model):
    with serving(model, receiving_mb=1) as client:
        body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"x" * 900_000
        start = f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body) + 1}\r\n\r\n"
        first = client.connect(f"POST /models/m/uploads {client.head}{start}".encode() + body)
        until(lambda: client.server.config.app.arriving >= len(body))  # else the first one may be refused
        assert client.post("/models/m/predict", data=b"x" * 800_000).status_code == 429
        first.close()
        until(lambda: client.post("/models/m/predict", data=b"x" * 800_000).status_code == 415)


def test_uploads_that_nobody_teaches_are_deleted_in_time(impatient):
    upload = impatient.post("/models/m/uploads", files=[("files", ("a.png", png(3)))], data={"label": "x"}).json()
    folder = impatient.server.state.folder
    until(lambda: not list(folder.iterdir()))
    assert impatient.post("/models/m/teach", json={"upload": upload["upload"]}).status_code == 404


def test_an_upload_whose_check_fails_at_once_is_not_kept(client, monkeypatch):
    add = Jobs.add

    def add_and_wait(jobs, job, *given):
        add(jobs, job, *given)._future.result()
        return job

    monkeypatch.setattr(Jobs, "add", add_and_wait)
    monkeypatch.setattr(Jobs, "_hand_over", lambda jobs, job: Outcome("failed", error="for a test"))
    answer = client.post("/models/m/uploads", files=[("files", ("a.png", png(3)))], data={"label": "x"})
    assert answer.status_code == 202 and answer.json()["job"]["state"] == "failed"
    assert client.get("/models/m/state").json()["uploads"] == [] and list(client.server.state.folder.iterdir()) == []


def test_a_full_disk_is_told(client, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Upload, "add", full)
    for path in ("teach", "uploads"):
        answer = client.post(f"/models/m/{path}", files=[("files", ("a.png", png(3)))], data={"label": "x"})
        assert answer.status_code == 507 and "disk of the server is full" in answer.json()["error"]
    assert list(client.server.state.folder.iterdir()) == []


def test_an_image_that_needs_too_much_memory_is_refused(client, monkeypatch):
    monkeypatch.setattr(Model, "try_answers", lambda model, images, top: [MemoryError()])
    answer = client.post("/models/m/predict", data=png())
    assert answer.status_code == 413 and "smaller" in answer.json()["error"]


def test_a_server_that_is_closing_is_not_ready(model):
    with serving(model) as client:
        assert client.get("/v2/health/ready").status_code == 200
        client.server.state.closing = True
        assert client.get("/v2/health/ready").status_code == 503 and client.get("/v2/health/live").status_code == 200


@contextmanager
def held(monkeypatch, owner: type, name: str) -> Iterator[None]:
    """Whoever calls this method waits until the end of the block."""
    plain, over = getattr(owner, name), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *given: (over.wait(300), plain(*given))[1])
        try:
            yield
        finally:
            over.set()


@pytest.mark.slow
def test_a_hundred_teachings_at_once_are_not_queued(client, monkeypatch):
    before = len(client.about()["history"])
    with held(monkeypatch, Jobs, "_hand_over"):
        body = {"old": "apple", "new": "pear"}
        answers = [client.post("/models/m/rename", json=body) for _ in range(100)]
    refused = [a for a in answers if a.status_code == 429]
    assert all(int(a.headers["Retry-After"]) > 0 for a in refused)
    accepted = [a for a in answers if a.status_code == 202]
    assert 3 <= len(accepted) <= 4, "three wait, and one may be under way"
    assert len(accepted) + len(refused) == 100
    until(lambda: all(j["state"] in ("done", "failed") for j in client.get("/jobs").json()))
    assert client.get("/v2/health/ready").status_code == 200
    assert len(client.about()["history"]) == before + 1, "the others found no apple any more"
    client.change("undo", steps=1)


def test_uploads_that_nobody_teaches_are_limited(client):
    ids = []
    for _ in range(6):
        answer = client.post("/models/m/uploads", files=[("files", ("a.png", png(3)))], data={"label": "x"})
        if answer.status_code == 202:
            ids.append(answer.json()["upload"])
            client.wait(answer)
    answer = client.post("/models/m/uploads", files=[("files", ("a.png", png(3)))], data={"label": "x"})
    assert answer.status_code == 429 and "Retry-After" in answer.headers
    for upload in ids:
        client.session.delete(f"{client.url}/models/m/uploads/{upload}")


def test_predictions_beyond_the_queue_are_refused(model, tmp_path, monkeypatch):
    path = tmp_path / "m.vqp"
    shutil.copy(model, path)
    with serving(path, waiting=1) as client, ThreadPoolExecutor(24) as pool:
        with held(monkeypatch, Batcher, "_answer"):
            asked = [pool.submit(Client(client.url).post, "/models/m/predict", data=png(n)) for n in range(24)]
            until(lambda: sum(a.done() for a in asked) >= 22)
        answers = [a.result() for a in asked]
    assert {a.status_code for a in answers} == {200, 429}
    assert all(a.headers["Retry-After"] == "1" for a in answers if a.status_code == 429)


# ---------------------------------------------------------------------------------------------- who


def test_without_the_token_nothing_is_told(guarded):
    for path in ("/models", "/models/m", "/metrics", "/jobs", "/openapi.json", "/v2/models/m", "/models/m/file"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Basic x"}):
            answer = guarded.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in answer.text
        assert guarded.get(path, params={"token": TOKEN}).status_code == 401, "never in an address, which is logged"
        assert guarded.get(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert guarded.post("/models/m/predict", data=png()).status_code == 401
    assert guarded.get("/").status_code == 200 and guarded.get("/v2/health/live").status_code == 200


def test_the_token_is_compared_in_constant_time(monkeypatch, guarded):
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((len(a), len(b))), real(a, b))[1])
    for given in ("a", "b" * 1000):
        guarded.get("/models", headers={"Authorization": f"Bearer {given}"})
    assert compared == [(32, 32)] * 2


def test_other_machines_need_a_token():
    assert is_local("127.0.0.1") and is_local("::1") and is_local("localhost")
    assert not is_local("0.0.0.0") and not is_local("192.168.1.2") and not is_local("example.org")
    check_token("127.0.0.1", None)
    for host, token, words in (
        ("0.0.0.0", None, "needs --token"),
        ("127.0.0.1", "short", "at least 12"),
        ("127.0.0.1", "line\nbreak and more", "printable"),
    ):
        with pytest.raises(UserError, match=words):
            check_token(host, token)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
        {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "http://["},
    ],
)  # fmt: skip
def test_pages_of_other_sites_can_neither_change_nor_read(client, headers):
    answer = client.post("/models/m/undo", json={"steps": 1}, headers=headers)
    assert answer.status_code == 403 and "other sites" in answer.json()["error"]
    assert client.get("/models/m", headers=headers).status_code == 403
    assert "access-control-allow-origin" not in client.get("/models").headers


def test_a_foreign_name_for_this_machine_is_refused(client):
    """DNS rebinding: evil.example is made to point here, so that its page has our origin."""
    answer = client.get("/models", headers={"Host": "evil.example"})
    assert answer.status_code == 421
    port = client.url.rpartition(":")[2]
    assert client.get("/models", headers={"Host": f"localhost:{port}"}).status_code == 200
    two = client.connect(f"GET /models HTTP/1.1\r\nHost: evil.example\r\nHost: localhost:{port}\r\n\r\n".encode())
    assert two.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_proxy_may_offer_it_under_other_names(model):
    with serving(model, allow_hosts=("models.example.org",)) as client:
        page = {"Host": "models.example.org", "Origin": "https://models.example.org"}
        for headers in (page, {"Origin": "https://models.example.org"}, {"Host": "models.example.org:8443"}):
            assert client.get("/models", headers=headers).status_code == 200
        assert client.get("/models", headers={**page, "Origin": "https://evil.example"}).status_code == 403
        assert client.get("/models", headers={"Host": "evil.example"}).status_code == 421


def test_every_answer_carries_the_headers(client):
    for path in ("/", "/models", "/nothing", "/static/app.js"):
        headers = client.get(path).headers
        assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in headers["content-security-policy"] and "server" not in headers

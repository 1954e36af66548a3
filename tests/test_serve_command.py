"""`vqprompt serve` as a command, killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import ssl
import time

import pytest
from serving import SIZE, drawn, served_by_command, until

from vqprompt import Model
from vqprompt.product import example


@pytest.mark.slow
def test_killed_at_any_moment_it_starts_again_with_the_last_whole_model(tmp_path, home, monkeypatch):
    """A finished teaching is never lost; a half-finished one is gone cleanly, or was finished in time."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path, finished = tmp_path / "m.vqp", []
    names = ["apple", "bicycle"]
    images = {name: drawn(tmp_path / "drawn", name, range(40)) for name in names}
    chance = random.Random(3)
    for number, name in enumerate(names):
        with served_by_command(path, "--size", SIZE, home=home) as (client, process):
            client.model = "m"
            known = {c["name"] for c in client.about()["classes"]}
            assert set(finished) <= known, "what was told as finished is there"
            if number % 2 == 0:
                assert client.teach(images[name][:6], name)["state"] == "done"
                finished.append(name)
            job = client.send("teach", images[name][6:], f"{name} more").json()
            until(lambda j=job: client.get(f"/jobs/{j['id']}").json()["state"] != "queued")
            time.sleep(chance.uniform(0, 1.5))
            os.kill(process.pid, signal.SIGKILL)  # the server alone: the teacher has to notice
            process.wait()
            group = process.pid
            until(lambda g=group: not _alive(g))
        model = Model.load(path)
        assert set(finished) <= set(model.classes)
        for known_name, count in model.counts.items():
            assert count in (6, 34), (known_name, count)
    with served_by_command(path, home=home) as (client, _):
        client.model = "m"
        assert set(finished) <= {c["name"] for c in client.about()["classes"]}
        left = [p for p in (tmp_path / "temporary").iterdir() if "vqprompt-serve" in p.name]
        assert len(left) == 1, "uploads of servers that were killed are deleted"
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".partial"] == []


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_example_knows_drawings_and_ends_cleanly(tmp_path, home, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "drawings.vqp"
    example.make_example(path, per_class=4)
    with served_by_command(path, "--example", "--token", "a secret of some length", home=home) as (client, process):
        client.session.headers["Authorization"] = "Bearer a secret of some length"
        client.model = "drawings"
        about = client.about()
        assert about["drawings"] and len(about["classes"]) == 20
        process.send_signal(signal.SIGINT)
        assert process.wait(300) in (0, 130)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert "Traceback" not in rest and "a secret" not in rest


def test_lan_prints_an_address_with_a_token_a_code_and_what_it_means(tmp_path, home):
    with served_by_command(tmp_path / "m.vqp", "--lan", "--size", SIZE, home=home) as (client, process):
        address, _, token = client.url.partition("/#token=")
        assert address.startswith("https://") and len(token) >= 12
        assert process.stdout is not None
        said = "".join(iter(process.stdout.readline, "programs: docs at /docs; stop with Ctrl-C\n"))
        assert "▀" in said and "Whoever has this address can teach" in said
        key = next(home.rglob("certificates/*.pem"))
        assert key.stat().st_mode & 0o077 == 0, "only this user may read the key"
        host, port = address.removeprefix("https://").split(":")
        assert ssl.get_server_certificate((host, int(port))) in key.read_text(encoding="ascii")
        with pytest.warns(Warning, match="certificate verification"):
            for known, status in (({}, 401), ({"Authorization": f"Bearer {token}"}, 200)):
                answer = client.session.get(f"{address}/models", headers=known, verify=False, timeout=60)
                assert answer.status_code == status


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "needs --token"),
        (("--token", "short"), "at least 12"),
        (("nothing.txt",), "no such model"),
        (("no/where/m.vqp",), "no such folder"),
        ((".",), "no model in this folder"),
        ((".", "--example"), "give a file"),
        (("--limit", "heron=1"), "heron: no such setting; the limits are"),
        (("--lan", "--host", "0.0.0.0"), "leave out --host"),
        (("--port", "1", "--host", "203.0.113.7", "--token", "a secret of some length"), "cannot be used"),
    ],
)
def test_faults_are_told_in_one_sentence(command, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, _, err = command("serve", *arguments)
    assert status == 2 and words in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_extra_is_named_where_it_is_missing(command, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fastapi", None)
    status, _, err = command("serve")
    assert status == 2 and "vqprompt[serve]" in err

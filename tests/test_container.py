"""The container, as far as it can be run without one: its entry point under its user, on a read-only file system."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
IN_CONTAINER = """
set -eu
mount --make-rprivate / && mount -t tmpfs tmpfs "$MODELS" && chown 10001:10001 "$MODELS"
mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -o remount,ro,bind / && cd "$MODELS"
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


def last(instruction: str) -> str:
    return re.findall(rf"^{instruction} +(.+)$", DOCKERFILE, re.M)[-1]


def may_mount() -> bool:
    """Whether this can be tried here: by root, who may mount, with an interpreter that other users may start."""
    tools = os.name == "posix" and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("setpriv")
    folders = Path(sys.executable).resolve().parents
    open_to_all = all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)
    mounts = ["unshare", "-m", "mount", "--make-rprivate", "/"]
    return bool(tools) and open_to_all and subprocess.run(mounts, capture_output=True).returncode == 0


def test_the_image_runs_as_another_user_than_root_and_keeps_models_in_a_volume():
    assert last("USER") == "10001:10001" and last("VOLUME") == last("WORKDIR") == "/models"
    assert json.loads(last("ENTRYPOINT")) == ["vqprompt"] and last("STOPSIGNAL") == "SIGTERM", "signals reach it"
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M))
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names.split()} == kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.skipif(
    sys.platform != "linux" or not may_mount(),
    reason="needs root, mount namespaces, and a Python that all users may start",
)
@pytest.mark.parametrize("token", ["a-long-secret-token", None])
def test_the_entry_point_works_as_in_the_container(token, tmp_path):
    """The same variables, command, user and health check; only /models and /tmp can be written to."""
    settings = dict(pair.split("=", 1) for pair in shlex.split(last("ENV")) if not pair.startswith("PATH="))
    models = ROOT / "deploy"  # any folder outside /tmp that exists: an empty volume is mounted over it
    words = [word.replace("/models", str(models)) for word in json.loads(last("CMD"))]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**settings, "PATH": os.environ["PATH"], "PYTHONPATH": paths, "MODELS": str(models)}
    if token is not None:
        environment["VQPROMPT_TOKEN"] = token
    command = [sys.executable, "-m", "vqprompt", *words, "--port", "0", "--size", "28"]
    container = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", IN_CONTAINER, "sh"]
    with (
        subprocess.Popen(
            [*container, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running,
        ExitStack() as held,
    ):
        assert running.stdout is not None
        if token is None:
            assert "needs --token (or VQPROMPT_TOKEN)" in running.stdout.read() and running.wait() == 2
            return
        held.callback(running.kill)  # and what runs inside: --kill-child
        lines = []
        while "stop with Ctrl-C" not in (line := running.stdout.readline()):
            assert line, lines
            lines.append(line)
        port = re.findall(r"http://0\.0\.0\.0:(\d+)/", "".join(lines))[0]
        healthy = [word.replace(":8000/", f":{port}/") for word in json.loads(last("HEALTHCHECK").partition("CMD ")[2])]
        assert subprocess.run([sys.executable, *healthy[1:]]).returncode == 0
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}
        assert requests.get(f"{url}/models", timeout=60).status_code == 401
        image = (ROOT / "docs" / "serving" / "ask.png").read_bytes()
        files = [("files", ("a.png", image))]
        job = requests.post(
            f"{url}/models/model/teach", files=files, data={"label": "page"}, headers=headers, timeout=60
        ).json()
        job = requests.get(f"{url}/jobs/{job['id']}?wait=60", headers=headers, timeout=90).json()
        assert job["state"] == "done", job["error"]
        started = time.monotonic()
        child = int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text())
        status = Path(f"/proc/{child}/status").read_text()
        assert re.search(r"^Uid:\s+10001\s+10001", status, re.M) and re.search(r"^CapEff:\s+0+$", status, re.M)
        os.kill(child, signal.SIGTERM)
        running.stdout.read()
        assert running.wait(60) == 0 and time.monotonic() - started < 15, "the time that compose.yaml allows"
    assert not (models / "model.vqp").exists(), "it was in the volume"

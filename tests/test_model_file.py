"""The model's file: whole or not there, one teacher at a time, a clear word for every fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import command_environment
from drawings import write_drawings
from safetensors import safe_open
from safetensors.numpy import save_file

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model import file as files
from vqprompt.product.model.file import checksum

TINY = {"size": 28, "device": "cpu"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("drawn")
    write_drawings(home / "first", ["apple", "bicycle"], range(8))
    write_drawings(home / "second", ["car", "cactus"], range(8))
    return home


@pytest.fixture(scope="module")
def taught(drawn, tmp_path_factory) -> Path:
    model = Model(**TINY)
    model.learn(drawn / "first")
    return model.save(tmp_path_factory.mktemp("taught") / "m.vqp")


@pytest.fixture
def path(taught, tmp_path) -> Path:
    return Path(shutil.copy(taught, tmp_path / "m.vqp"))


def test_a_model_reads_with_safetensors_and_json_alone(path):
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
        described = json.loads(metadata["model"])
        weights = opened.get_tensor("weights")
    assert metadata["format"] == "vqprompt-model" and list(described["versions"][-1]["classes"]) == ["apple", "bicycle"]
    assert weights.shape == (2, described["backbone"]["width"])


def test_a_model_goes_to_another_place_without_its_folder(path, tmp_path):
    moved = tmp_path / "elsewhere" / "renamed.vqp"
    moved.parent.mkdir()
    path.rename(moved)
    assert Model.load(moved).classes == ("apple", "bicycle")
    assert moved.stat().st_size < 6e6


def test_damage_anywhere_is_noticed(path):
    data = path.read_bytes()
    for place in [20, 500, *range(2000, len(data), len(data) // 15)]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(UserError, match=r"m\.vqp"):
            Model.load(path)
    for length in (0, 5, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"m\.vqp"):
            Model.load(path)
    path.write_bytes(data)
    assert Model.load(path).classes


def test_foreign_files_and_versions_get_a_clear_word(path, tmp_path):
    with pytest.raises(UserError, match="no such model; make one with vqprompt learn"):
        Model.load(tmp_path / "none.vqp")
    with pytest.raises(UserError, match="this is a folder; a model is one file"):
        Model.load(tmp_path)
    (tmp_path / "text.vqp").write_text("hello, I am a text")
    with pytest.raises(UserError, match="not a model of vqprompt"):
        Model.load(tmp_path / "text.vqp")
    save_file({"x": np.zeros(3)}, tmp_path / "weights.vqp", metadata={"format": "pt", "version": "1"})
    with pytest.raises(UserError, match="not a model of vqprompt"):
        Model.load(tmp_path / "weights.vqp")
    for version, words in (("99", "install a newer vqprompt"), ("2", "teach it again .* or open and save it with")):
        save_file({"x": np.zeros(3)}, tmp_path / "v.vqp", metadata={"format": "vqprompt-model", "version": version})
        with pytest.raises(UserError, match=words):
            Model.load(tmp_path / "v.vqp")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused_at_once(kind, tmp_path, drawn):
    path = tmp_path / "m.vqp"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"m\.vqp: cannot be read \(it is not a regular file"):
        Model.load(path)


def edited(path: Path, **fields) -> None:
    """Write the file with other fields in its description, and a right checksum."""
    with safe_open(path, "np") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    described = json.loads(metadata["model"])
    for place, value in fields.items():
        part, *keys = place.split("__")
        inner = described[part] if keys else described
        for key in keys[:-1]:
            inner = inner[int(key) if key.isdecimal() else key]
        inner[keys[-1] if keys else part] = value
    metadata["model"] = json.dumps(described)
    save_file(tensors, path, metadata={**metadata, "checksum": checksum(metadata, tensors)})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"records": [{"images": 10**9, "kept": 256}] * 6}, r"ids: it must be uint64 \[6000000000\]"),
        ({"backbone__width": 200_000}, r"totals: it must be int64 \[2, 200000\]"),
        ({"records": []}, "a class has a record that is not there"),
        ({"solution__temperature": float("nan")}, "solution.temperature"),
        ({"solution__background": 1e300}, "solution.background"),
        ({"versions__0__classes": {"\x1b[2Jx": 0}}, "not the name of a class"),
        ({"solution": None}, "a model has a solution if it has a class"),
        ({"surprise": 1}, "surprise"),
        ({"versions__0__against": 9}, "a class has a record that is not there"),
    ],
)
def test_a_file_with_a_right_checksum_and_wrong_content_is_refused_in_one_sentence(path, fields, words):
    edited(path, **fields)
    with pytest.raises(UserError, match=rf"m\.vqp: damaged: .*{words}") as refused:
        Model.load(path)
    assert "\n" not in str(refused.value)


def test_another_backbone_is_refused(path, drawn, tmp_path):
    from conftest import make_vit

    from vqprompt.core.backbones.load import save_backbone

    save_backbone(make_vit(), tmp_path / "other.safetensors")
    before = path.read_bytes()
    model = Model.load(path, backbone=tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="taught with the backbone vit-s14"):
        model.learn(drawn / "second")
    assert path.read_bytes() == before


def test_two_teachers_at_once_are_refused(path):
    with (
        files.locked(path),
        pytest.raises(UserError, match="another process is teaching this model"),
        files.locked(path),
    ):
        pass
    with files.locked(path):
        assert Model.load(path).classes  # reading is always possible
    assert not list(path.parent.glob(".*.lock"))


def test_what_was_taught_meanwhile_is_not_overwritten(path):
    one, other = Model.load(path), Model.load(path)
    one.rename("apple", "pear")
    one.save()
    other.rename("apple", "plum")
    with pytest.raises(UserError, match="another process has taught this model"):
        other.save()
    assert Model.load(path).classes == ("bicycle", "pear")
    one.rename("pear", "peach")
    one.save()  # its own later changes are welcome


def test_a_write_that_fails_leaves_the_old_model(path, monkeypatch):
    before = path.read_bytes()
    model = Model.load(path)
    model.forget("apple")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        model.save()
    assert path.read_bytes() == before and sorted(p.name for p in path.parent.iterdir()) == ["m.vqp"]


KILLED = """
import sys, os, signal
from pathlib import Path
from vqprompt.product.model import file as files
from vqprompt.product.model.file import checksum
moment, path = sys.argv[1], Path(sys.argv[2])
stored, _ = files.read(path)
import dataclasses
from vqprompt.product.model.knowledge import Event
history = (*stored.knowledge.history, Event("2030-01-01", "forgot", name="x" * 100))
new = dataclasses.replace(stored, knowledge=dataclasses.replace(stored.knowledge, history=history))
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "half":
    real = files.pack
    def pack(s):
        data = real(s)
        class Half(bytes): pass
        original = os.fsync
        os.fsync = die
        return data
    files.pack = pack
elif moment == "before":
    os.replace = die
elif moment == "after":
    import vqprompt.core.files
    vqprompt.core.files._sync_folder = die
with files.locked(path):
    files.write(path, new)
"""


@pytest.mark.parametrize(("moment", "events"), [("half", 1), ("before", 1), ("after", 2)])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_model(path, moment, events, home):
    ended = subprocess.run([sys.executable, "-c", KILLED, moment, str(path)], env=command_environment(home))
    assert ended.returncode == -signal.SIGKILL
    model = Model.load(path)
    assert len(model.history) == events
    with files.locked(path):  # the lock of the killed one does not stay
        model.rename("apple", "pear")
        model.save(locked=True)
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.vqp"]


def test_a_kill_in_the_middle_of_teaching_leaves_the_old_model(path, drawn, home):
    before = path.read_bytes()
    slow = (
        "import sys, time; from vqprompt.core.onnx.graph import Session\n"
        "old = Session.run\n"
        "Session.run = lambda self, **a: (old(self, **a), print('at work', flush=True), time.sleep(600))[0]\n"
        "sys.argv = ['vqprompt', 'learn', *sys.argv[1:]]\n"
        "from vqprompt.commands.app import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, str(path), str(drawn / "second")], env=command_environment(home),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None and "at work" in process.stdout.readline()
    with pytest.raises(UserError, match="another process is teaching"), files.locked(path):
        pass
    process.kill()
    process.wait()
    assert path.read_bytes() == before
    model = Model.load(path)
    model.learn(drawn / "second")
    model.save()
    assert len(Model.load(path).classes) == 4

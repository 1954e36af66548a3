"""The commands of the living model, as a person gives them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from drawings import write_drawings
from PIL import Image

from vqprompt import Model


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("drawn")
    write_drawings(home / "first", ["apple", "bicycle"], range(8))
    write_drawings(home / "second", ["car", "apple"], range(8, 16))
    return home


def test_the_story_of_a_model(command, drawn, tmp_path):
    model = tmp_path / "drawings.vqp"
    status, out, err = command("learn", model, drawn / "first", "--size", 28)
    assert status == 0 and "learned 16 images" in out and "2 new classes" in out and "accuracy now" in out
    assert "16 images of 2 classes (2 new): about" in err  # said before it starts

    status, out, _ = command("learn", model, drawn / "second")
    assert status == 0 and "1 new class, more images of 1 known class;" in out and "before:" in out

    status, out, _ = command(
        "predict", model, drawn / "second" / "car" / "8.png", drawn / "first" / "apple", "--top", 2
    )
    assert status == 0 and out.count("\n") == 9
    status, out, _ = command("predict", model, drawn / "second" / "car" / "8.png", "--json", "--no-unknown")
    found = json.loads(out)
    assert found["class"] in found["classes"] and 0 < found["classes"][found["class"]] <= 1

    Image.new("RGB", (60, 40), "white").save(tmp_path / "white.png")
    status, out, _ = command("predict", model, tmp_path / "white.png", "--strictness", 100)
    assert status == 0 and "unknown (most like " in out and "%" not in out.splitlines()[-1]

    status, out, _ = command("rename", model, "apple", "apples")
    assert status == 0 and "apples" in out
    assert "apples has this name already" in command("rename", model, "apples", "apples")[1]
    status, out, _ = command("forget", model, "bicycle")
    assert status == 0 and "2 classes left" in out
    status, out, _ = command("show", model)
    assert status == 0 and "apples" in out and "bicycle" in out  # in the history
    status, out, _ = command("show", model, "--json")
    assert [c["name"] for c in json.loads(out)["classes"]] == ["apples", "car"] and json.loads(out)["can_undo"] == 4
    for wanted in ("forgot bicycle", "renamed", "learned 16 images"):
        status, out, _ = command("undo", model)
        assert status == 0 and wanted in out
    assert Model.load(model).counts == {"apple": 8, "bicycle": 8}
    status, out, _ = command("undo", model)
    assert status == 0 and "0 classes now" in out
    status, _, err = command("undo", model)
    assert status == 2 and "nothing to undo" in err
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_learn_takes_one_class_several_folders_and_a_list_of_exceptions(command, drawn, tmp_path):
    model = tmp_path / "m.vqp"
    status, _, _ = command("learn", model, drawn / "first" / "apple", "--as", "fruit", "--size", 28)
    assert status == 0
    status, out, _ = command("show", model)
    assert status == 0 and "\naccuracy is not measured\nbackbone" in out, "one class: nothing to tell apart"
    bad = tmp_path / "exclude.txt"
    bad.write_text(f"# doubtful\n{drawn}/first/bicycle/0.png\n")
    bike = tmp_path / "more" / "bicycle"
    shutil.copytree(drawn / "first" / "bicycle", bike)
    (bike / "broken.png").write_bytes(b"\x89PNG no")
    status, _, err = command("learn", model, tmp_path / "more")
    assert status == 2 and "broken.png" in err and "--skip-broken" in err
    status, out, _ = command(
        "learn", model, tmp_path / "more", drawn / "second" / "car", "--skip-broken", "--as", "wheels"
    )
    assert status == 0 and "left out: " in out and Model.load(model).counts == {"fruit": 8, "wheels": 16}
    status, out, _ = command("learn", model, drawn / "second", "--as", "wheels", "--json")
    told = json.loads(out)
    assert status == 0 and told["known_images"] == 8 and told["images"] == 8 and told["noticed"] is None
    assert told["classes"] == [{"name": "wheels", "images": 8, "new": False}]
    status, _, err = command("learn", model, drawn / "first", "--exclude", tmp_path / "none.txt")
    assert status == 2 and "none.txt" in err


def test_faults_are_told_in_one_sentence(command, drawn, tmp_path):
    model = tmp_path / "m.vqp"
    command("learn", model, drawn / "first", "--size", 28)
    before = model.read_bytes()
    for arguments, words in (
        (("learn", model, drawn / "first", "--size", 70), "--size 70 is for new models"),
        (("learn", model, drawn / "first", "--effort", "heroic"), "effort 'heroic'"),
        (("learn", model, drawn / "first" / "apple"), "without classes"),
        (("learn", model, drawn / "first" / "apple", "--as", "Bicycle"), "spelled differently"),
        (("forget", model, "heron"), "knows no class 'heron'"),
        (("rename", model, "apple", "bicycle"), "already a class"),
        (("show", tmp_path / "nothing.vqp"), "no such model"),
        (("predict", tmp_path / "nothing.vqp", drawn), "no such model"),
        (("predict", model, tmp_path / "nothing.png"), "nothing.png"),
        (("undo", model, "--steps", 5), "5 steps cannot be undone; give 1 to 1"),
        *(
            ((name, place, *more), "this is a folder")
            for place in (".", "/", "")
            for name, *more in (("learn", drawn / "first"), ("undo",), ("forget", "apple"), ("show",))
        ),
    ):
        status, _, err = command(*arguments)
        assert status == 2 and words in err and "Traceback" not in err, (arguments, err)
    assert model.read_bytes() == before


def test_what_needs_no_network_does_not_wait_for_pytorch(tmp_path):
    sample = Path(__file__).parent / "data" / "older-models" / "instant.vqp"
    code = (
        "import sys; from vqprompt import Model; model = Model.load(sys.argv[1]); model.rename('bed', 'cot')\n"
        "model.forget('banana'); model.undo(); model.save(sys.argv[2]); model.show()\n"
        "assert not any(name in sys.modules for name in ('torch', 'sklearn', 'matplotlib')), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(sample), str(tmp_path / "m.vqp")], check=True)


def test_the_cache_is_shown_and_cleared(command, home):
    (home / "images").mkdir()
    (home / "images" / "a.npy").write_bytes(b"x" * 2_000_000)
    status, out, _ = command("cache")
    assert status == 0 and "2.0 MB" in out
    status, out, _ = command("cache", "--clear")
    assert status == 0 and "deleted 2.0 MB" in out and not (home / "images").exists()

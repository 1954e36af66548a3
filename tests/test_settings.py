"""Habits of the command line: -h, -q and -v everywhere, defaults from the environment, statuses for CI."""

from __future__ import annotations

import json

import pytest
import typer
from drawings import write_drawings

from vqprompt import Model
from vqprompt.commands.app import app


def all_commands(group) -> dict:
    inside = {}
    for name, command in group.commands.items():
        inside |= all_commands(command) if hasattr(command, "commands") else {name: command}
    return inside


def test_every_command_has_help_quiet_and_verbose(command):
    for name, described in all_commands(typer.main.get_command(app)).items():
        options = {option for parameter in described.params for option in parameter.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= options, name
    for words in (["-h"], ["learn", "-h"], ["bench", "run", "-h"]):
        status, out, _ = command(*words)
        assert status == 0 and "Usage" in out


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return write_drawings(tmp_path_factory.mktemp("drawn"), ["apple", "bicycle"], range(6))


def test_quiet_prints_results_alone_and_verbose_where_an_error_comes_from(command, drawn, tmp_path):
    model = tmp_path / "m.vqp"
    status, out, err = command("learn", model, drawn, "--size", 28, "-q")
    assert status == 0 and err == "" and "learned 12 images" in out and "note:" not in out
    status, out, err = command("learn", model, drawn)
    assert status == 0 and "note: left out 12 images" in out
    for option, told in (("-v", True), ("-q", False)):
        status, _, err = command("show", tmp_path / "nothing.vqp", option)
        assert status == 2 and "error:" in err and ("Traceback" in err) is told


def test_defaults_come_from_the_environment_and_the_command_line_wins(command, drawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("SIZE", "42"), ("HOLD_OUT", "0"), ("SKIP_BROKEN", "1"), ("DEVICE", "cpu")):
        monkeypatch.setenv(f"VQPROMPT_LEARN_{name}", value)
    status, out, _ = command("learn", "environment.vqp", drawn)
    assert status == 0 and Model.load("environment.vqp").backbone.size == 42 and "accuracy now" not in out
    command("learn", "given.vqp", drawn, "--size", 14)
    assert Model.load("given.vqp").backbone.size == 14
    monkeypatch.setenv("VQPROMPT_LEARN_EFFORT", "enormous")
    status, _, err = command("learn", "new.vqp", drawn)
    assert status == 2 and "enormous" in err
    monkeypatch.setenv("VQPROMPT_SERVE_LIMIT", "upload_mb=2 no=1")
    status, _, err = command("serve", "new.vqp")
    assert status == 2 and "no: no such setting" in err, "several values"
    monkeypatch.setenv("VQPROMPT_VERSION", "0.2.0")  # somebody's own
    assert command("backbones")[0] == 0
    monkeypatch.setenv("VQPROMPT_SHOW_JSON", "1")  # by the option's name
    assert json.loads(command("show", "given.vqp")[1])
    out = command("serve", "-h")[1]
    assert "VQPROMPT_TOKEN" in out and "VQPROMPT_SERVE_PORT" not in out, "a line for every option would be many"


def test_check_and_test_end_with_a_status_for_ci(command, drawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again = write_drawings(tmp_path / "again", ["apple", "bicycle"], range(6, 12))
    command("learn", "m.vqp", drawn, "--size", 28)
    for share, wanted in ((0.01, 0), (1.0, 1)):
        status, out, err = command("test", "m.vqp", again, "--no-unknown", "--at-least", share)
        assert status == wanted and "right, every class" in out and ("--at-least 100.0%" in err) is bool(wanted)
    (again / "apple" / "copy.png").write_bytes((again / "apple" / "6.png").read_bytes())
    for options, wanted in ((["--strict"], 1), ([], 0), (["--strict", "--json"], 1)):
        status, out, _ = command("check", again, "--size", 28, *options)
        assert status == wanted and "copy.png" in out


def test_the_best_backbone_is_downloaded_or_the_way_out_is_told(command, drawn, tmp_path, monkeypatch):
    def offline(repo: str, file: str) -> str:
        raise OSError(f"no network for {repo}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    for given in (["learn", tmp_path / "m.vqp", drawn], ["serve", tmp_path / "m.vqp", "--port", 0]):
        status, _, err = command(*given, "--backbone", "best")
        assert status == 2 and "dinov2-b14 is not on this machine" in err and "Or take vit-s14" in err
    status, _, err = command("watch", drawn, tmp_path / "m.vqp", "--once", "--every", 0.1, "--backbone", "best")
    assert status == 0 and "dinov2-b14 is not on this machine" in err
    status, out, _ = command("backbones")
    assert status == 0 and "--backbone best takes dinov2-b14 at 224 px" in out

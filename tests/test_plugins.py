"""Methods, data sets and routes of other packages: one file and an entry point are enough."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from conftest import write_entry_points

from vqprompt.core import plugins
from vqprompt.core.errors import UserError
from vqprompt.core.plugins import Registry
from vqprompt.research.paper.grids import find_grid, plan
from vqprompt.research.paper.requirements import Requirements

ROOT = Path(__file__).parents[1]
EXAMPLES = ("vqprompt-example", "vqprompt-label-studio")
BROKEN = {  # an installed package whose only module cannot be imported, and which takes a name of ours
    "METADATA": "Metadata-Version: 2.1\nName: broken\nVersion: 0.3\n",
    "entry_points.txt": "[vqprompt.methods]\ncracked = cracked:Cracked\nvq-prompt = cracked:Cracked\n"
    "[vqprompt.serve]\ncracked = cracked:router\n",
}


@pytest.fixture(scope="module")
def installed(request, tmp_path_factory):
    """The examples beside the broken package, in the environment that finds all. pip installs them where that is slow
    anyway; otherwise only what it would write is written."""
    folder, by_pip = tmp_path_factory.mktemp("installed"), getattr(request, "param", None) == "by pip"
    paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    if by_pip:
        source = tmp_path_factory.mktemp("source")  # pip builds in the source folder
        sources = [shutil.copytree(ROOT / "examples" / name, source / name) for name in EXAMPLES]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", folder, *sources], check=True)
    for example in (ROOT / "examples" / name for name in EXAMPLES if not by_pip):
        write_entry_points(folder, example)
        paths.append(str(example))
    (folder / "cracked.py").write_text("import a_module_that_nobody_has")
    (folder / "broken-0.3.dist-info").mkdir()
    for name, text in BROKEN.items():
        (folder / "broken-0.3.dist-info" / name).write_text(text)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"}


def vqprompt(environment, *arguments, status=0):
    command = [sys.executable, "-m", "vqprompt", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["by pip"], indirect=True)
def test_an_installed_package_brings_a_method_and_a_data_set(installed, tmp_path):
    """Listed, run, in a table of the paper, and loaded in Python; a broken package does not get in the way."""
    listed = vqprompt(installed, "methods")
    assert "first-task-prompt" in listed.stdout and "cracked" not in listed.stdout
    assert listed.stderr.count("'cracked' (vqprompt.methods) of the package broken cannot be loaded") == 1
    assert "No module named 'a_module_that_nobody_has'); repair or uninstall it" in listed.stderr
    assert "'vq-prompt' (vqprompt.methods) of the package broken is not used: vqprompt has that name" in listed.stderr
    given = ["--method", "first-task-prompt", "--data", "stripes", "--out", tmp_path / "run", "--device", "cpu",
             "--epochs", "1", "--batch-size", "16", "--set", "length=2", "--set", "blocks=[0]"]  # fmt: skip
    assert "cracked" not in vqprompt(installed, "run", *given).stderr
    result = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (result["title"], result["done"], len(result["tasks"])) == ("First-task prompt", True, 3)
    assert result["faa"] > 90, "chance: 17"
    assert [epoch["task"] for epoch in result["losses"]] == [0], "later tasks train nothing"
    vqprompt(installed, "bench", "run", "vtab", "--small", "--methods", "first-task-prompt", "--seeds", "1", "--set",
             "blocks=[0]", "--workers", "1", "--out", tmp_path / "bench")  # fmt: skip
    assert "First-task prompt" in (tmp_path / "bench" / "vtab-small.md").read_text()
    load = "import sys, vqprompt; print(vqprompt.Learner.load(sys.argv[1], device='cpu').method.title)"
    loaded = subprocess.run(
        [sys.executable, "-c", load, tmp_path / "run"], env=installed, capture_output=True, text=True
    )
    assert loaded.stdout == "First-task prompt\n", loaded.stderr


def test_what_is_broken_is_named_when_it_is_asked_for(installed, tmp_path):
    done = vqprompt(installed, "run", "--method", "cracked", "--out", tmp_path / "run", status=2)
    assert "error: 'cracked' (vqprompt.methods) of the package broken cannot be loaded" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_server_has_the_routes_of_installed_packages(installed):
    ask = """
from vqprompt.product.serve.settings import Settings
from vqprompt.product.serve.server import make_app
from vqprompt.product.serve.state import State

state = State(Settings())
print(make_app(state, lambda: None).url_path_for("webhook", name="garden"))
state.close()
"""
    done = subprocess.run([sys.executable, "-c", ask], env=installed, capture_output=True, text=True, timeout=600)
    assert done.stdout == "/label-studio/garden/webhook\n", done.stderr
    assert "'cracked' (vqprompt.serve) of the package broken cannot be loaded" in done.stderr


def test_another_machine_must_have_the_package_in_the_same_version():
    here = Requirements.of(plan(find_grid("cub200", small=True), ["vq-prompt"], [1]))
    assert list(here.packages) == ["vqprompt"] and here.missing() is None, "our own methods need no other package"
    needs = replace(here, packages={"pip": "0.0"}).missing()
    assert needs.endswith("and the work needs 0.0; install the same version there")
    assert replace(here, packages={"never-made": "1.0"}).missing().startswith("it has never-made in no version")


@pytest.fixture
def registry(monkeypatch):
    points = [
        EntryPoint("two", "math:pi", "group"),
        EntryPoint("text", "string:digits", "group"),
        EntryPoint("two", "math:tau", "group"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    return Registry("group", float, {"one": 1.0})


def test_a_name_that_two_packages_claim_belongs_to_the_first(registry):
    with pytest.warns(UserWarning, match=r"'two' \(group\) of the package math is not used: math has that name"):
        assert registry["two"] == pytest.approx(3.14159, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*has that name")
def test_what_is_not_of_the_expected_kind_is_refused(registry):
    with pytest.raises(UserError, match=r"'text' .* is '0123456789', where a builtins.float is expected"):
        registry["text"]
    with pytest.warns(UserWarning, match="'text'"):
        assert list(registry) == ["one", "two"]
    assert len(registry) == 2 and "text" not in registry

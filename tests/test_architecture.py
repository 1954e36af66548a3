"""The architecture that docs/architecture.md shows is the one in the code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vqprompt"
MOST_LINES = 400

# From bottom to top. A module imports only from layers below its own, or from its own package. A module of a package is
# named by itself where it belongs to another layer than the rest: settings of runs are below the report, which shows
# them, and the report is below runs, which write one. Imports inside functions count as well.
LAYERS = [
    {"_version", "errors", "metrics", "progress", "words", "assets"},
    {"files"},
    {"lifelines"},
    {"distributed"},
    {"downloads"},
    {"backbones"},
    {"runtime"},
    {"data"},
    {"datasets"},
    {"training"},
    {"statistics"},
    {"prompts"},
    {"recipes"},
    {"methods"},
    {"learner"},
    {"cluster"},
    {"model"},
    {"estimators"},
    {"result"},
    {"runs.config"},
    {"report"},
    {"check", "testing", "export"},
    {"serve"},
    {"runs"},
    {"paper"},
    {"commands"},
    {"vqprompt", "__main__", "vit"},  # names that users import, `python -m vqprompt`, and the old home of the ViT
]
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`learner.predictor`; a package's own file is `learner`, that of the whole package `vqprompt`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".") or "vqprompt"


NAMES = {name_of(path) for path in MODULES}


def unit_of(name: str) -> str:
    """The entry of LAYERS that a module belongs to: its own, or else its package's."""
    named = {unit for layer in LAYERS for unit in layer}
    return name if name in named else name.partition(".")[0]


def layer_of(name: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if unit_of(name) in layer]
    assert found, f"{name} has no place in LAYERS; say where it belongs, and show it in docs/architecture.md"
    return found[0]


def imports(path: Path) -> set[str]:
    """The modules of this package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute here"
            base = str(node.module)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("vqprompt.") for name in found if name.startswith("vqprompt.")}
    # `from vqprompt.learner import Learner` names an attribute of a package, `… import predictor` a module
    return {name if name in NAMES else name.rpartition(".")[0] or "vqprompt" for name in inside}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_import_goes_against_the_arrows(path):
    own = name_of(path)
    for other in imports(path):
        same = unit_of(own) == unit_of(other)
        assert same or layer_of(other) < layer_of(own), f"{own} imports {other}, which is not in a layer below"


def test_the_check_sees_what_it_has_to_see():
    """A check that finds no imports would pass as well."""
    learner = imports(PACKAGE / "learner" / "learner.py")
    assert {"learner.predictor", "training.loop", "methods", "errors"} <= learner
    assert "report.pages" in imports(PACKAGE / "runs" / "runner.py"), "inside a function"
    assert layer_of("report.pages") < layer_of("runs.runner") and layer_of("runs.config") < layer_of("report.pages")


def test_the_page_names_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [f"{path.parent.relative_to(PACKAGE)}/" for path in MODULES if path.name == "__init__.py"]
    names = [package for package in packages if package != "./"]
    names += [path.name for path in MODULES if path.name not in ("__init__.py", "__main__.py", "_version.py")]
    assert [name for name in names if name not in page] == []


def test_no_module_is_long():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}

"""The architecture that docs/architecture.md shows is the one in the code, and the folders are that architecture."""

import ast
import functools
import runpy
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vqprompt"
ROOMS = ["core", "research", "product", "commands"]  # each imports only from itself and from those before it
EVERYBODY = {"_version", "assets"}  # may be imported from anywhere
MOST_LINES = 400
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`research.learner.predictor`; a package's own file is named as the package, that of the whole one `vqprompt`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".") or "vqprompt"


NAMES = {name_of(path) for path in MODULES}


def room_of(name: str) -> int:
    """Which room a module is in, counted from the ground. The few modules of the root are above all rooms."""
    first = name.partition(".")[0]
    return -1 if first in EVERYBODY else ROOMS.index(first) if first in ROOMS else len(ROOMS)


def part_of(name: str) -> str:
    """The part of its room that a module belongs to: a package (`core.data`) or a single module (`core.errors`)."""
    return ".".join(name.split(".")[:2])


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules of this package that a module imports, anywhere in it, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("vqprompt.") for name in names if name.startswith("vqprompt.")}
    # `from vqprompt.research.learner import Learner` names an attribute of a package, `… import predictor` a module
    return {name if name in NAMES else name.rpartition(".")[0] or "vqprompt" for name in inside}


def test_no_import_goes_up_to_another_room():
    found = [(name_of(path), other) for path in MODULES for other in imports(path)]
    assert [f"{own} imports {other}" for own, other in found if room_of(other) > room_of(own)] == []


def test_the_parts_of_a_room_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        own = part_of(name_of(path))
        graph.setdefault(own, set()).update(part for other in imports(path) if (part := part_of(other)) != own)
    try:
        TopologicalSorter({part: others for part, others in graph.items() if part != "vqprompt"}).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' → '.join(error.args[1])}")


def test_the_check_sees_what_it_has_to_see():
    """A check that finds no imports would pass as well."""
    learner = imports(PACKAGE / "research" / "learner" / "learner.py")
    assert {"research.learner.predictor", "research.training.loop", "research.methods", "core.errors"} <= learner
    assert "research.report.pages" in imports(PACKAGE / "research" / "runs" / "runner.py"), "inside a function"
    assert room_of("core.errors") < room_of("research.methods") < room_of("product.model.model") < room_of("vqprompt")


def test_the_root_holds_next_to_nothing():
    inside = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert inside == {*ROOMS, "assets", "__init__.py", "__main__.py", "_version.py", "py.typed"}


def test_the_page_lists_every_module():
    tool = runpy.run_path(str(ROOT / "tools" / "architecture_table.py"))
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert tool["fill"](page) == page, "run tools/architecture_table.py"
    assert all(f"- `{path.relative_to(PACKAGE).as_posix()}`: " in page for path in MODULES if path.name == "vit.py")


def test_no_module_is_long():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}

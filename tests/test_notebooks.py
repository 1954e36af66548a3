"""The notebooks run from the first cell to the last."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def test_there_are_notebooks_and_they_are_stored_without_output():
    import json

    assert NOTEBOOKS == ["compare_methods", "own_method", "teach_and_ask"]
    for name in NOTEBOOKS:
        cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    root = str(FOLDER.parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    started = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    print(f"{name} took {time.monotonic() - started:.0f} s")

"""docs/teaching.md: its example is run."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "teaching.md").read_text(encoding="utf-8")


def test_the_example_on_real_drawings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    found: dict = {}
    exec(compile(code.replace("size=70", "size=42"), "docs/teaching.md", "exec"), found)  # smaller, to be quick
    things, model = found["things"], found["model"]
    assert set(model.classes) == {things[0], "both", things[3], things[4], "my favourite"}
    assert model.counts["both"] == 39 and model.counterexamples == 9, "one image of two times twenty was unlearned"
    wanted = [things[i] for i in range(6) for _ in range(4)]
    assert sum(a == b for a, b in zip(found["answers"], wanted, strict=True)) >= 15
    assert found["strange"] == "unknown"
    assert 0.6 < found["first"] <= 1
    assert (tmp_path / "drawings.vqp").is_file()

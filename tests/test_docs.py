"""What the documentation says is so: its tables are measured, its code is run."""

import json
import re
import runpy
import shutil
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, pstdev

import pytest
import torch
import typer
from drawings import drawings
from PIL import Image

from vqprompt import Learner, Stream
from vqprompt.commands.app import app
from vqprompt.commands.bench import read_settings
from vqprompt.research.methods import METHODS
from vqprompt.research.paper.grids import find_grid
from vqprompt.research.paper.table_rows import find_rows, read_runs, setting_of

ROOT = Path(__file__).parents[1]
METHODS_PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def table_rows(page: str, columns: int) -> dict[str, list[str]]:
    """Rows of the tables that have so many columns, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {row[0]: row for row in rows if len(row) == columns}


class TestMethodsTable:
    rows = table_rows(METHODS_PAGE, 8)

    def test_has_every_method(self):
        assert list(self.rows)[2:] == list(METHODS)

    @pytest.mark.parametrize("name", METHODS)
    def test_is_as_measured(self, name):
        """Widths of 768 are left to the tool, to be quick."""
        tool = runpy.run_path(str(ROOT / "tools" / "methods_table.py"))
        _, _, _, _, parameters, kept, _, passes = self.rows[name]
        assert tool["parameters"](name) == int(parameters.replace(",", ""))
        learner, measured = tool["learn"](name, 384)
        assert passes == measured
        assert kept == tool["kept"](learner)


class TestResults:
    tool = runpy.run_path(str(ROOT / "tools" / "result_tables.py"))
    page = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")

    def test_tables_are_as_the_results_have_them(self):
        assert len(self.tool["BLOCK"].findall(self.page)) == 11
        assert self.tool["fill"](self.page) == self.page, "run tools/result_tables.py"

    def test_figures_are_there(self):
        shown = set(re.findall(r"figures/(\S+\.svg)", self.page))
        assert shown == self.tool["draw"](self.page).keys()
        for name in shown:
            assert "<svg" in (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8")


def mean_and_deviation(row, name: str) -> str:
    mean, deviation = row.ours(name)
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def test_the_results_of_moving_memories_are_as_measured():
    page = (ROOT / "docs" / "beyond.md").read_text(encoding="utf-8")
    section = page.partition("## Results with ten tasks")[2].partition("\n### ")[0]
    shown = [tuple(cells[1:]) for cells in list(table_rows(section, 5).values())[2:]]
    measured = set()
    for row in find_rows(find_grid("cub200"), ROOT / "results" / "cub200-beyond.json", from_bench=False):
        cells = [mean_and_deviation(row, name) for name in ("faa", "caa", "forgetting")]
        measured.add((*cells, ", ".join(map(str, row.seeds))))
    assert len(shown) == 10
    assert set(shown) == measured
    section = page.partition("### The same memory for other methods")[2].partition("\n## ")[0]
    shown = {cell for cells in list(table_rows(section, 4).values())[2:] for cell in cells[1:]}
    rows = find_rows(find_grid("cub200"), ROOT / "results" / "cub200-moved.json", from_bench=False)
    assert shown == {mean_and_deviation(row, "faa") for row in rows}


def test_the_table_at_one_budget_is_as_measured():
    """What was chosen is what was run, and is inside the range that is shown."""
    page = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    shown = table_rows(page.partition("### One budget for every method")[2].partition("<details>")[0], 5)
    titles = {re.sub(", rank 16", "", title): row for title, row in list(shown.items())[2:]}
    assert titles.keys() == {method.title for method in METHODS.values()}
    rows = find_rows(find_grid("cub200"), ROOT / "results" / "cub200-budget.json", from_bench=False)
    measured = {row.title.partition(",")[0]: mean_and_deviation(row, "faa") for row in rows}
    assert {title: row[3] for title, row in titles.items()} == measured
    chosen = read_settings(ROOT / "results" / "cub200-budget-settings.toml")
    for config in (run.config for row in rows for run in row.runs.values() if row.method in chosen):
        for key, value in chosen[config["method"]].items():
            assert setting_of(config, key) == value, (config["method"], key)
    for _, searched, *_ in titles.values():
        for low, high, value in re.findall(r"([\d.]+) … ([\d.]+): ([\d.]+)", searched):
            assert float(low) <= float(value) <= float(high)


def test_the_results_of_streams_are_as_measured():
    page = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    section = page.partition("## Other kinds of streams")[2].partition("\n## ")[0]
    blurry, online = "blurry:50,10", "blurry:50,10+online:200"
    columns = [("domains", "faa"), (blurry, "faa"), (online, "faa"), (online, "area_under_curve")]
    columns.append(("few-shot:30,5,5", "faa"))
    measured = defaultdict(list)
    for run in read_runs(ROOT / "results" / "streams.json"):
        for stream, measure in columns:
            if run.config["stream"] == stream:
                measured[METHODS[run.config["method"]].title, stream, measure].append(run.result.number(measure))
    shown = {}
    for title, *cells in list(table_rows(section, 6).values())[2:]:
        shown |= {(title, *column): cell for column, cell in zip(columns, cells, strict=True)}
    assert {len(seeds) for seeds in measured.values()} == {3}
    assert shown == {key: f"{mean(seeds):.2f} ± {pstdev(seeds):.2f}" for key, seeds in measured.items()}


def test_the_results_of_many_tasks_are_as_measured():
    tool = runpy.run_path(str(ROOT / "tools" / "tasks_figure.py"))
    page = (ROOT / "docs" / "beyond.md").read_text(encoding="utf-8")
    assert tool["BLOCK"].findall(page) and tool["fill"](page) == page, "run tools/tasks_figure.py"
    for data in tool["TASKS"]:
        assert f"figures/tasks-{data}.svg" in page
        assert (ROOT / "docs" / "figures" / f"tasks-{data}.svg").read_text(encoding="utf-8") == tool["draw"](data)
    section = page.partition("### What was tried")[2].partition("\n## ")[0]
    shown = set(map(float, re.findall(r"(?<=\| )\d\d\.\d\d(?= \|)", section)))
    runs = json.loads((ROOT / "results" / "tasks-held-out.json").read_text(encoding="utf-8"))
    assert len(shown) > 20 and shown <= {value for run in runs for value in run["readouts"].values()}


def shown_commands() -> list[tuple[str, str]]:
    """Every `vqprompt …` in the documents, in code blocks and in the text: (document, words after the name)."""
    found = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
        lines += re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).replace("\n", " "))
        for line in lines:
            command = re.search(r"(?:^|&& |-m |^\w+=\S+ )vqprompt ([a-z].*)", line.partition(" # ")[0])
            if command:
                found.append((page.name, command[1]))
    return found


def test_every_command_shown_exists_with_its_options():
    commands: dict = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = shown_commands()
    assert len(shown) > 80, "a search that finds nothing would pass as well"
    for page, text in shown:
        name, *words = text.split()
        assert name in commands, f"{page}: vqprompt {text}"
        command = commands[name]
        if hasattr(command, "commands") and words:
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.strip("[]").partition("=")[0] for word in words if word.lstrip("[").startswith("--")}
        assert given <= options | {"--help"}, f"{page}: vqprompt {text}"


@pytest.fixture(scope="module")
def example():
    """What the page's code defines: the class of the example package, and how it is used."""
    shown, use = re.findall(r"^```python\n(.*?)^```", METHODS_PAGE, re.MULTILINE | re.DOTALL)
    package = (ROOT / "examples" / "vqprompt-example" / "vqprompt_example.py").read_text(encoding="utf-8")
    assert shown in package
    names: dict = {}
    exec(compile(package, "vqprompt_example.py", "exec"), names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "first-task-prompt", names["FirstTaskPrompt"])
        exec(compile(use, "docs/methods.md", "exec"), names)
        yield names


class TestWorkedExample:
    name = "first-task-prompt"

    def test_learns_far_beyond_chance(self, example):
        chance = 100 / len(example["learner"].classes)
        assert min(example["accuracies"]) > 6 * chance
        assert sum(example["accuracies"]) / 3 > 70

    def test_learns_its_prompt_in_the_first_task_alone(self, example):
        method = example["learner"].method
        assert method.parameter_counts()["prompting"] == method.prompt.numel()
        learner = Learner("vit-s14", self.name, size=28, tasks=3, training=example["settings"])
        prompts = [learner.method.prompt.detach().clone()]
        for task in Stream(example["stream"].dataset, tasks=[2, 2], train_per_class=4):
            learner.learn(task)
            prompts.append(learner.method.prompt.detach().clone())
        assert not torch.equal(prompts[0], prompts[1])
        assert torch.equal(prompts[1], prompts[2])


NOT_HERE = ("demo", "run", "serve", "bench", "search")  # they take long or do not end; other tests run them
EXECUTED = ("README.md", "docs/teaching.md", "docs/trust.md", "docs/watch.md", "docs/commands.md", "docs/research.md",
            "docs/methods.md")  # fmt: skip


def printed_lines(page: str) -> list[str]:
    """The lines of the code blocks of a page, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    return [line.partition(" #")[0] for block in blocks for line in block.splitlines()]


@pytest.fixture
def garden(tmp_path, monkeypatch):
    """What the pages speak of: birds/, autumn/, new-photos/, photo.jpg, dir/ … as drawings, and small for speed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VQPROMPT_LEARN_SIZE", "28")
    monkeypatch.setenv("VQPROMPT_CHECK_SIZE", "28")
    images, names = drawings()
    kinds = {"kestrel": "bird", "heron": "flamingo", "kingfisher": "duck", "owl": "house"}
    kinds = {bird: name if name in names else names[place] for place, (bird, name) in enumerate(kinds.items())}
    for folder, birds, rows in (
        ("birds", ["kestrel", "heron", "kingfisher"], range(8)),
        ("autumn", ["kestrel", "owl"], range(8, 16)),
        ("new-photos", ["kestrel", "heron", "kingfisher"], range(20, 26)),
    ):
        for bird in birds:
            (tmp_path / folder / bird).mkdir(parents=True)
            for row in rows:
                drawing = Image.fromarray(images[names.index(kinds[bird]), row]).resize((140, 140))
                drawing.save(tmp_path / folder / bird / f"{row}.jpg")
    shutil.copytree(tmp_path / "new-photos" / "heron", tmp_path / "dir")
    shutil.copy(tmp_path / "dir" / "20.jpg", tmp_path / "photo.jpg")
    shutil.copy(tmp_path / "birds" / "kestrel" / "3.jpg", tmp_path / "17.jpg")  # taught as a kestrel
    return tmp_path


@pytest.mark.parametrize("page", EXECUTED)
def test_the_commands_of_a_page_work_one_after_the_other(page, garden, command):
    if page in ("docs/watch.md", "docs/commands.md"):
        assert command("learn", "garden.vqp", "birds")[0] == 0  # these pages are about a model that there is
    lines, ran = printed_lines(page), 0
    if page == "README.md":  # its first commands are run, at full size, by the next test
        lines = lines[1 + max(number for number, line in enumerate(lines) if "drawings/" in line) :]
    for line in lines:
        words = line.split()
        if words[:1] == ["mkdir"]:
            (garden / words[-1]).mkdir(exist_ok=True)
        if words[:1] != ["vqprompt"] or words[1] in NOT_HERE or "FOLDER" in words or "runs/birds" in words:
            continue
        status, _, err = command(*words[1:])
        fails_for_ci = status == 1 and {"--strict", "--at-least"} & {*words}
        assert status == 0 or fails_for_ci, f"{line}\n{err}"
        ran += 1
    assert ran >= 1


@pytest.mark.slow
def test_the_readme_teaches_a_model_without_images_of_ones_own(tmp_path, monkeypatch, command):
    """The first commands that a newcomer types, as they are printed."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"^```\n(.*?)^```", page, re.M | re.S) if "vqprompt example" in b)
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    for line in block.splitlines():
        status, out, err = command(*line.partition("#")[0].split()[1:])
        assert status == 0, err
    assert re.search(r"house\.png: house", out) and re.search(r"umbrella\.png: umbrella", out), out
    print(f"the README's first commands took {time.monotonic() - started:.0f} s")
    (python,) = [b for b in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "Model" in b]
    exec(compile(python, "README.md", "exec"), {})

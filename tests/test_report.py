"""Pages are read back with a parser, as a browser would, and checked against the numbers they were made from."""

import json
import math
import random
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import matplotlib
import pytest

from vqprompt.core import metrics as measure
from vqprompt.core.errors import UserError
from vqprompt.research.report.figures import cell_colors, loss_chart
from vqprompt.research.report.pages import write_comparison, write_report

VOID = {"meta", "br", "link", "img", "input", "hr"}
NASTY = ["<script>alert(1)</script>", "a&b \"c\" 'd'", "日本語 ☃", "long" * 80, "{{ 7 * 7 }}", "$x_1$"]


class Page(HTMLParser):
    """A page's elements, its text, and what is wrong with its nesting."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []  # (the innermost element, text)
        self.feed(self.source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.append((self.open[-1], " ".join(data.split())))

    def of(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def text(self, *tags):
        return [text for tag, text in self.texts if not tags or tag in tags]


def body_rows(page):
    """The first heat map's cells: for each row, (style, text) of each cell."""
    body = re.search(r'<table class="heat.*?<tbody>(.*?)</tbody>', page.source, re.DOTALL)[1]
    return [
        [(style or "", text.strip()) for style, text in re.findall(r'<td(?: style="([^"]*)")?>([^<]*)</td>', row)]
        for row in re.findall(r"<tr>.*?</tr>", body, re.DOTALL)
    ]


def fake_metrics(tasks=4, per_task=3, learned=None, prompts=6, uses_prompts=True, names=None, **changes):
    draw = random.Random(0)
    learned = tasks if learned is None else learned
    accuracy = [[draw.uniform(0, 100) if i <= j < learned else None for j in range(tasks)] for i in range(tasks)]
    square = [row[:learned] for row in accuracy[:learned]]
    done = learned == tasks
    names = names or [f"class {n}" for n in range(tasks * per_task)]
    return {
        "method": "vq-prompt",
        "title": "VQ-Prompt",
        "data": "quickdraw50",
        "backbone": "vit-s14",
        "seed": 1,
        "tasks": [names[t * per_task : (t + 1) * per_task] for t in range(tasks)],
        "accuracy": accuracy,
        "faa": measure.average_accuracies(square)[-1] if done else None,
        "caa": fmean(measure.average_accuracies(square)) if done else None,
        "forgetting": measure.forgetting(square) if done else None,
        "average_accuracy": measure.average_accuracies(square),
        "forgetting_per_task": measure.forgetting_per_task(square) if learned else [],
        "seconds": 754.3,
        "images_per_second": 1234.56,
        "task_seconds": [61.0] * learned,
        "losses": [
            {"task": t, "epoch": e, "losses": {"task": 2.0 / (e + 1), "vq": 0.5, "commitment": 0.2}}
            for t in range(learned)
            for e in range(2)
        ],
        "prompt_use": {
            "blocks": [0, 3],
            "counts": [[[7] + [0] * (prompts - 1), [t] + [1] * (prompts - 1)] for t in range(learned)],
        }
        if uses_prompts
        else None,
        "parameters": {"prompting": 153600, "classifier": 19250, "backbone": 22056576, "trainable": 172850},
        "hardware": "a machine",
        "done": done,
        **changes,
    }


PLAIN = {"uses_prompts": False, "losses": []}  # fewer figures, where they do not matter
CONFIG = {"data": "quickdraw50", "lr": 0.0025, "train_per_class": None, "options": {"pool": 10, "deep": {"er": [1, 2]}}}


def put(folder, config=CONFIG, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    metrics = fake_metrics(**settings)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "config.json").write_text(json.dumps(config))
    return metrics


def report(folder, **settings):
    metrics = put(folder, **settings)
    target = write_report(folder)
    assert target == folder / "report.html"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "metrics.json", "report.html"]
    return metrics, Page(target)


CASES = {
    "usual": {},
    "one task": {"tasks": 1},
    "twenty tasks, 200 classes": {"tasks": 20, "per_task": 10, "prompts": 100},
    "under way": {"learned": 2},
    "first task just learned": {"learned": 1},
    "nothing learned yet": {"learned": 0},
    "no prompts": PLAIN,
    "nasty names": {"per_task": 6, "names": NASTY * 4, "title": "<b>A & $B$</b>", "data": NASTY[0]},
    "diverged": {"losses": [{"task": 0, "epoch": e, "losses": {"task": v}} for e, v in enumerate((1.0, math.nan))]},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_pages_are_well_formed_and_whole(tmp_path, settings):
    _, page = report(tmp_path / "run", **settings)
    comparison = Page(write_comparison([tmp_path / "run"], tmp_path / "comparison.html"))
    for read in (page, comparison):
        ids = Counter(attrs["id"] for _, attrs in read.elements if "id" in attrs)
        assert [name for name, times in ids.items() if times > 1] == []
        refers = re.findall(r"url\(([^)]*)\)", read.source)
        refers += [attrs[a] for _, attrs in read.elements for a in ("src", "href", "xlink:href") if a in attrs]
        for reference in refers:
            assert not re.match(r"\w+:|//", reference) or reference.startswith("data:image/png;base64,"), reference
            assert not reference.startswith("#") or reference[1:] in ids, f"{reference} leads nowhere"
        assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in read.elements}
        assert "@import" not in read.source
        for svg in read.of("svg"):
            assert svg["role"] == "img" and svg["aria-labelledby"] in ids


def test_headline_numbers(tmp_path):
    metrics, page = report(tmp_path / "run")
    cards = page.text("b")
    assert cards == [
        f"{metrics['faa']:.2f} %",
        f"{metrics['caa']:.2f} %",
        f"{metrics['forgetting']:.2f}",
        "12 min 34 s",
        "1,235",
        f"{(more := measure.transfer(metrics['accuracy']))['backward_transfer']:.2f}",
        f"{more['plasticity']:.2f} %",
        f"{more['new_accuracy']:.1f} / {more['old_accuracy']:.2f} %",
        "153,600",
    ]
    assert "not finished" not in page.source


@pytest.mark.parametrize(("tasks", "learned"), [(1, 1), (5, 5), (10, 4), (20, 20)])
def test_heat_map_has_every_number_and_blanks_for_the_rest(tmp_path, tasks, learned):
    metrics, page = report(tmp_path / "run", tasks=tasks, learned=learned, **PLAIN)
    shown = [[text for _, text in row] for row in body_rows(page)]
    assert shown == [["" if a is None else f"{a:.1f}" for a in row] for row in metrics["accuracy"]]
    assert all(bool(style) == bool(text) for row in body_rows(page) for style, text in row)


def test_text_is_legible_on_every_cell():
    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(color)]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for percent in range(-5, 106):
        low, high = sorted(map(luminance, cell_colors(percent)))
        assert (high + 0.05) / (low + 0.05) > 4.5, percent


def test_names_are_escaped_and_read_back(tmp_path):
    _, page = report(tmp_path / "run", per_task=6, names=NASTY * 4, title="<b>A & $B$</b>")
    assert page.text("li").count(NASTY[0]) == 4
    assert set(NASTY) <= set(page.text("li"))
    assert "<b>A & $B$</b>" in page.text("h1")
    assert "<script" not in page.source


def test_all_200_classes_are_listed_with_their_task(tmp_path):
    metrics, page = report(tmp_path / "run", tasks=20, per_task=10, **PLAIN)
    assert [t for t in page.text("li") if t.startswith("class ")] == [n for names in metrics["tasks"] for n in names]
    cells = page.text("td")
    for row in metrics["accuracy"]:
        assert f"{row[-1]:.2f} %" in cells


def test_unfinished_run_says_so(tmp_path):
    metrics, page = report(tmp_path / "run", learned=2)
    text = " ".join(page.text())
    assert "This run is not finished: 2 of 4 tasks learned so far." in text
    assert page.text("b")[:3] == ["–", "–", "–"]
    assert f"So far: {metrics['average_accuracy'][-1]:.2f} %." in text


def test_classes_are_listed_the_weakest_first_and_names_are_escaped(tmp_path):
    put(tmp_path / "run")
    picture = "data:image/jpeg;base64,AAAA"
    classes = {
        "after": 2,
        "classes": [
            {"name": "cat", "task": 0, "right": 9, "total": 10, "taken_for": "<b>dog</b>", "times": 1},
            {"name": "<b>dog</b>", "task": 1, "right": 3, "total": 12, "taken_for": "cat", "times": 8},
            {"name": "never tested", "task": 1, "right": 0, "total": 0},
        ],
        "worst": [{"label": "<b>dog</b>", "answer": "cat", "probability": 0.987, "picture": picture},
                  {"label": "cat", "answer": "<b>dog</b>", "probability": 0.9}],
    }  # fmt: skip
    (tmp_path / "run" / "classes.json").write_text(json.dumps(classes))
    page = Page(write_report(tmp_path / "run"))
    table = page.source.partition("Class by class")[2].partition("</table>")[0]
    assert table.index("3 of 12") < table.index("9 of 10") and "never tested" not in table
    assert "25.00\N{NO-BREAK SPACE}%" in table and "cat (8)" in table
    assert [attrs["src"] for attrs in page.of("img")] == [picture]
    assert "<b>dog</b>" not in page.source and "98.70\N{NO-BREAK SPACE}%" in page.source


def test_a_damaged_file_of_classes_is_named(tmp_path):
    put(tmp_path / "run")
    (tmp_path / "run" / "classes.json").write_text('{"after": "many"}')
    with pytest.raises(UserError, match=r"classes\.json: not the classes of a run"):
        write_report(tmp_path / "run")


def test_single_task_has_nothing_to_forget(tmp_path):
    _, page = report(tmp_path / "run", tasks=1)
    assert page.text("b")[2] == "–"
    assert "nothing to forget" in page.source
    assert "Forgetting of each task" not in page.source


def test_prompt_use_counts_prompts(tmp_path):
    _, page = report(tmp_path / "run")
    assert [t for t in page.text("span") if "in use" in t] == ["· 1 of 6 prompts in use", "· 6 of 6 prompts in use"]
    # in the second block the first task leaves one prompt alone
    assert any(t.endswith("by task, from the first: 5, 6, 6, 6") for t in page.text("title"))
    _, without = report(tmp_path / "other", uses_prompts=False)
    assert "Prompt use" not in without.source


def test_every_loss_term_has_a_chart(tmp_path):
    terms = [{"task": 1.0}, {"task": 1.0, "x<y": 2}]  # the second begins later
    losses = [{"task": 0, "epoch": epoch, "losses": each} for epoch, each in enumerate(terms)]
    _, page = report(tmp_path / "run", losses=losses)
    assert {"task", "x<y"} <= set(page.text("h3"))
    assert sum("over 2 epochs" in title for title in page.text("title")) == 2


def test_settings_are_flattened(tmp_path):
    _, page = report(tmp_path / "run", config=CONFIG | {"note": "<i>"})
    assert page.text("dt") == ["data", "lr", "train_per_class", "options.pool", "options.deep.er", "note"]
    assert page.text("dd") == ["quickdraw50", "0.0025", "null", "10", "[1, 2]", "<i>"]


def test_same_numbers_give_the_same_page(tmp_path):
    put(tmp_path)
    assert write_report(tmp_path).read_bytes() == write_report(tmp_path).read_bytes()


def test_a_page_is_replaced_whole_or_not_at_all(tmp_path):
    report(tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "metrics.json").write_text('{"method":')
    with pytest.raises(UserError, match=r"metrics\.json: cannot be read"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.json here"):
        write_report(tmp_path)


def test_comparison_has_all_runs_and_links_that_lead_to_their_pages(tmp_path):
    good = put(tmp_path / "runs" / "vq #1: 100%", faa=80.0)
    bad = put(tmp_path / "runs" / "ft", title="FT", uses_prompts=False, faa=1.25, seconds=9.0)
    target = tmp_path / "pages" / "comparison.html"
    for folder in (tmp_path / "runs").iterdir():
        write_report(folder)
    page = Page(write_comparison(sorted((tmp_path / "runs").iterdir(), reverse=True), target))
    links = [attrs["href"] for attrs in page.of("a")]
    assert len(set(links)) == 2
    assert all((target.parent / unquote(link)).is_file() and "#" not in link for link in links)
    cells = page.text("td")
    for metrics in (good, bad):
        assert f"{metrics['faa']:.2f} %" in cells and f"{metrics['seconds']:.1f}" in cells
    assert page.source.count('<table class="heat') == 2
    assert page.text("a") == ["VQ-Prompt", "FT"] * 2
    assert re.search(r'class="n best">80\.00', page.source) and not re.search(r'class="n best">1\.25', page.source)
    # each curve is also there as text, for people who cannot see it
    title = next(t for t in page.text("title") if t.startswith("Average accuracy"))
    assert f"VQ-Prompt: {good['average_accuracy'][0]:.2f} %" in title and "FT: " in title


def test_a_loss_that_falls_far_has_plain_numbers_on_its_axis():
    """The page keeps text as text, so TeX, which matplotlib writes on logarithmic axes, would be shown as it is."""
    chart = loss_chart([0, 0, 1, 1], [1.0, 0.1, 0.01, 0.001], "loss", "a loss")
    assert "mathdefault" not in chart and ">0.01<" in chart

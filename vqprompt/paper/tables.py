"""A table in every format (Markdown, CSV, LaTeX, an HTML page), and its figures."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from vqprompt.files import write_atomically
from vqprompt.paper.grids import Grid, described
from vqprompt.paper.results import NONE, Row
from vqprompt.report import figures
from vqprompt.report.pages import render, told

Cell = Callable[[Row], str]


OTHER_BACKBONE, OTHER_SETTINGS, PAPER_NOTE = "†", "§", "‡"


MORE = ("forgetting", "trainable", "images_per_second")


@dataclass(frozen=True)
class Table:
    """The same cells for every format; notes explain the marks."""

    grid: Grid
    rows: list[Row]

    @property
    def _axes(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row.variant))

    @cached_property
    def columns(self) -> dict[str, list[str]]:
        """Cells by heading, a row each; columns that nothing is in are left out."""

        def method(row: Row) -> str:  # the axes and the backbone have columns of their own
            changed = {key: change for key, change in row.changed.items() if key != "backbone"}
            return _distinct(replace(row, variant={}, changed=changed), self.rows) + (OTHER_SETTINGS if changed else "")

        def ours(key: str) -> Cell:
            return lambda row: _spread(*row.ours(key), _mark(row))

        def paper(key: str) -> Cell:
            return lambda row: _spread(*row.paper(key), PAPER_NOTE if row.quoted and row.quoted.mark else "")

        def difference(key: str) -> Cell:
            return lambda row: _signed(row.difference(key), _mark(row))

        def setting(key: str) -> Cell:
            return lambda row: described({key: row.variant[key]})[0].partition("=")[2] if key in row.variant else ""

        cells: dict[str, Cell] = {
            "method": method,
            **{key: setting(key) for key in self._axes},
            "FAA": ours("faa"),
            "CAA": ours("caa"),
            "forgetting": ours("forgetting"),
            "trainable": lambda row: _count(row.mean("trainable")),
            "images/s": lambda row: _count(row.mean("images_per_second")),
            "paper FAA": paper("faa"),
            "paper CAA": paper("caa"),
            "Δ FAA": difference("faa"),
            "Δ CAA": difference("caa"),
            "seeds": lambda row: ", ".join(map(str, row.seeds)) or NONE,
            "backbone": lambda row: row.backbone + _mark(row) if row.runs else NONE,
        }
        if self.grid.ablation:
            del cells["trainable"], cells["images/s"]
        columns = {heading: [cell(row) for row in self.rows] for heading, cell in cells.items()}
        return {h: column for h, column in columns.items() if h in ("FAA", "seeds") or set(column) != {NONE}}

    @property
    def headings(self) -> list[str]:
        return list(self.columns)

    def cells(self, row: Row) -> list[str]:
        return [column[self.rows.index(row)] for column in self.columns.values()]

    @property
    def notes(self) -> list[str]:
        quoted = f" The paper's numbers: its {self.grid.table}." if any(row.quoted for row in self.rows) else ""
        notes = ["Mean ± standard deviation over the seeds." + quoted]
        ran = [row for row in self.rows if row.runs]

        def whose(rows: list[Row]) -> str:
            return "all" if rows == ran and len(ran) > 1 else ", ".join(dict.fromkeys(row.title for row in rows))

        hardware = dict[str, list[Row]]()
        for row in ran:
            for name in row.hardware:
                hardware.setdefault(name, []).append(row)
        notes += [f"Hardware: {name}: {whose(rows)}" for name, rows in hardware.items()]
        for backbone in dict.fromkeys(row.backbone for row in self.rows if row.other_backbone):
            theirs = ", ".join(self.grid.backbones)
            notes.append(
                f"{OTHER_BACKBONE} NOT the paper's backbone: measured with {backbone}, where the paper has {theirs}. "
                "Compare methods with each other, not these numbers with the paper's."
            )
        changed = dict[str, list[Row]]()
        for row in self.rows:
            for key, (now, then) in row.changed.items():
                if key != "backbone":
                    changed.setdefault(f"{key} is {now}, not {then}".replace("null", "none"), []).append(row)
        notes += [f"{OTHER_SETTINGS} {change}: {whose(rows)}" for change, rows in changed.items()]
        marks = {(row.title, row.quoted.mark): row for row in self.rows if row.quoted and row.quoted.mark}
        return [*notes, *(f"{PAPER_NOTE} {title}: {mark}" for title, mark in marks)]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *map(self.cells, self.rows)]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.grid.title}\n\n{table}\n\n" + "\n".join(f"- {note}" for note in self.notes) + "\n"

    def csv(self) -> str:
        """Numbers unrounded, a column each."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        numbers = [f"{who}{key}{what}" for who in ("", "paper_") for key in ("faa", "caa") for what in ("", "_std")]
        rest = [
            "faa_difference",
            "caa_difference",
            *MORE,
            "forgetting_std",
            "seeds",
            "backbone",
            "paper_backbone",
            "other_backbone",
            "hardware",
        ]
        writer.writerow(["method", "variant", *numbers, *rest, "paper_table", "paper_note", "changed"])
        for row in self.rows:
            values = [*row.ours("faa"), *row.ours("caa"), *row.paper("faa"), *row.paper("caa")]
            values += [row.difference("faa"), row.difference("caa"), *map(row.mean, MORE), row.ours("forgetting")[1]]
            backbones = [row.backbone if row.runs else "", " ".join(self.grid.backbones), int(row.other_backbone)]
            changed = " ".join(f"{key}={now}" for key, (now, _) in row.changed.items())
            writer.writerow([
                row.method, " ".join(described(row.variant)), *("" if v is None else v for v in values),
                " ".join(map(str, row.seeds)), *backbones, "; ".join(row.hardware),
                self.grid.table if row.quoted else "", row.quoted.mark if row.quoted else "", changed,
            ])  # fmt: skip
        return text.getvalue()

    def latex(self) -> str:
        lines = [" & ".join(map(_tex, line)) + r" \\" for line in (self.headings, *map(self.cells, self.rows))]
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        first, seeds = 1 + len(self._axes), self.headings.index("seeds")
        columns = "l" * first + "r" * (seeds - first) + "l" * (len(self.headings) - seeds)
        notes = r" \\ ".join(map(_tex, self.notes))
        return (
            "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
            f"\\caption{{{_tex(self.grid.title)}}}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n"
            f"\\end{{tabular}}\n\n\\footnotesize {notes}\n\\end{{table}}\n"
        )

    def html(self, folder: Path, charts: Sequence[Chart] = ()) -> str:
        """folder: where the page will be, for links to the runs' own pages."""
        first, seeds = 1 + len(self._axes), self.headings.index("seeds")
        rows = [
            {"cells": self.cells(row)[:first], "numbers": self.cells(row)[first:seeds],
             "rest": self.cells(row)[seeds + 1 :],
             "seeds": [(seed, _link(row.runs[seed].folder, folder)) for seed in row.seeds]}
            for row in self.rows
        ]  # fmt: skip
        warned = any(row.other_backbone for row in self.rows)
        headings = [(heading, first <= n < seeds) for n, heading in enumerate(self.headings)]
        drawn = [(replace(chart, svg=Markup(chart.svg))) for chart in charts]
        return render(
            PAGE, title=self.grid.title, table=self.grid.table, headings=headings, rows=rows, notes=self.notes,
            charts=drawn, warned=warned,
        )  # fmt: skip

    def write(self, folder: Path, figure: bool = False) -> list[Path]:
        """NAME.md, .csv, .tex, .html in the folder; figures too, if there are any to draw."""
        charts = make_charts(self.grid, self.rows) if figure else []
        files = {"md": self.markdown(), "csv": self.csv(), "tex": self.latex(), "html": self.html(folder, charts)}
        texts = {folder / f"{self.grid.name}.{kind}": text for kind, text in files.items()}
        texts |= {folder / f"{chart.name}.svg": figures.standalone(chart.svg, chart.lines) for chart in charts}
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in texts.items():
            write_atomically(path, content)
        return list(texts)


def _mark(row: Row) -> str:
    return OTHER_BACKBONE if row.other_backbone else ""


def _spread(value: float | None, std: float | None, mark: str = "") -> str:
    if value is None:
        return NONE
    return (f"{value:.2f}" if std is None else f"{value:.2f} ± {std:.2f}") + mark


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _signed(value: float | None, mark: str) -> str:
    return NONE if value is None else f"{value:+.2f}{mark}"


def _link(run: Path | None, page: Path) -> str | None:
    if run is None or not (run / "report.html").exists():
        return None
    return quote(Path(os.path.relpath(run / "report.html", page)).as_posix())


TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "×": r"$\times$",
    "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"$^\S$", "Δ": r"$\Delta$", "τ": r"$\tau$", "λ": r"$\lambda$",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)


@dataclass(frozen=True)
class Chart:
    name: str
    caption: str
    svg: str
    lines: Sequence[figures.Line]


def make_charts(grid: Grid, rows: Sequence[Row]) -> list[Chart]:
    """Ablations: FAA over a sweep's last axis. Else accuracy after each task, a chart for each value of an axis."""
    ran = [row for row in rows if row.runs]
    if not ran:
        return []
    if grid.ablation:
        axes = dict.fromkeys(list(row.variant)[-1] for row in ran if row.variant)
        return [_ablation(grid, ran, axis, n, len(axes)) for n, axis in enumerate(axes)]
    charts: list[Chart] = []
    for parts in dict.fromkeys(tuple(described(row.variant)) for row in ran):
        here = [row for row in ran if tuple(described(row.variant)) == parts]
        here.sort(key=lambda row: -row.curve()[-1])  # the legend in the order in which the lines end
        longest = max(len(row.curve()) for row in here)
        lines = []
        for n, row in enumerate(here):
            line = figures.distinct_line(n, _distinct(replace(row, variant={}), here), row.curve())
            if len(line.values) == 1:  # joint training: a level to compare with
                line = replace(line, values=[line.values[0]] * longest, style=":")
            lines.append(line)
        name = "-".join([grid.name, *parts])
        caption = ", ".join(["Average accuracy over the tasks seen so far, after each task", *parts])
        svg = figures.accuracy_chart(lines, f"chart{len(charts)}", f"{caption}: " + "; ".join(map(told, lines)))
        charts.append(Chart(name, caption, svg, lines))
    return charts


def _ablation(grid: Grid, rows: Sequence[Row], axis: str, number: int, charts: int) -> Chart:
    """FAA over an axis; a line for each method and value of the other axes. What has no axes is a level."""
    rows = [row for row in rows if not row.variant or list(row.variant)[-1] == axis]
    ticks = sorted({row.variant[axis] for row in rows if row.variant})
    series: dict[tuple[str, str], dict[Any, tuple[float | None, float | None]]] = {}
    for row in rows:
        alike = [r.variant for r in rows if r.method == row.method]
        others = {k: v for k, v in row.variant.items() if k != axis and any(r[k] != v for r in alike)}
        name = _distinct(replace(row, variant=others), rows)
        points = series.setdefault((name, "-" if row.variant else "--"), {})
        points.update({row.variant[axis] if row.variant else tick: row.ours("faa") for tick in ticks})
    lines = []
    for n, ((name, style), points) in enumerate(series.items()):
        values, spread = zip(*(points.get(tick, (None, None)) for tick in ticks), strict=True)
        line = figures.distinct_line(n, name, values)
        lines.append(replace(line, style=style, spread=spread if any(s is not None for s in spread) else ()))
    caption = f"FAA over {axis}" + (", ± standard deviation over the seeds" if any(li.spread for li in lines) else "")
    title = f"{caption} ({', '.join(map(str, ticks))}): " + "; ".join(map(told, lines))
    svg = figures.sweep_chart(lines, list(map(str, ticks)), f"chart{number}", title, axis, "FAA (%)")
    return Chart(grid.name if charts == 1 else f"{grid.name}-{axis}", caption, svg, lines)


def _distinct(row: Row, rows: Sequence[Row]) -> str:
    """The method, its place on the axes, and what is particular to it."""
    return ", ".join([row.label, *(f"{key}={row.changed[key][0]}" for key in _particular(row, rows))])


def _particular(row: Row, rows: Sequence[Row]) -> list[str]:
    """Settings of a row that are not the grid's, and that others of its method do not share."""
    alike = [r.changed for r in rows if r.method == row.method and r.runs]
    return [key for key, change in row.changed.items() if any(other.get(key) != change for other in alike)]


PAGE = """{% extends "base" %}
{% import "heat" as heat %}
{% block title %}{{ title }}{% endblock %}
{% block head %}
<h1>{{ title }}</h1>
<ul class="facts">{% if table %}<li>beside the paper’s {{ table }}</li>{% endif %}<li>{{ rows | length }} rows</li></ul>
{% endblock %}
{% block main %}
{% if warned %}
<div class="banner" role="note"><strong>Not the paper’s backbone:</strong>
numbers marked † were measured with another one and cannot be compared with the paper’s.</div>
{% endif %}
<section>
<h2>Results</h2>
<div class="scroll" role="region" aria-label="Results" tabindex="0">
<table class="list results">
<thead>
<tr>{% for heading, number in headings %}<th{{ ' class="n"' | safe if number }}>{{ heading }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}
{% for cell in row.numbers %}<td class="n">{{ cell }}</td>{% endfor %}
<td>{% for seed, link in row.seeds %}{% if link %}<a href="{{ link }}">{{ seed }}</a>{% else %}{{ seed }}{% endif %}
{%- if not loop.last %}, {% endif %}{% else %}–{% endfor %}</td>
{% for cell in row.rest %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<ul class="notes">{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
</section>
{% for chart in charts %}
<section class="alone"><figure><figcaption><h2>{{ chart.caption }}</h2></figcaption>
{{ heat.legend(chart.lines) }}{{ chart.svg }}</figure></section>
{% endfor %}
{% endblock %}
"""

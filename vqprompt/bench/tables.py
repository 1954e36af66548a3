"""Finished runs beside the paper's numbers: Markdown, CSV, LaTeX, an HTML page, and figures.

What is notable about this implementation:
- a run finds its row by its settings, not by its folder, so files of results kept elsewhere make the same tables
- whatever differs from the declared grid (backbone, data, any setting) is marked, and never averaged with what does not
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from vqprompt import figures
from vqprompt.bench.grids import WHERE, Grid, backbone_name, combine, data_name, described
from vqprompt.bench.paper import NUMBERS, Quoted
from vqprompt.checkpoint import write_atomically
from vqprompt.config import resolve
from vqprompt.errors import UserError
from vqprompt.methods import METHODS
from vqprompt.report import flatten, render, told

OTHER_BACKBONE, OTHER_SETTINGS, PAPER_NOTE, NONE = "†", "§", "‡", "–"


@dataclass(frozen=True)
class Found:
    """A run on disk: its metrics and config, and the folder with its report (None: only a file of results is left)."""

    metrics: dict[str, Any]
    config: dict[str, Any]
    folder: Path | None = None


@dataclass
class Row:
    """A method with one set of settings, and the runs that had them: one a seed. Without any, the paper's row alone."""

    method: str
    variant: dict[str, Any]
    changed: dict[str, tuple[str, str]]  # settings that are not the grid's: what they are, what the grid has
    quoted: Quoted | None
    backbone: str
    paper_backbones: tuple[str, ...]
    runs: dict[int, Found] = field(default_factory=dict)  # by seed

    @property
    def title(self) -> str:
        return METHODS[self.method].title

    @property
    def label(self) -> str:
        return ", ".join([self.title, *described(self.variant)])

    @property
    def seeds(self) -> list[int]:
        return sorted(self.runs)

    @property
    def other_backbone(self) -> bool:
        return bool(self.runs) and self.backbone not in self.paper_backbones

    @property
    def hardware(self) -> str:
        return "; ".join(dict.fromkeys(run.metrics["hardware"] for run in self.runs.values()))

    def values(self, key: str) -> list[float]:
        return [self.runs[seed].metrics[key] for seed in self.seeds]

    def ours(self, key: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation (of a sample, n − 1) over the seeds."""
        values = self.values(key)
        return mean(values) if values else None, stdev(values) if len(values) > 1 else None

    def paper(self, key: str) -> tuple[float | None, float | None]:
        return (getattr(self.quoted, key), getattr(self.quoted, f"{key}_std")) if self.quoted else (None, None)

    def difference(self, key: str) -> float | None:
        """Ours less the paper's; none where the data or the tasks are others, for then it would say nothing."""
        ours, theirs = self.ours(key)[0], self.paper(key)[0]
        return None if ours is None or theirs is None or {"data", "tasks"} & self.changed.keys() else ours - theirs

    def curve(self) -> list[float]:
        """Average accuracy after each task, mean over the seeds."""
        return [mean(values) for values in zip(*self.values("average_accuracy"), strict=True)]  # type: ignore[call-overload]


# ------------------------------------------------------------------------------------------------- collecting


def read_runs(source: Path) -> list[Found]:
    """All runs below a folder; or those that `save_runs` put into a file."""
    if source.is_file():
        content = _read(source)
        if not isinstance(content, list) or not all(
            isinstance(c, dict) and {"config", "faa"} <= c.keys() for c in content
        ):
            raise UserError(
                f"{source}: holds no results; give a file that `vqprompt bench table NAME --save FILE` wrote"
            )
        return [Found(metrics, metrics["config"]) for metrics in content]
    return [
        Found(_read(path), _read(path.parent / "config.json"), path.parent)
        for path in sorted(source.rglob("metrics.json"))
        if (path.parent / "config.json").exists()
        and "mlruns" not in path.relative_to(source).parts  # MLflow's copies of runs that are there already
    ]


KEPT = (
    "done", "faa", "caa", "forgetting", "average_accuracy", "accuracy", "seconds", "images_per_second", "parameters",
    "bytes_per_class", "exemplars", "hardware",
)  # fmt: skip


def save_runs(rows: Iterable[Row], path: Path) -> None:
    """A table's runs as one small file to keep and to make the table of again, a run a line: no losses, no paths."""
    lines = []
    for run in (row.runs[seed] for row in rows for seed in row.seeds):
        kept = {key: run.metrics[key] for key in KEPT if key in run.metrics}
        if "accuracy" in kept:
            kept["accuracy"] = [[None if v is None else round(v, 3) for v in line] for line in kept["accuracy"]]
        lines.append(json.dumps({**kept, "config": _named(run.config)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "[\n" + ",\n".join(lines) + "\n]\n")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it or do the run again") from None


def differences(config: dict[str, Any], other: dict[str, Any], strict: bool = False) -> dict[str, tuple[str, str]]:
    """Settings that two configs do not share, but for seed and machine. Unless strict, an older one may lack some, and
    how to rebalance is nobody's business where nothing is rebalanced."""
    ours, theirs = flatten(_named(config)), flatten(_named(other))
    keys = ours.keys() | theirs.keys() if strict else ours.keys() & theirs.keys()
    idle = (
        ()
        if strict or "true" in {c.get("options.statistics", "true") for c in (ours, theirs)}
        else "options.rebalancing"
    )
    return {
        key.removeprefix("options."): (ours.get(key, NONE), theirs.get(key, NONE))
        for key in sorted(keys)
        if key not in (*WHERE, "seed") and not key.startswith(idle) and ours.get(key) != theirs.get(key)
    }


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """Where somebody keeps the data and the weights makes no difference."""
    return {**config, "data": data_name(config["data"]), "backbone": backbone_name(config["backbone"])}


def _setting(config: dict[str, Any], key: str) -> Any:
    return config[key] if key in config else config["options"].get(key)


def make_rows(grid: Grid, found: Iterable[Found], out: Path | None = None) -> list[Row]:
    """The table: the grid's rows in their order, then what else was run.

    out: the folder of all tables' runs; of other tables' runs, those with exactly this grid's settings count. None: all
    that was found is meant for this table.
    """
    rows: dict[Any, Row] = {}

    def row_of(method: str, variant: dict[str, Any], changed: dict[str, tuple[str, str]], backbone: str) -> Row:
        key = (method, repr(variant), repr(changed))
        place = "/".join([grid.name, *described(variant)])
        new = Row(method, variant, changed, NUMBERS.get((place, method)), backbone, grid.backbones)
        return rows.setdefault(key, new)

    declared = [(m, variant) for sweep in grid.sweeps for m in sweep.methods for variant in combine(grid.axes(sweep))]
    comparison = not any(variant for _, variant in declared)
    for method, variant in declared:
        row_of(method, variant, {}, backbone_name(grid.declared(method, variant)["backbone"]))
    for run in found:
        method = run.config["method"]
        if not run.metrics["done"]:
            continue
        variant = {key: _setting(run.config, key) for key in grid.axes(grid.sweep_of(method))}
        if None in variant.values():
            continue
        data = data_name(run.config["data"])
        expected = resolve({**grid.declared(method, variant), "data": data}).model_dump(
            mode="json"
        )  # as suits the data
        changed = differences(run.config, {**expected, "data": grid.settings["data"]})
        if out is None:
            fits = comparison or any(method in sweep.methods for sweep in grid.sweeps)
        else:
            own = run.folder is not None and run.folder.is_relative_to(out / grid.name)
            fits = own or (not changed and (method, variant) in declared)
        if fits:
            row = row_of(method, variant, changed, backbone_name(run.config["backbone"]))
            row.runs.setdefault(run.config["seed"], run)
    order = {key: n for n, key in enumerate(dict.fromkeys((r.method, repr(r.variant)) for r in rows.values()))}
    kept = [row for row in rows.values() if row.runs or (row.quoted and not _others(row, rows.values()))]
    return sorted(kept, key=lambda row: (order[row.method, repr(row.variant)], len(row.changed)))


def _others(row: Row, rows: Iterable[Row]) -> bool:
    """Whether the paper's numbers stand in another row already, beside runs with other settings."""
    return any(r.runs and (r.method, r.variant) == (row.method, row.variant) for r in rows)


# ------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Table:
    """The same cells for every format; notes explain the marks."""

    grid: Grid
    rows: list[Row]

    @property
    def headings(self) -> list[str]:
        numbers = ["FAA", "CAA", "paper FAA", "paper CAA", "Δ FAA", "Δ CAA"]
        return ["method", *self._axes, *numbers, "seeds", "backbone", "hardware"]

    @property
    def _axes(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row.variant))

    def cells(self, row: Row) -> list[str]:
        mark = OTHER_BACKBONE if row.other_backbone else ""
        differ = OTHER_SETTINGS if row.changed.keys() - {"backbone"} else ""
        printed = PAPER_NOTE if row.quoted and row.quoted.mark else ""
        variant = dict(part.split("=", 1) for part in described(row.variant))
        return [
            row.title + differ,
            *(variant.get(key, "") for key in self._axes),
            *(_spread(*row.ours(key), mark) for key in ("faa", "caa")),
            *(_spread(*row.paper(key), printed) for key in ("faa", "caa")),
            *(_signed(row.difference(key), mark) for key in ("faa", "caa")),
            ", ".join(map(str, row.seeds)) or NONE,
            row.backbone + mark if row.runs else NONE,
            row.hardware or NONE,
        ]

    @property
    def notes(self) -> list[str]:
        quoted = f" The paper's numbers: its {self.grid.table}." if any(row.quoted for row in self.rows) else ""
        notes = ["Mean ± standard deviation over the seeds." + quoted]
        for backbone in dict.fromkeys(row.backbone for row in self.rows if row.other_backbone):
            theirs = ", ".join(self.grid.backbones)
            notes.append(
                f"{OTHER_BACKBONE} NOT the paper's backbone: measured with {backbone}, where the paper has {theirs}. "
                "Compare methods with each other, not these numbers with the paper's."
            )
        for row in self.rows:
            changes = [f"{k} is {now}, not {then}" for k, (now, then) in row.changed.items() if k != "backbone"]
            if changes:
                notes.append(f"{OTHER_SETTINGS} {row.label}: {'; '.join(changes)}")
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
        rest = ["faa_difference", "caa_difference", "seeds", "backbone", "paper_backbone", "other_backbone", "hardware"]
        writer.writerow(["method", "variant", *numbers, *rest, "paper_table", "paper_note", "changed"])
        for row in self.rows:
            values = [*row.ours("faa"), *row.ours("caa"), *row.paper("faa"), *row.paper("caa")]
            values += [row.difference("faa"), row.difference("caa")]
            backbones = [row.backbone if row.runs else "", " ".join(self.grid.backbones), int(row.other_backbone)]
            changed = " ".join(f"{key}={now}" for key, (now, _) in row.changed.items())
            writer.writerow([
                row.method, " ".join(described(row.variant)), *("" if v is None else v for v in values),
                " ".join(map(str, row.seeds)), *backbones, row.hardware,
                self.grid.table if row.quoted else "", row.quoted.mark if row.quoted else "", changed,
            ])  # fmt: skip
        return text.getvalue()

    def latex(self) -> str:
        lines = [" & ".join(map(_tex, line)) + r" \\" for line in (self.headings, *map(self.cells, self.rows))]
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        columns = "l" * (1 + len(self._axes)) + "r" * 6 + "lll"
        notes = r" \\ ".join(map(_tex, self.notes))
        return (
            "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
            f"\\caption{{{_tex(self.grid.title)}}}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n"
            f"\\end{{tabular}}\n\n\\footnotesize {notes}\n\\end{{table}}\n"
        )

    def html(self, folder: Path, charts: Sequence[Chart] = ()) -> str:
        """folder: where the page will be, for links to the runs' own pages."""
        text = 1 + len(self._axes)
        rows = [
            {"cells": self.cells(row)[:text], "numbers": self.cells(row)[text:-3], "rest": self.cells(row)[-2:],
             "seeds": [(seed, _link(row.runs[seed].folder, folder)) for seed in row.seeds]}
            for row in self.rows
        ]  # fmt: skip
        warned = any(row.other_backbone for row in self.rows)
        headings = [(heading, text <= n < text + 6) for n, heading in enumerate(self.headings)]
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


def _spread(value: float | None, std: float | None, mark: str = "") -> str:
    if value is None:
        return NONE
    return (f"{value:.2f}" if std is None else f"{value:.2f} ± {std:.2f}") + mark


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


# ------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Chart:
    name: str
    caption: str
    svg: str
    lines: Sequence[figures.Line]


def make_charts(grid: Grid, rows: Sequence[Row]) -> list[Chart]:
    """Ablations: FAA over the last axis, a line for each value of the other. Else accuracy after each task, a chart for
    each value of the axis, if the grid has one."""
    ran = [row for row in rows if row.runs]
    if not ran:
        return []
    if grid.ablation:
        return [_ablation(grid, ran)]
    charts: list[Chart] = []
    for parts in dict.fromkeys(tuple(described(row.variant)) for row in ran):
        here = [row for row in ran if tuple(described(row.variant)) == parts]
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


def _ablation(grid: Grid, rows: Sequence[Row]) -> Chart:
    swept = [row for row in rows if row.variant]
    axis = next((key for row in swept for key in reversed(row.variant)), "")
    ticks = sorted({row.variant[axis] for row in swept})
    series: dict[tuple[str, str], dict[Any, float | None]] = {}
    for row in rows:
        others = {key: value for key, value in row.variant.items() if key != axis}
        name = _distinct(replace(row, variant=others), rows)
        points = series.setdefault((name, "-" if row.variant else "--"), {})
        points.update({row.variant[axis] if row.variant else tick: row.ours("faa")[0] for tick in ticks})
    lines = [
        replace(figures.distinct_line(n, name, [points.get(tick) for tick in ticks]), style=style)
        for n, ((name, style), points) in enumerate(series.items())
    ]
    caption = f"FAA over {axis}"
    title = f"{caption} ({', '.join(map(str, ticks))}): " + "; ".join(map(told, lines))
    svg = figures.sweep_chart(lines, list(map(str, ticks)), "chart0", title, axis, "FAA (%)")
    return Chart(grid.name, caption, svg, lines)


def _distinct(row: Row, rows: Sequence[Row]) -> str:
    """A line's name: the method, what is particular to it, and the settings that rows of this method do not share."""
    shared = set.intersection(*(set(r.changed.items()) for r in rows if r.method == row.method))
    own = [f"{key}={pair[0]}" for key, pair in row.changed.items() if (key, pair) not in shared]
    return ", ".join([row.label, *own])


PAGE = """{% extends "base" %}
{% import "heat" as heat %}
{% block title %}{{ title }}{% endblock %}
{% block head %}
<h1>{{ title }}</h1>
<ul class="facts"><li>beside the paper’s {{ table }}</li><li>{{ rows | length }} rows</li></ul>
{% endblock %}
{% block main %}
{% if warned %}
<div class="banner" role="note"><strong>Not the paper’s backbone:</strong>
numbers marked † were measured with another one and cannot be compared with the paper’s.</div>
{% endif %}
<section>
<h2>Results</h2>
<div class="scroll" role="region" aria-label="Results" tabindex="0">
<table class="list">
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
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
</section>
{% for chart in charts %}
<section class="alone"><figure><figcaption><h2>{{ chart.caption }}</h2></figcaption>
{{ heat.legend(chart.lines) }}{{ chart.svg }}</figure></section>
{% endfor %}
{% endblock %}
"""

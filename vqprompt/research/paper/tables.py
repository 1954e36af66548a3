"""A table in every format (Markdown, CSV, LaTeX, an HTML page), and its figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.research.paper.grids import Grid, described
from vqprompt.research.paper.table_formats import TextTable
from vqprompt.research.paper.table_rows import NONE, Accuracy, Measure, Row, make_rows, read_runs
from vqprompt.research.report import figures
from vqprompt.research.report.pages import line_in_words
from vqprompt.research.report.render import render

Cell = Callable[[Row], str]
OTHER_BACKBONE, OTHER_SETTINGS, PAPER_NOTE = "†", "§", "‡"
CSV_MEASURES: tuple[Measure, ...] = ("forgetting", "trainable", "images_per_second")


@dataclass(frozen=True)
class Table:
    """The same cells in every format. Notes below the table explain the marks."""

    grid: Grid
    rows: list[Row]

    @property
    def _axes(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row.variant))

    @cached_property
    def columns(self) -> dict[str, list[str]]:
        """The cells of each column, by heading. Empty columns are left out."""

        def method(row: Row) -> str:  # the axes and the backbone have separate columns
            changed = {key: change for key, change in row.changed.items() if key != "backbone"}
            return distinct_name(replace(row, variant={}, changed=changed), self.rows) + (
                OTHER_SETTINGS if changed else ""
            )

        def ours(key: Measure, unit: float = 1) -> Cell:
            return lambda row: _spread(*row.ours(key), _mark(row), unit)

        def paper(key: Accuracy) -> Cell:
            return lambda row: _spread(*row.paper(key), PAPER_NOTE if row.quoted and row.quoted.mark else "")

        def difference(key: Accuracy) -> Cell:
            return lambda row: _signed(row.difference(key), _mark(row))

        def setting(key: str) -> Cell:
            return lambda row: described({key: row.variant[key]})[0].partition("=")[2] if key in row.variant else ""

        cells: dict[str, Cell] = {
            "method": method,
            **{key: setting(key) for key in self._axes},
            "FAA": ours("faa"),
            "CAA": ours("caa"),
            "forgetting": ours("forgetting"),
            **{heading: ours(*measure) for heading, measure in self.grid.measures.items()},
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
        notes = ["Mean ± standard deviation over the seeds (of these n runs, as the paper's code has it)." + quoted]
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

    @cached_property
    def text(self) -> TextTable:
        """The table without a page. Its CSV has one column per number, not rounded."""
        first, seeds = self._text_columns
        alignment = "l" * first + "r" * (seeds - first) + "l" * (len(self.headings) - seeds)
        numbers = [f"{of}{key}{what}" for of in ("", "paper_") for key in ("faa", "caa") for what in ("", "_std")]
        headings = [
            "method", "variant", *numbers, "faa_difference", "caa_difference", *CSV_MEASURES, "forgetting_std", "seeds",
            "backbone", "paper_backbone", "other_backbone", "hardware", "paper_table", "paper_note", "changed",
        ]  # fmt: skip
        rows, csv_rows = list(map(self.cells, self.rows)), list(map(self._csv_row, self.rows))
        title, notes = self.grid.title, self.notes
        return TextTable(self.grid.name, title, self.headings, rows, notes, alignment, [headings, *csv_rows])

    @property
    def _text_columns(self) -> tuple[int, int]:
        """How many columns of text are before the numbers, and the column of the seeds, which is behind them."""
        return 1 + len(self._axes), self.headings.index("seeds")

    def _csv_row(self, row: Row) -> list[Any]:
        values = [*row.ours("faa"), *row.ours("caa"), *row.paper("faa"), *row.paper("caa")]
        values += [row.difference("faa"), row.difference("caa"), *map(row.mean, CSV_MEASURES)]
        values.append(row.ours("forgetting")[1])
        return [
            row.method, " ".join(described(row.variant)), *("" if value is None else value for value in values),
            " ".join(map(str, row.seeds)), row.backbone if row.runs else "", " ".join(self.grid.backbones),
            int(row.other_backbone), "; ".join(row.hardware), self.grid.table if row.quoted else "",
            row.quoted.mark if row.quoted else "", " ".join(f"{key}={now}" for key, (now, _) in row.changed.items()),
        ]  # fmt: skip

    def html(self, folder: Path, charts: Sequence[Chart] = ()) -> str:
        """folder: where the page will be written; links to the runs' own pages are relative to it."""
        first, seeds = self._text_columns
        rows = [
            {"cells": self.cells(row)[:first], "numbers": self.cells(row)[first:seeds],
             "rest": self.cells(row)[seeds + 1 :],
             "seeds": [(seed, _link(row.runs[seed].folder, folder)) for seed in row.seeds]}
            for row in self.rows
        ]  # fmt: skip
        warned = any(row.other_backbone for row in self.rows)
        headings = [(heading, first <= n < seeds) for n, heading in enumerate(self.headings)]
        drawn = [chart._replace(svg=Markup(chart.svg)) for chart in charts]
        return render(
            "table.html", title=self.grid.title, table=self.grid.table, headings=headings, rows=rows, notes=self.notes,
            charts=drawn, warned=warned,
        )  # fmt: skip

    def write(self, folder: Path, figure: bool = False) -> list[Path]:
        """Write NAME.md, .csv, .tex and .html into the folder, and with `figure` also .svg."""
        charts = make_charts(self.grid, self.rows) if figure else []
        written = self.text.write(folder, self.html(folder, charts))
        for chart in charts:
            written.append(folder / f"{chart.name}.svg")
            write_atomically(written[-1], figures.standalone(chart.svg, chart.lines))
        return written


def _mark(row: Row) -> str:
    return OTHER_BACKBONE if row.other_backbone else ""


def _spread(value: float | None, std: float | None, mark: str = "", unit: float = 1) -> str:
    if value is None:
        return NONE
    return (f"{value / unit:.2f}" if std is None else f"{value / unit:.2f} ± {std / unit:.2f}") + mark


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _signed(value: float | None, mark: str) -> str:
    return NONE if value is None else f"{value:+.2f}{mark}"


def _link(run: Path | None, page: Path) -> str | None:
    if run is None or not (run / "report.html").exists():
        return None
    return quote(Path(os.path.relpath(run / "report.html", page)).as_posix())


def make_table(grid: Grid, source: Path, from_bench: bool = True) -> Table:
    """The table from a folder that `bench run` wrote; or, with from_bench=False, from any folder or file of runs."""
    rows = make_rows(grid, read_runs(source), source if from_bench else None)
    if not any(row.runs for row in rows):
        small = "; it holds runs of --small" if (source / f"{grid.name}-small").is_dir() else ""
        raise UserError(f"{source}: holds no finished run of {grid.name}; do some with `vqprompt bench run`{small}")
    return Table(grid, rows if from_bench else [row for row in rows if row.runs])


# ---------------------------------------------------------------------------------------------- figures


class Chart(NamedTuple):
    name: str
    caption: str
    svg: str
    lines: Sequence[figures.Line]


def make_charts(grid: Grid, rows: Sequence[Row]) -> list[Chart]:
    """For an ablation, FAA over the last axis of a sweep. Else accuracy after each task, one chart per variant."""
    ran = [row for row in rows if row.runs]
    if not ran:
        return []
    if grid.ablation:
        axes = dict.fromkeys(list(row.variant)[-1] for row in ran if row.variant)
        return [_ablation(grid, ran, axis, n, len(axes)) for n, axis in enumerate(axes)]
    charts: list[Chart] = []
    for parts in dict.fromkeys(tuple(described(row.variant)) for row in ran):
        here = [row for row in ran if tuple(described(row.variant)) == parts]
        here.sort(key=lambda row: -row.curve()[-1])  # so that the legend has the order in which the lines end
        longest = max(len(row.curve()) for row in here)
        lines = []
        for n, row in enumerate(here):
            line = figures.distinct_line(n, distinct_name(replace(row, variant={}), here), row.curve())
            if len(line.values) == 1:  # joint training: a horizontal line to compare with
                line = replace(line, values=[line.values[0]] * longest, style=":")
            lines.append(line)
        name = "-".join([grid.name, *parts]).replace(":", "_")
        caption = ", ".join(["Average accuracy over the tasks seen so far, after each task", *parts])
        svg = figures.accuracy_chart(
            lines, f"chart{len(charts)}", f"{caption}: " + "; ".join(map(line_in_words, lines))
        )
        charts.append(Chart(name, caption, svg, lines))
    return charts


def _ablation(grid: Grid, rows: Sequence[Row], axis: str, number: int, charts: int) -> Chart:
    """FAA over an axis, one line per method and value of the other axes. A row without axes is a horizontal line."""
    rows = [row for row in rows if not row.variant or list(row.variant)[-1] == axis]
    ticks = sorted({row.variant[axis] for row in rows if row.variant})
    series: dict[tuple[str, str], dict[Any, tuple[float | None, float | None]]] = {}
    for row in rows:
        alike = [r.variant for r in rows if r.method == row.method]
        others = {k: v for k, v in row.variant.items() if k != axis and any(r[k] != v for r in alike)}
        name = distinct_name(replace(row, variant=others), rows)
        points = series.setdefault((name, "-" if row.variant else "--"), {})
        points.update({row.variant[axis] if row.variant else tick: row.ours("faa") for tick in ticks})
    lines = []
    for n, ((name, style), points) in enumerate(series.items()):
        values, spread = zip(*(points.get(tick, (None, None)) for tick in ticks), strict=True)
        line = figures.distinct_line(n, name, values)
        lines.append(replace(line, style=style, spread=spread if any(s is not None for s in spread) else ()))
    caption = f"FAA over {axis}" + (", ± standard deviation over the seeds" if any(li.spread for li in lines) else "")
    title = f"{caption} ({', '.join(map(str, ticks))}): " + "; ".join(map(line_in_words, lines))
    svg = figures.sweep_chart(lines, list(map(str, ticks)), f"chart{number}", title, axis, "FAA (%)")
    return Chart(grid.name if charts == 1 else f"{grid.name}-{axis}", caption, svg, lines)


def distinct_name(row: Row, rows: Sequence[Row]) -> str:
    """The method, its values on the axes, and the settings in which it differs from other rows of its method."""
    return ", ".join([row.label, *(f"{key}={row.changed[key][0]}" for key in _particular(row, rows))])


def _particular(row: Row, rows: Sequence[Row]) -> list[str]:
    """Settings of a row that differ from the grid's and from those of another row of the same method."""
    alike = [r.changed for r in rows if r.method == row.method and r.runs]
    return [key for key, change in row.changed.items() if any(other.get(key) != change for other in alike)]

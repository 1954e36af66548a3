"""The table and the figures of a grid, from its rows; and a summary of several tables. Both are written as
Markdown, CSV, LaTeX and a page with figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from scipy.stats import rankdata

from vqprompt.core.files import write_atomically
from vqprompt.research.paper.grids import Grid, described
from vqprompt.research.paper.table_rows import ACCURACIES, Row, distinct_name
from vqprompt.research.report import figures
from vqprompt.research.report.pages import PAGE_NAME, line_in_words, link
from vqprompt.research.report.render import UNKNOWN, render

OTHER_BACKBONE, OTHER_SETTINGS, PAPER_NOTE = "†", "§", "‡"
# fields of a result and their headings: numbers that are shown with their spread over the seeds, and counts
MEASURES = {"faa": "FAA", "caa": "CAA", "forgetting": "forgetting"}
COUNTS = {"trainable": "trainable", "images_per_second": "images/s"}
# further ones, which every .csv has; tables that name them in paper.toml show them, too
MORE = (
    "backward_transfer", "plasticity", "new_accuracy", "old_accuracy", "within_task", "area_under_curve",
    "peak_memory", "kept_bytes", "training_flops", "test_flops",
)  # fmt: skip


class Chart(NamedTuple):
    name: str  # of its file
    caption: str
    svg: str
    lines: Sequence[figures.Line]


def in_words(caption: str, lines: Sequence[figures.Line]) -> str:
    """A chart's caption and values as text, for people who cannot see the chart."""
    return f"{caption}: " + "; ".join(map(line_in_words, lines))


@dataclass(frozen=True)
class TextTable:
    """The same cells in every format. columns: cells by heading. text: headings of columns that hold no numbers.
    numbers: rows for CSV by column, not rounded. runs: per row, the folders of its runs by seed, to which seeds
    link on the page. source: where the paper has it. other_backbone: numbers of another one are among them."""

    name: str  # of its files
    title: str
    columns: Mapping[str, Sequence[str]]
    notes: Sequence[str]
    text: Collection[str]
    numbers: Sequence[Mapping[str, Any]]
    charts: Sequence[Chart] = ()
    runs: Sequence[Mapping[int, Path | None]] = ()
    source: str = ""
    other_backbone: bool = False

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*self.columns.values(), strict=True))

    def markdown(self) -> str:
        return render("table.md", table=self)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.numbers[0]) if self.numbers else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.numbers)
        return text.getvalue()

    def latex(self) -> str:
        return render("table.tex", table=self)

    def html(self, folder: Path) -> str:
        """folder: where the page will be written; links to the runs' own pages are relative to it."""

        def link_to(run: Path | None) -> str | None:
            return link(run / PAGE_NAME, folder) if run and (run / PAGE_NAME).exists() else None

        return render("table.html", table=self, svg=Markup, link=link_to)

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.md, .csv, .tex and .html into the folder, and the figures as .svg."""
        texts = {f"{self.name}.md": self.markdown(), f"{self.name}.csv": self.csv(), f"{self.name}.tex": self.latex()}
        texts[f"{self.name}.html"] = self.html(folder)
        texts |= {f"{chart.name}.svg": figures.standalone(chart.svg, chart.lines) for chart in self.charts}
        for name, text in texts.items():
            write_atomically(folder / name, text)
        return [folder / name for name in texts]


def make_table(grid: Grid, rows: Sequence[Row], figure: bool = False) -> TextTable:
    """The rows beside the paper's numbers. Notes below the table explain the marks. Empty columns are left out."""
    axes = list(dict.fromkeys(key for row in rows for key in row.variant))

    def method(row: Row) -> str:  # the axes and the backbone have separate columns
        plain = replace(row, variant={}, changed={k: v for k, v in row.changed.items() if k != "backbone"})
        return distinct_name(plain, rows) + (OTHER_SETTINGS if plain.changed else "")

    def setting(key: str, row: Row) -> str:
        return described({key: row.variant[key]})[0].partition("=")[2] if key in row.variant else ""

    def paper(key: str, row: Row) -> str:
        return spread(*row.paper(key), PAPER_NOTE if row.quoted and row.quoted.mark else "")

    def difference(key: str, row: Row) -> str:
        value = row.difference(key)
        return UNKNOWN if value is None else f"{value:+.2f}{mark(row)}"

    def count(key: str, row: Row) -> str:
        value = row.ours(key)[0]
        return UNKNOWN if value is None else f"{value:,.0f}"

    cells: dict[str, Callable[[Row], str]] = {
        "method": method,
        **{key: partial(setting, key) for key in axes},
        **{heading: partial(ours, key) for key, heading in MEASURES.items()},
        **{heading: partial(ours, key, unit=unit) for heading, (key, unit) in grid.measures.items()},
        **{heading: partial(count, key) for key, heading in COUNTS.items() if not grid.ablation},
        **{f"paper {MEASURES[key]}": partial(paper, key) for key in ACCURACIES},
        **{f"Δ {MEASURES[key]}": partial(difference, key) for key in ACCURACIES},
        "seeds": lambda row: ", ".join(map(str, row.seeds)) or UNKNOWN,
        "backbone": lambda row: row.backbone + mark(row) if row.runs else UNKNOWN,
    }
    columns = {heading: [cell(row) for row in rows] for heading, cell in cells.items()}
    return TextTable(
        grid.name,
        grid.title,
        {h: column for h, column in columns.items() if h in ("FAA", "seeds") or set(column) != {UNKNOWN}},
        notes(grid, rows),
        {"method", *axes, "seeds", "backbone"},
        [numbers(grid, row) for row in rows],
        make_charts(grid, rows) if figure else (),
        [{seed: row.runs[seed].folder for seed in row.seeds} for row in rows],
        f"beside the paper’s {grid.table}" if grid.table else "",
        any(row.other_backbone for row in rows),
    )


def mark(row: Row) -> str:
    return OTHER_BACKBONE if row.other_backbone else ""


def ours(key: str, row: Row, unit: float = 1) -> str:
    return spread(*row.ours(key), mark(row), unit)


def spread(value: float | None, std: float | None, mark: str = "", unit: float = 1) -> str:
    if value is None:
        return UNKNOWN
    return (f"{value / unit:.2f}" if std is None else f"{value / unit:.2f} ± {std / unit:.2f}") + mark


def numbers(grid: Grid, row: Row) -> dict[str, Any]:
    """A row for CSV, with one column per number, not rounded."""
    values: dict[str, Any] = {"method": row.method, "variant": " ".join(described(row.variant))}
    for key in (*MEASURES, *COUNTS, *MORE):
        values[key], values[f"{key}_std"] = row.ours(key)
    for key in ACCURACIES:
        values[f"paper_{key}"], values[f"paper_{key}_std"] = row.paper(key)
        values[f"{key}_difference"] = row.difference(key)
    return values | {
        "seeds": " ".join(map(str, row.seeds)),
        "backbone": row.backbone if row.runs else "",
        "paper_backbone": " ".join(grid.backbones),
        "other_backbone": int(row.other_backbone),
        "hardware": "; ".join(row.hardware),
        "paper_table": grid.table if row.quoted else "",
        "paper_note": row.quoted.mark if row.quoted else "",
        "changed": " ".join(f"{key}={now}" for key, (now, _) in row.changed.items()),
    }


def notes(grid: Grid, rows: Sequence[Row]) -> list[str]:
    quoted = f" The paper's numbers: its {grid.table}." if any(row.quoted for row in rows) else ""
    notes = ["Mean ± standard deviation over the seeds (of these n runs, as the paper's code has it)." + quoted]
    ran = [row for row in rows if row.runs]

    def by_row(pairs: Iterable[tuple[str, Row]]) -> list[str]:
        """Each text once, with the rows that it is about."""
        about = dict[str, list[Row]]()
        for text, row in pairs:
            about.setdefault(text, []).append(row)
        return [
            f"{text}: {'all' if rows == ran and len(ran) > 1 else ', '.join(dict.fromkeys(row.title for row in rows))}"
            for text, rows in about.items()
        ]

    notes += by_row((f"Hardware: {name}", row) for row in ran for name in row.hardware)
    notes += [
        f"{OTHER_BACKBONE} NOT the paper's backbone: measured with {backbone}, where the paper has "
        f"{', '.join(grid.backbones)}. Compare methods with each other, not these numbers with the paper's."
        for backbone in dict.fromkeys(row.backbone for row in rows if row.other_backbone)
    ]
    notes += by_row(
        (f"{OTHER_SETTINGS} {key} is {now}, not {then}".replace("null", "none"), row)
        for row in rows
        for key, (now, then) in row.changed.items()
        if key != "backbone"
    )
    marks = {f"{PAPER_NOTE} {row.title}: {row.quoted.mark}": None for row in rows if row.quoted and row.quoted.mark}
    return [*notes, *marks]


def table_labels(names: Sequence[str], sources: Sequence[Path]) -> list[str]:
    """What a summary calls its tables: those of one name, such as with other data, by the name of their file."""
    files = [source.stem for source in sources]
    pairs = zip(names, files if len({*files}) == len(files) else map(str, sources), strict=True)
    return [name if names.count(name) == 1 else f"{name} ({file})" for name, file in pairs]


def summarize(tables: Mapping[str, Sequence[Row]], figure: bool = False) -> TextTable:
    """One column per table, and per variant of a table. Only methods that have a number in every column get a mean and
    a rank: over fewer tables, neither could be compared."""
    results: dict[str, dict[str, Row]] = {}  # by column and method
    for table, rows in tables.items():
        for row in (row for row in rows if row.runs):
            alike = [other for other in rows if other.variant == row.variant]
            column = results.setdefault(", ".join([table, *described(row.variant)]), {})
            column[distinct_name(replace(row, variant={}), alike)] = row
    faa = {column: {m: float(row.ours("faa")[0] or 0) for m, row in of.items()} for column, of in results.items()}
    methods = list(dict.fromkeys(method for of in results.values() for method in of))
    complete = [method for method in methods if all(method in of for of in results.values())]
    accuracy = np.array([[of[method] for of in faa.values()] for method in complete]).reshape(-1, len(faa))
    means = dict(zip(complete, accuracy.mean(axis=1), strict=True))
    ranks = dict(zip(complete, rankdata(-accuracy, axis=0).mean(axis=1), strict=True))
    order = sorted(methods, key=lambda m: (ranks.get(m, np.inf), -means.get(m, 0)))

    def cell(row: Row | None) -> str:
        changed = row is not None and row.changed.keys() - {"backbone"}
        return UNKNOWN if row is None else ours("faa", row) + (OTHER_SETTINGS if changed else "")

    def shown(numbers: Mapping[str, float]) -> list[str]:
        return [f"{numbers[method]:.2f}" if method in numbers else UNKNOWN for method in order]

    columns = {"method": order, **{name: [cell(of.get(method)) for method in order] for name, of in results.items()}}
    columns |= {"mean": shown(means), "mean rank": shown(ranks)}
    notes = [
        "Final average accuracy, mean ± standard deviation over the seeds. Mean: over the columns. Mean rank: 1 is the "
        f"best of the {len(complete)} methods that have a number in every column; equal numbers share their ranks."
    ]
    if any(row.changed or row.other_backbone for of in results.values() for row in of.values()):
        notes.append(
            f"{OTHER_BACKBONE} another backbone than the paper's, {OTHER_SETTINGS} other settings than the table's: "
            "the table itself says which."
        )
    numbers = [
        {"method": m, **{name: of.get(m) for name, of in faa.items()}, "mean": means.get(m), "mean_rank": ranks.get(m)}
        for m in order
    ]
    title = f"Summary of {', '.join(tables)}"
    charts = []
    if figure:
        lines = [figures.distinct_line(n, m, [of.get(m) for of in faa.values()]) for n, m in enumerate(order)]
        lines = [replace(line, style=":") for line in lines]  # tables have no order: the lines only guide the eye
        svg = figures.sweep_chart(lines, list(faa), "summary", in_words(title, lines), "table", "FAA (%)")
        charts.append(Chart("summary", "Final average accuracy by table, the methods by their mean rank", svg, lines))
    return TextTable("summary", title, columns, notes, {"method"}, numbers, charts)


def make_charts(grid: Grid, rows: Sequence[Row]) -> list[Chart]:
    """For an ablation, FAA over the last axis of a sweep. Else accuracy after each task, one chart per variant."""
    ran = [row for row in rows if row.runs]
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
        caption = ", ".join(["Average accuracy over the tasks seen so far, after each task", *parts])
        svg = figures.accuracy_chart(lines, f"chart{len(charts)}", in_words(caption, lines))
        charts.append(Chart("-".join([grid.name, *parts]).replace(":", "_"), caption, svg, lines))
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
        values, deviations = zip(*(points.get(tick, (None, None)) for tick in ticks), strict=True)
        line = figures.distinct_line(n, name, values)
        lines.append(replace(line, style=style, spread=deviations if any(d is not None for d in deviations) else ()))
    caption = f"FAA over {axis}" + (", ± standard deviation over the seeds" if any(li.spread for li in lines) else "")
    title = in_words(f"{caption} ({', '.join(map(str, ticks))})", lines)
    svg = figures.sweep_chart(lines, list(map(str, ticks)), f"chart{number}", title, axis, "FAA (%)")
    return Chart(grid.name if charts == 1 else f"{grid.name}-{axis}", caption, svg, lines)

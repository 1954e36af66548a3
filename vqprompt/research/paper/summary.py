"""Several tables in one: the accuracy of every method on each of them, its mean and its mean rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import rankdata

from vqprompt.research.paper.grids import Grid, described
from vqprompt.research.paper.table_formats import NONE, Chart, TextTable, in_words
from vqprompt.research.paper.table_rows import Row, distinct_name
from vqprompt.research.paper.tables import OTHER_BACKBONE, OTHER_SETTINGS, ours
from vqprompt.research.report import figures

NAME = "summary"


def summarize(tables: Sequence[tuple[Grid, Sequence[Row]]], figure: bool = False) -> TextTable:
    """One column per table, and per variant of a table. Only methods that have a number in every column get a mean and
    a rank: over fewer tables, neither could be compared."""
    results: dict[str, dict[str, Row]] = {}  # by column and method
    for grid, rows in tables:
        for row in (row for row in rows if row.runs):
            alike = [other for other in rows if other.variant == row.variant]
            column = results.setdefault(", ".join([grid.name, *described(row.variant)]), {})
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
        return NONE if row is None else ours("faa", row) + (OTHER_SETTINGS if changed else "")

    def shown(numbers: Mapping[str, float]) -> list[str]:
        return [f"{numbers[method]:.2f}" if method in numbers else NONE for method in order]

    columns = {"method": order, **{name: [cell(of.get(method)) for method in order] for name, of in results.items()}}
    columns |= {"mean": shown(means), "mean rank": shown(ranks)}
    notes = [
        "Final average accuracy, mean ± standard deviation over the seeds. Mean: over the columns. Mean rank: 1 is the "
        f"best of the {len(complete)} methods that have a number in every column; equal numbers share their ranks."
    ]
    marks = {
        OTHER_BACKBONE: "another backbone than the paper's",
        OTHER_SETTINGS: "settings that differ from the table's",
    }
    cells = "".join(cell for column in columns.values() for cell in column)
    notes += [f"{mark} {meaning}; the table itself says which" for mark, meaning in marks.items() if mark in cells]
    numbers = [
        {"method": m, **{name: of.get(m) for name, of in faa.items()}, "mean": means.get(m), "mean_rank": ranks.get(m)}
        for m in order
    ]
    title = f"Summary of {', '.join(grid.name for grid, _ in tables)}"
    charts = []
    if figure:
        lines = [figures.distinct_line(n, m, [of.get(m) for of in faa.values()]) for n, m in enumerate(order)]
        lines = [replace(line, style=":") for line in lines]  # tables have no order: the lines only guide the eye
        svg = figures.sweep_chart(lines, list(faa), NAME, in_words(title, lines), "table", "FAA (%)")
        charts.append(Chart(NAME, "Final average accuracy by table, the methods by their mean rank", svg, lines))
    return TextTable(NAME, title, columns, notes, {"method"}, numbers, charts)

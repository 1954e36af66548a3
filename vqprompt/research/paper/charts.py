"""The figures of a table: accuracy over tasks, or FAA over the values of a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vqprompt.research.paper.grids import Grid, described
from vqprompt.research.paper.table_rows import Row
from vqprompt.research.report import figures
from vqprompt.research.report.pages import line_in_words


@dataclass(frozen=True)
class Chart:
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
        name = "-".join([grid.name, *parts])
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

"""Charts as inline SVG: small, styled by the page's CSS, and many of them fit on one page.

What is notable about this implementation:
- text stays text, in the page's own font: an SVG has a few kB, can be searched and can be read aloud
- matplotlib uses the same ids in every figure; here they are made unique, else the clip paths of one figure would cut
  another
- no pyplot: it would keep figures in memory. The style settings hold only while a figure is drawn
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

Values = Sequence[float | None]  # None becomes NaN in an array, which is not drawn
INK, MUTED, BAND = "#1f2933", "#52606d", "#f1f4f8"
COLORS = ("#0b6e99", "#d1495b", "#2f855a", "#b7791f", "#6b46c1", "#00838f", "#97266d")
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}  # matplotlib's name: the character for a legend
ACCURACY_COLORS, DARK_FROM = "YlGnBu", 0.6755  # where white text has more contrast than black text
USE_COLORS = "Purples"
MOST_BAR_LABELS = 12  # with more bars, the numbers over them would touch
STYLE_FILE = Path(__file__).with_name("templates") / "style.mplstyle"
STYLE = matplotlib.rc_params_from_file(STYLE_FILE, use_default_template=False)
SVG_CHANGES = (
    (r"<style.*?</style>", ""),  # its `*` selector would change the whole page
    (r"<!--.*?-->", ""),
    (r'<g id="[^"]*"', "<g"),  # ids that nothing refers to
    (r"font-family:[^;\"]*;?", ""),  # the page chooses the font
    (r' transform="rotate\(-0 [^"]*"', ""),
    (r"xlink:href", "href"),
    (r"\s+", " "),
    (r"> <", "><"),
)


@dataclass(frozen=True)
class Line:
    name: str
    values: Values
    color: str
    marker: str = "o"
    style: str = "-"
    spread: Values = ()  # standard deviations of the values, if known

    @property
    def glyph(self) -> str:
        return MARKERS[self.marker]

    @property
    def look(self) -> dict[str, Any]:
        return {"color": self.color, "marker": self.marker, "linestyle": self.style}


def distinct_line(number: int, name: str, values: Values) -> Line:
    """The line with this number in a chart. The combination of colour and marker repeats only after 35 lines."""
    return Line(name, values, COLORS[number % len(COLORS)], list(MARKERS)[number % len(MARKERS)])


def accuracy_chart(lines: Sequence[Line], key: str, title: str, xlabel: str = "after learning task") -> str:
    """Accuracy in percent after each task. `key` is the figure's name on its page."""
    many = max(0, len(lines) - 6)  # with more than six lines the chart is higher and the lines are thinner
    with matplotlib.rc_context(STYLE | ({"lines.linewidth": 1.0, "lines.markersize": 3.0} if many else {})):
        figure, axes = _axes(4.3, 2.6 + 0.15 * many, xlabel, "accuracy (%)")
        for line in lines:  # not clipped, because a marker at 100 % is partly outside the axes
            values = np.array(line.values, float)
            axes.plot(range(1, len(values) + 1), values, **line.look, clip_on=False, zorder=3)
        shown = [v for line in lines for v in line.values if v is not None]
        axes.set_ylim(max(0, 10 * math.floor((min(shown, default=0) - 5) / 10)), 100)
        axes.yaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
        _task_axis(axes, max((len(line.values) for line in lines), default=1))
        return _svg(figure, key, title)


def sweep_chart(lines: Sequence[Line], ticks: Sequence[str], key: str, title: str, xlabel: str, ylabel: str) -> str:
    """Lines over the values of a setting. The values are evenly spaced; the y axis covers just the lines.

    If values have a spread, lines are shifted a little sideways, so that their error bars do not overlap.
    """
    with matplotlib.rc_context(STYLE | ({"lines.linewidth": 1.4} if any(line.spread for line in lines) else {})):
        long = sum(map(len, ticks)) > 45  # they would touch
        figure, axes = _axes(4.3, 2.6 + long * 0.03 * max(map(len, ticks)), xlabel, ylabel)
        for n, line in enumerate(lines):
            aside = 0.05 * (n - (len(lines) - 1) / 2) if line.spread else 0.0
            at, values = [tick + aside for tick in range(len(ticks))], np.array(line.values, float)
            axes.plot(at, values, **line.look, zorder=3)
            if line.spread:
                deviations = np.array(line.spread, float)
                axes.errorbar(at, values, deviations, fmt="none", ecolor=line.color, elinewidth=0.8, zorder=2)
        axes.set_xticks(range(len(ticks)), list(ticks), rotation=30 if long else 0, ha="right" if long else "center")
        axes.margins(y=0.12)
        return _svg(figure, key, title)


def search_chart(
    points: Sequence[tuple[float, float]], limits: tuple[float, float], log: bool, key: str, title: str, xlabel: str
) -> str:
    """Accuracies against values of a setting, the best one in red. The range that was searched is shaded."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.3, 2.6, xlabel, "accuracy (%)")
        if log:
            axes.set_xscale("log")
            _plain_numbers(axes.xaxis)
        axes.axvspan(*limits, color=BAND, linewidth=0, zorder=0)
        axes.plot(*zip(*points, strict=True), "o", color=COLORS[0], zorder=3)
        axes.plot(*max(points, key=lambda point: point[1]), "D", color=COLORS[1], zorder=4)
        return _svg(figure, key, title)


def standalone(svg: str, lines: Sequence[Line]) -> str:
    """An inline chart as a separate file: with its legend, on white, in a common font."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None
    width, height = map(float, box.groups())
    entry = 6 * max((len(line.name) for line in lines), default=0) + 20  # approximate width of a legend's entry
    rows = math.ceil(len(lines) / max(1, int((width - 40) / entry)))
    legend = "".join(
        f'<text y="{height + 14 * (n % rows + 1):.1f}" font-size="10"><tspan x="{46 + n // rows * entry}" '
        f'text-anchor="middle" fill="{line.color}">{line.glyph}</tspan>'
        f'<tspan x="{56 + n // rows * entry}">{escape(line.name)}</tspan></text>'
        for n, line in enumerate(lines)
    )
    whole = f"{width:g} {height + 14 * rows + 8:g}"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="{INK}" viewBox="0 0 {whole}"'
    body = svg.replace(f"<svg {box[0]}", start, 1).removesuffix("</svg>")
    return body.replace("</title>", '</title><rect width="100%" height="100%" fill="white"/>', 1) + legend + "</svg>\n"


def forgetting_chart(drops: Sequence[float], key: str, title: str) -> str:
    """One bar per task. Below zero, the accuracy of the task has risen since."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.3, 2.6, "task", "forgetting (points)")
        colors = [COLORS[1] if drop > 0 else COLORS[2] for drop in drops]
        bars = axes.bar(range(1, len(drops) + 1), drops, color=colors, width=0.65)
        if len(drops) <= MOST_BAR_LABELS:
            axes.bar_label(bars, [f"{drop:.1f}" for drop in drops], padding=2, color=INK, fontsize=8)
        axes.axhline(0, color=MUTED, linewidth=0.8)
        low, high = min([0.0, *drops]), max([0.0, *drops])
        room = 0.12 * max(high - low, 1.0)
        axes.set_ylim(low - room if low < 0 else 0, high + room)
        _task_axis(axes, len(drops))
        return _svg(figure, key, title)


def loss_chart(tasks: Sequence[int], values: Values, key: str, title: str) -> str:
    """One term of the loss over the epochs. `tasks` has the task of each epoch; every other task is shaded."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(3.7, 2.3, "task", "")
        # a logarithmic axis if the first epochs of a task are far above the rest
        known = [v for v in values if v is not None and math.isfinite(v)]
        if known and min(known) > 0 and max(known) > 50 * min(known):
            axes.set_yscale("log")
            _plain_numbers(axes.yaxis)
        learned, middles = sorted(set(tasks)), []
        for n, task in enumerate(learned):
            epochs = [epoch for epoch, of in enumerate(tasks) if of == task]
            losses = np.array([values[epoch] for epoch in epochs], float)
            axes.plot(epochs, losses, color=COLORS[0], linewidth=1.3, marker="o", markersize=2.2)
            middles.append((epochs[0] + epochs[-1]) / 2)
            if n % 2 == 0:
                axes.axvspan(epochs[0] - 0.5, epochs[-1] + 0.5, color=BAND, linewidth=0, zorder=0)
        every = math.ceil(len(learned) / 10)
        axes.set_xticks(middles[::every], [str(task + 1) for task in learned[::every]])
        axes.set_xlim(-0.5, max(len(tasks), 1) - 0.5)
        return _svg(figure, key, title)


def prompt_use_chart(shares: Sequence[Sequence[float]], highest: float, key: str, title: str) -> str:
    """Tasks × prompts. Colour: the share of a task's choices that fell on the prompt. Right: prompts in use."""
    with matplotlib.rc_context(STYLE):
        tasks, prompts = len(shares), len(shares[0])
        figure, axes = _axes(3.7, 0.7 + 0.16 * min(max(tasks, 3), 12), "prompt", "task")
        # without interpolation the SVG has one pixel per cell, so it stays small
        axes.imshow(shares, cmap=USE_COLORS, vmin=0, vmax=highest, aspect="auto", interpolation="none")
        axes.grid(False)
        axes.spines[:].set_visible(True)
        rows, columns = (range(0, count, math.ceil(count / 10)) for count in (tasks, prompts))
        axes.set_yticks(rows, [str(task + 1) for task in rows])
        axes.set_xticks(columns, [str(prompt + 1) for prompt in columns])
        place: Any = "axes fraction", "data"
        for task in rows:
            used = str(sum(share > 0 for share in shares[task]))
            axes.annotate(used, (1.02, task), xycoords=place, va="center", color=MUTED, fontsize=8)
        return _svg(figure, key, title)


def cell_colors(percent: float) -> tuple[str, str]:
    """Background and text colour of a heat map's cell. The text is black or white, whichever has more contrast."""
    share = min(max(percent, 0.0), 100.0) / 100
    background = matplotlib.colors.to_hex(matplotlib.colormaps[ACCURACY_COLORS](share))
    return background, "#000000" if share < DARK_FROM else "#ffffff"


def color_scale(name: str, steps: int = 8) -> list[str]:
    """Colours of a colour map from low to high, for a legend."""
    return [matplotlib.colors.to_hex(matplotlib.colormaps[name](n / (steps - 1))) for n in range(steps)]


def _axes(width: float, height: float, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y")
    return figure, axes


def _plain_numbers(axis: Axis) -> None:
    """Of a logarithmic axis; by default they are powers in TeX, which the page does not have."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _task_axis(axes: Axes, tasks: int) -> None:
    if tasks <= 10:
        axes.set_xticks(range(1, tasks + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlim(0.5, max(tasks, 1) + 0.5)


def _svg(figure: Figure, key: str, title: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    drawn = buffer.getvalue()
    box = re.search(r'viewBox="([^"]+)"', drawn)
    assert box is not None
    body = drawn[drawn.index(">", box.end()) + 1 :]
    for pattern, instead in SVG_CHANGES:
        body = re.sub(pattern, instead, body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", body)
    label = f'<title id="{key}-title">{escape(title)}</title>'
    return f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{key}-title">{label}{body.strip()}'

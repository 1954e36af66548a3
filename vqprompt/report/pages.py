"""The page people look at: one HTML file a run, and one that puts several runs side by side.

What is notable about this implementation:
- a page is whole: no script, no font, no image from elsewhere (its own security policy forbids them)
- every name on it passes through an escaping template; figures alone go in as they are
- accuracy matrices are tables, not pictures: they can be read aloud, copied, and scrolled on a phone
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from vqprompt.errors import UserError
from vqprompt.files import write_atomically
from vqprompt.report import figures
from vqprompt.runs.config import flatten

PAGE_NAME = "report.html"
UNKNOWN = "–"


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` from the run's metrics.json and config.json; also while the run goes on."""
    metrics = _read(folder, "metrics.json")
    config = _read(folder, "config.json")
    page = _pages().get_template("run").render(
        m=metrics,
        learned=_learned(metrics),
        cards=_cards(metrics),
        charts=_accuracy_charts(metrics),
        loss_charts=_loss_charts(metrics["losses"]),
        prompt_use=_prompt_use(metrics["prompt_use"]),
        tasks=_task_rows(metrics),
        config=flatten(config),
    )  # fmt: skip
    target = folder / PAGE_NAME
    write_atomically(target, page)
    return target


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write one page about several runs; a run without a page of its own gets one, so that every link leads on."""
    if not folders:
        raise UserError("a comparison needs at least one run's folder; none was given")
    all_metrics = [_read(folder, "metrics.json") for folder in folders]
    names = _names(folders, all_metrics)
    curves = [m["average_accuracy"] for m in all_metrics]
    lines = [figures.distinct_line(n, *named) for n, named in enumerate(zip(names, curves, strict=True))]
    runs = []
    for folder, metrics, line in zip(folders, all_metrics, lines, strict=True):
        own = folder / PAGE_NAME
        if not own.exists():
            write_report(folder)
        link = quote(Path(os.path.relpath(own, target.parent)).as_posix())
        runs.append({"m": metrics, "learned": _learned(metrics), "link": link, "line": line})
    data_sets = list(dict.fromkeys(m["data"] for m in all_metrics))
    title = "Average accuracy over the tasks seen so far, after each task: " + "; ".join(map(told, lines))
    page = _pages().get_template("comparison").render(
        runs=runs,
        heading=" · ".join(dict.fromkeys(m["title"] for m in all_metrics)),
        data=" and ".join(data_sets),
        several_data_sets=len(data_sets) > 1,
        chart=Markup(figures.accuracy_chart(lines, "accuracy", title)),
        best=_best(all_metrics),
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    return target


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no {name} here; give a folder that `vqprompt run` wrote") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: damaged ({error}); restore it or do the run again") from None


def _learned(metrics: dict[str, Any]) -> int:
    """How many tasks have been learned so far: as many as there are columns with numbers."""
    return sum(column is not None for column in metrics["accuracy"][0])


def _cards(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Headline numbers: name, value, what it says."""
    averages = metrics["average_accuracy"]
    so_far = "" if metrics["done"] or not averages else f" So far: {_percent(averages[-1])}."
    single = len(metrics["tasks"]) == 1
    forgetting = "One task: nothing to forget." if single else "Points that tasks fell from their best, on average."
    parameters, rate = metrics["parameters"], metrics["images_per_second"]
    return [
        ("FAA", _percent(metrics["faa"]), f"Final average accuracy: over all tasks, after the last.{so_far}"),
        ("CAA", _percent(metrics["caa"]), "Cumulative average accuracy: the mean of the averages after each task."),
        ("Forgetting", UNKNOWN if single else _fixed(metrics["forgetting"]), forgetting),
        ("Time", _duration(metrics["seconds"]), "Learning and testing of all tasks."),
        ("Images per second", _fixed(rate, 0), "Speed of training." if rate else "Nothing was trained."),
        (
            "Prompting parameters",
            f"{parameters['prompting']:,}",
            f"Of {_short(parameters['trainable'])} trainable; the backbone has {_short(parameters['backbone'])}.",
        ),
    ]


def _accuracy_charts(metrics: dict[str, Any]) -> dict[str, Any]:
    """The curve over tasks and the bars; neither says anything before the second task."""
    learned = _learned(metrics)
    if learned < 2:
        return {}
    average = figures.distinct_line(0, "average over the tasks seen so far", metrics["average_accuracy"])
    latest = figures.Line(
        "the task just learned", [metrics["accuracy"][j][j] for j in range(learned)], figures.COLORS[3], "D", ":"
    )
    lines = [average, latest]
    drops = metrics["forgetting_per_task"] or []
    after_each = "Accuracy after each task: " + "; ".join(map(told, lines))
    forgetting = "Forgetting of each task, in points: " + ", ".join(map(_fixed, drops))
    return {
        "lines": lines,
        "accuracy": Markup(figures.accuracy_chart(lines, "accuracy", after_each)),
        "forgetting": Markup(figures.forgetting_chart(drops, "forgetting", forgetting)) if drops else None,
    }


def told(line: figures.Line) -> str:
    """A line of a chart in words, for those who cannot see it."""
    return f"{line.name}: {', '.join(_percent(v) for v in line.values)}"


def _loss_charts(entries: list[dict[str, Any]]) -> list[tuple[str, Markup]]:
    tasks = [entry["task"] for entry in entries]
    charts = []
    for n, term in enumerate(dict.fromkeys(term for entry in entries for term in entry["losses"])):
        values = [entry["losses"].get(term) for entry in entries]
        first, last = (next((v for v in order if v is not None), None) for order in (values, reversed(values)))
        title = f"Loss “{term}” over {len(values)} epochs: from {_fixed(first, 4)} to {_fixed(last, 4)}"
        charts.append((term, Markup(figures.loss_chart(tasks, values, f"loss{n}", title))))
    return charts


def _prompt_use(use: dict[str, Any] | None) -> dict[str, Any] | None:
    if use is None or not use["counts"]:
        return None
    shares = [[[n / max(sum(counts), 1) for n in counts] for counts in task] for task in use["counts"]]
    highest = max(share for task in shares for block in task for share in block)
    blocks = []
    for b, block in enumerate(use["blocks"]):
        of_tasks = [task[b] for task in shares]
        total = len(of_tasks[0])
        in_use = sum(any(task[n] > 0 for task in of_tasks) for n in range(total))
        title = f"Block {block}: {in_use} of {total} prompts in use; by task, from the first: " + ", ".join(
            str(sum(share > 0 for share in task)) for task in of_tasks
        )
        chart = Markup(figures.prompt_use_chart(of_tasks, highest or 1, f"use{b}", title))
        blocks.append({"block": block, "in_use": in_use, "total": total, "chart": chart})
    return {"blocks": blocks, "highest": 100 * highest}


def _task_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for number, classes in enumerate(metrics["tasks"]):
        known = [a for a in metrics["accuracy"][number] if a is not None]
        seconds = metrics["task_seconds"][number] if number < len(metrics["task_seconds"]) else None
        first, now = (known[0], known[-1]) if known else (None, None)
        rows.append({"number": number + 1, "classes": classes, "first": first, "now": now, "seconds": seconds})
    return rows


def _names(folders: Sequence[Path], all_metrics: Sequence[dict[str, Any]]) -> list[str]:
    """The methods' titles; with the seed and then the folder where that does not tell the runs apart."""
    names = [m["title"] for m in all_metrics]
    above = os.path.commonpath([folder.resolve().parent for folder in folders])
    places = [os.path.relpath(folder.resolve(), above) for folder in folders]
    for more in ([f"seed {m['seed']}" for m in all_metrics], places):
        times = Counter(names)
        names = [f"{name}, {extra}" if times[name] > 1 else name for name, extra in zip(names, more, strict=True)]
    return names


def _best(all_metrics: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What to print bold: nothing where runs differ in data or number of tasks, for then numbers do not compare."""
    comparable = len({(m["data"], len(m["tasks"])) for m in all_metrics}) == 1
    best: dict[str, float | None] = {}
    for name, choose in (("faa", max), ("caa", max), ("forgetting", min)):
        known = [m[name] for m in all_metrics if m[name] is not None]
        best[name] = choose(known) if comparable and len(known) > 1 else None
    return best


def _fixed(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}\N{NO-BREAK SPACE}%"


def _short(count: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}\N{NO-BREAK SPACE}{unit}"
    return str(count)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def render(page: str, **content: Any) -> str:
    """A page of another module's, in the style of these: a template that extends "base"."""
    return _pages().from_string(page).render(**content)


@cache
def _pages() -> Environment:
    pages = Environment(
        loader=DictLoader({"base": BASE, "heat": HEAT, "run": RUN, "comparison": COMPARISON}),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    pages.globals |= {"css": Markup(CSS), "cell_colors": figures.cell_colors, "color_scale": figures.color_scale}
    pages.filters |= {"percent": _percent, "fixed": _fixed, "duration": _duration, "short": _short}
    return pages


CSS = """
:root { --ink: #1f2933; --muted: #52606d; --line: #dde3ea; --page: #f5f7fa; --accent: #0b6e99; color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header > div { max-width: 1160px; margin: 0 auto; padding: 0 20px; }
header { background: #102a43; color: #fff; padding: 36px 0 76px; }
a { color: var(--accent); }
h1 { margin: 0; font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.2; letter-spacing: -.015em; }
h1, h2, h3, td, dd, p, li { overflow-wrap: anywhere; }
h1 small { font-size: .6em; font-weight: 400; opacity: .8; letter-spacing: 0; }
h2 { margin: 0 0 2px; font-size: 1.15rem; letter-spacing: -.01em; }
h3 { margin: 0; font-size: .95rem; font-weight: 600; }
h3 span, .note { color: var(--muted); font-weight: 400; font-size: .875rem; }
.note { margin: 0 0 14px; max-width: 80ch; }
section > .note:last-child { margin: 10px 0 0; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 10px 0 0; padding: 0; list-style: none;
  font-size: .9rem; color: #c3d3e2; }
main { margin-top: -48px; padding-bottom: 40px; }
section, .card, .banner { background: #fff; border: 1px solid var(--line); border-radius: 12px; }
section { padding: 22px 24px; margin-top: 18px; min-width: 0; }
.banner { border-left: 6px solid #d69e2e; padding: 12px 18px; margin-bottom: 14px; }
.cards { display: grid; grid-template-columns: repeat(5, 1fr) 1.2fr; gap: 12px; }
.card { padding: 14px; }
.card b { display: block; font-size: 1.45rem; line-height: 1.3; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.card i { font-style: normal; font-size: .78rem; letter-spacing: -.01em; font-weight: 600; color: var(--muted); }
.card p { margin: 4px 0 0; font-size: .8rem; line-height: 1.4; color: var(--muted); }
.card:first-child { background: var(--accent); border-color: var(--accent); }
.card:first-child * { color: #fff; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0 18px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 18px 24px; }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; margin-top: 6px; overflow: visible; stroke-linejoin: round; }
svg text { font-family: inherit !important; }
.alone svg, .pair > :only-child svg { max-width: 660px; margin-inline: auto; }
.alone .legend { justify-content: center; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 4px 0 0; padding: 0; list-style: none;
  font-size: .875rem; }
.scale { display: flex; align-items: center; gap: 8px; margin-top: 10px; font-size: .8rem; color: var(--muted); }
.scale span { width: 140px; height: 10px; border-radius: 5px; border: 1px solid var(--line); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
.list { width: 100%; }
.list th { text-align: left; font-size: .8rem; color: var(--muted); font-weight: 600; }
.list th, .list td { padding: 8px 16px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.list tr > :last-child { padding-right: 0; }
.list tbody tr:last-child td { border-bottom: 0; }
.list.results td { white-space: nowrap; }
ul.notes { margin: 14px 0 0; padding-left: 1.2em; color: var(--muted); font-size: .875rem; max-width: 90ch; }
.list .n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tasks .n { width: 1%; }
.best { font-weight: 700; color: #1d6b41; }
.heat { border-collapse: separate; border-spacing: 2px; font-size: .8rem; font-variant-numeric: tabular-nums; }
.full .heat { width: 100%; max-width: calc(80px + var(--tasks) * 90px); }
.heat th { color: var(--muted); font-weight: 500; padding: 2px 6px; white-space: nowrap; }
.heat tbody th, .heat tfoot th { text-align: right; width: 1%; position: sticky; left: 0; background: #fff; }
.heat td { text-align: center; white-space: nowrap; min-width: 38px; height: 30px; padding: 0 3px; border-radius: 4px; }
.heat tbody td:empty { background: #f5f7fa; }
.heat tfoot td { font-weight: 700; border-top: 2px solid var(--line); border-radius: 0; }
.heat.compact { font-size: .7rem; border-spacing: 1px; }
.heat.compact td { min-width: 21px; height: 21px; padding: 0; border-radius: 2px; }
.heat.compact th { padding: 0 3px; }
.heats { display: flex; flex-wrap: wrap; gap: 26px 32px; }
.heats > div { max-width: 100%; min-width: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 4px; margin: 0; padding: 0; list-style: none; }
.chips li { background: #eaf2f8; border-radius: 6px; padding: 1px 8px; font-size: .82rem; max-width: 100%; }
dl { margin: 0; columns: 3 260px; column-gap: 32px; font-size: .85rem; }
dl div { display: flex; justify-content: space-between; gap: 12px; padding: 4px 0; border-bottom: 1px solid var(--line);
  break-inside: avoid; }
dt { color: var(--muted); flex: none; }
dd { margin: 0; text-align: right; font-family: ui-monospace, Consolas, monospace; min-width: 0; }
footer { max-width: 1160px; margin: 0 auto; padding: 0 20px 32px; font-size: .8rem; color: var(--muted); }
@media (max-width: 1000px) { .cards { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 560px) {
  main, header > div, footer { padding-inline: 12px; }
  section { padding: 16px 14px; }
  .cards { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .card { padding: 12px; }
  .tasks, .tasks tbody, .tasks tr, .tasks td { display: block; }
  .tasks thead { display: none; }
  .tasks tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  .list.tasks td { display: inline-block; width: auto; padding: 0 14px 4px 0; border: 0; }
  .list.tasks td.names { display: block; }
  .tasks td[data-name]::before { content: attr(data-name) " "; color: var(--muted); }
}
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  @page { margin: 12mm; }
  html { font-size: 12px; }
  body { background: #fff; font-size: 1rem; }
  header { padding: 18px 0 30px; }
  main { margin-top: -20px; }
  .cards { gap: 6px; }
  .card { padding: 8px 12px; }
  .pair { grid-template-columns: 1fr 1fr; }
  .grid { grid-template-columns: repeat(3, 1fr); }
  section, .heats > div { break-inside: avoid; }
  section.long { break-inside: auto; }
  tr, figure { break-inside: avoid; }
  h2, .note { break-after: avoid; }
  .scroll { overflow: visible; }
  .heat td { min-width: 0; height: 22px; }
  .heat.many { font-size: 8px; border-spacing: 1px; }
  .heat.many :is(td, th) { padding: 0 1px; }
}
"""


BASE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{% block title %}{% endblock %}</title>
<style>{{ css }}</style>
</head>
<body>
<header><div>{% block head %}{% endblock %}</div></header>
<main>
{% block main %}{% endblock %}
</main>
<footer>{% block foot %}Accuracies are in percent; a task’s is measured among all classes seen so far, without being
told the task.{% endblock %} Written by vqprompt.</footer>
</body>
</html>
"""


HEAT = """
{% macro matrix(m, learned, compact=false) %}
<div class="scroll" role="region" aria-label="Accuracy matrix of {{ m.title }}" tabindex="0">
{% set number = "%.0f" if compact else "%.1f" %}
{% set size = m.tasks | length %}
<table class="heat{{ " many" if size > 12 }}{{ " compact" if compact }}" style="--tasks:{{ size }}">
<thead>
<tr><td></td><th colspan="{{ size }}" scope="colgroup">after learning task</th></tr>
<tr><td></td>{% for _ in m.tasks %}<th scope="col">{{ loop.index }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for row in m.accuracy %}
<tr><th scope="row">Task {{ loop.index }}</th>{% for value in row %}{% if value is none %}<td></td>{% else %}
{% set background, text = cell_colors(value) %}
<td style="background:{{ background }};color:{{ text }}">{{ number | format(value) }}</td>{% endif %}{% endfor %}</tr>
{% endfor %}
</tbody>
<tfoot><tr><th scope="row">Average</th>{% for _ in m.tasks %}<td>{% if loop.index0 < learned %}
{{- number | format(m.average_accuracy[loop.index0]) }}{% endif %}</td>{% endfor %}</tr></tfoot>
</table>
</div>
{% endmacro %}
{% macro scale(low, high, name) %}
<div class="scale">{{ low }}<span style="background:linear-gradient(90deg,{{ color_scale(name) | join(",") }})"></span>
{{ high }}</div>
{% endmacro %}
{% macro legend(lines) %}
<ul class="legend">
{% for line in lines %}
<li><span style="color:{{ line.color }}" aria-hidden="true">{{ line.glyph }}</span> {{ line.name }}</li>
{% endfor %}
</ul>
{% endmacro %}
"""


RUN = """{% extends "base" %}
{% import "heat" as heat %}
{% block title %}{{ m.title }} on {{ m.data }}{% endblock %}
{% block head %}
<h1>{{ m.title }} <small>on {{ m.data }}</small></h1>
<ul class="facts"><li>{{ m.tasks | length }} task{{ "" if m.tasks | length == 1 else "s" }},
{{ m.tasks | sum(start=[]) | length }} classes</li>
<li>backbone {{ m.backbone }}</li><li>seed {{ m.seed }}</li><li>{{ m.hardware }}</li></ul>
{% endblock %}
{% block main %}
{% if not m.done %}
<div class="banner" role="status"><strong>This run is not finished:</strong>
{{ learned }} of {{ m.tasks | length }} tasks learned so far.</div>
{% endif %}
{% if m.get("validation") %}
<div class="banner"><strong>Validation:</strong>
accuracies are on images held out of the training set, not on the test set.</div>
{% endif %}
<div class="cards">
{% for name, value, meaning in cards %}
<div class="card"><i>{{ name }}</i><b>{{ value }}</b><p>{{ meaning }}</p></div>
{% endfor %}
</div>
{% if learned %}
<section class="full">
<h2>Accuracy on each task, as learning goes on</h2>
<p class="note">Along a row, a task is remembered or forgotten; the diagonal is each task just learned.</p>
{{ heat.matrix(m, learned) }}
{{ heat.scale("0 %", "100 %", "YlGnBu") }}
</section>
{% endif %}
{% if charts %}
<div class="pair">
<section><figure><figcaption><h2>Accuracy after each task</h2></figcaption>
{{ charts.accuracy }}{{ heat.legend(charts.lines) }}</figure></section>
{% if charts.forgetting %}
<section><figure><figcaption><h2>Forgetting of each task</h2></figcaption>{{ charts.forgetting }}</figure>
<p class="note">From its best accuracy to the one {{ "at the end" if m.done else "now" }}.
Below zero, it got better.</p></section>
{% endif %}
</div>
{% endif %}
{% if loss_charts %}
<section>
<h2>Training loss</h2>
<p class="note">Mean of each epoch, task after task; bands tell the tasks apart.</p>
<div class="grid">
{% for term, chart in loss_charts %}
<figure><figcaption><h3>{{ term }}</h3></figcaption>{{ chart }}</figure>
{% endfor %}
</div>
</section>
{% endif %}
{% if prompt_use %}
<section class="long">
<h2>Prompt use</h2>
<p class="note">Where the choices of a task’s training images fell, block by block. At the right of a row, how
many prompts the task used.</p>
<div class="grid">
{% for block in prompt_use.blocks %}
<figure><figcaption><h3>Block {{ block.block }}
<span>· {{ block.in_use }} of {{ block.total }} prompts in use</span></h3></figcaption>{{ block.chart }}</figure>
{% endfor %}
</div>
{{ heat.scale("0 %", "%.0f %%" | format(prompt_use.highest), "Purples") }}
</section>
{% endif %}
<section class="long">
<h2>Classes of each task</h2>
<table class="list tasks">
<thead><tr><th>Task</th><th class="n">When learned</th><th class="n">{{ "At the end" if m.done else "Now" }}</th>
<th class="n">Time</th><th>Classes</th></tr></thead>
<tbody>
{% for task in tasks %}
<tr><td data-name="Task">{{ task.number }}</td><td class="n" data-name="learned">{{ task.first | percent }}</td>
<td class="n" data-name="{{ "end" if m.done else "now" }}">{{ task.now | percent }}</td>
<td class="n">{{ task.seconds | duration }}</td>
<td class="names"><ul class="chips">{% for name in task.classes %}<li>{{ name }}</li>{% endfor %}</ul></td></tr>
{% endfor %}
</tbody>
</table>
</section>
<section class="long">
<h2>Settings</h2>
<dl>
{% for name, value in config.items() %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
{% for note in m.get("notes", []) %}<p class="note">{{ note }}</p>{% endfor %}
</section>
{% endblock %}
"""


COMPARISON = """{% extends "base" %}
{% import "heat" as heat %}
{% block title %}{{ heading }} on {{ data }}{% endblock %}
{% block head %}
<h1>{{ heading }} <small>on {{ data }}</small></h1>
<ul class="facts"><li>{{ runs | length }} run{{ "" if runs | length == 1 else "s" }} compared</li></ul>
{% endblock %}
{% block main %}
<section>
<h2>Results</h2>
<div class="scroll" role="region" aria-label="Results" tabindex="0">
<table class="list">
<thead><tr><th>Method</th><th class="n">FAA</th><th class="n">CAA</th><th class="n">Forgetting</th>
<th class="n">Seconds</th><th class="n">Prompting parameters</th></tr></thead>
<tbody>
{% for run in runs %}
<tr><td><span style="color:{{ run.line.color }}" aria-hidden="true">{{ run.line.glyph }}</span>
<a href="{{ run.link }}">{{ run.line.name }}</a>
{%- if not run.m.done %} (unfinished: {{ run.learned }} of {{ run.m.tasks | length }} tasks){% endif %}</td>
<td class="n{{ " best" if run.m.faa is not none and run.m.faa == best.faa }}">{{ run.m.faa | percent }}</td>
<td class="n{{ " best" if run.m.caa is not none and run.m.caa == best.caa }}">{{ run.m.caa | percent }}</td>
{% set forgetting = run.m.forgetting if run.m.tasks | length > 1 else none %}
<td class="n{{ " best" if forgetting is not none and forgetting == best.forgetting }}">{{ forgetting | fixed }}</td>
<td class="n">{{ run.m.seconds | fixed(1) }}</td>
<td class="n">{{ "{:,}".format(run.m.parameters.prompting) }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="note">FAA: average accuracy over all tasks after the last. CAA: mean of the averages after each task.
Forgetting: points that tasks fell from their best, on average.
{% if best.faa is not none %}The best of each is bold.{% endif %}</p>
</section>
<section class="alone">
<figure><figcaption><h2>Accuracy after each task</h2>
<p class="note">Average over the tasks seen so far.</p></figcaption>{{ heat.legend(runs | map(attribute="line")) }}
{{ chart }}</figure>
</section>
<section class="long">
<h2>Accuracy on each task, as learning goes on</h2>
<p class="note">Along a row, a task is remembered or forgotten; the diagonal is each task just learned.</p>
<div class="heats">
{% for run in runs %}
<div><h3><a href="{{ run.link }}">{{ run.line.name }}</a>
{% if several_data_sets %}<span>{{ run.m.data }}</span>{% endif %}</h3>
{{ heat.matrix(run.m, run.learned, compact=run.m.tasks | length > 12) }}</div>
{% endfor %}
</div>
{{ heat.scale("0 %", "100 %", "YlGnBu") }}
</section>
{% endblock %}
"""

"""The page people look at: one HTML file per run, and one that puts several runs side by side.

What is notable about this implementation:
- a page is complete: no script, no font, no image from elsewhere (its own security policy forbids them)
- every name on it passes through an escaping template (`templates/`); only figures go in as they are
- accuracy matrices are tables, not pictures: they can be read aloud, copied, and scrolled on a phone
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from vqprompt.core.files import write_atomically
from vqprompt.research.report import figures
from vqprompt.research.report.render import fixed, percent, render
from vqprompt.research.results.config import flatten, read_saved_config
from vqprompt.research.results.result import ClassResults, EpochLosses, PromptUse, RunResult

PAGE_NAME = "report.html"


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` from the run's metrics.json and config.json. The run may still be going on."""
    result = RunResult.read(folder)
    page = render(
        "run.html",
        m=result,
        figures=figures,
        charts=_accuracy_charts(result),
        loss_charts=_loss_charts(result.losses),
        prompt_use=_prompt_use(result.prompt_use),
        classes=ClassResults.read(folder),
        config=flatten(read_saved_config(folder)),
    )  # fmt: skip
    target = folder / PAGE_NAME
    write_atomically(target, page)
    return target


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write one page about finished runs of several methods on the same tasks. It links to the page of each."""
    results = [RunResult.read(folder) for folder in folders]
    lines = [figures.distinct_line(n, result.title, result.average_accuracy) for n, result in enumerate(results)]
    links = [link(folder / PAGE_NAME, target.parent) for folder in folders]
    title = "Average accuracy over the tasks seen so far, after each task: " + "; ".join(map(line_in_words, lines))
    page = render(
        "comparison.html",
        runs=[{"m": m, "line": line, "link": own} for m, line, own in zip(results, lines, links, strict=True)],
        heading=" · ".join(result.title for result in results),
        data=results[0].data,
        figures=figures,
        chart=Markup(figures.accuracy_chart(lines, "accuracy", title)),
    )  # fmt: skip
    write_atomically(target, page)
    return target


def link(page: Path, folder: Path) -> str:
    """To a page, from one in this folder."""
    return quote(Path(os.path.relpath(page, folder)).as_posix())


def line_in_words(line: figures.Line) -> str:
    """The values of a chart's line as text, for people who cannot see the chart."""
    return f"{line.name}: {', '.join(percent(v) for v in line.values)}"


def _accuracy_charts(result: RunResult) -> dict[str, Any]:
    """The curve over tasks, and the bars of forgetting. Before the second task, neither has anything to show."""
    if result.learned < 2:
        return {}
    average = figures.distinct_line(0, "average over the tasks seen so far", result.average_accuracy)
    diagonal = [result.accuracy[j][j] for j in range(result.learned)]
    latest = figures.Line("the task just learned", diagonal, figures.COLORS[3], "D", ":")
    before = [[a for row in result.accuracy[:j] if (a := row[j]) is not None] for j in range(result.learned)]
    means = [fmean(accuracies) if accuracies else None for accuracies in before]
    earlier = figures.Line("the tasks before it", means, figures.COLORS[1], "s")
    lines, drops = [average, latest, earlier], result.forgetting_per_task
    title = "Accuracy after each task: " + "; ".join(map(line_in_words, lines))
    accuracy = Markup(figures.accuracy_chart(lines, "accuracy", title))
    charts: dict[str, Any] = {"lines": lines, "accuracy": accuracy, "forgetting": None, "online": None}
    if drops:
        title = "Forgetting of each task, in points: " + ", ".join(map(fixed, drops))
        charts["forgetting"] = Markup(figures.forgetting_chart(drops, "forgetting", title))
    if result.curve:
        online = figures.distinct_line(0, "all classes so far", [accuracy for _, accuracy in result.curve])
        charts["online"] = Markup(figures.accuracy_chart([online], "online", line_in_words(online), "test"))
    return charts


def _loss_charts(epochs: Sequence[EpochLosses]) -> list[tuple[str, Markup]]:
    """One chart per loss term."""
    tasks = [epoch.task for epoch in epochs]
    charts = []
    for n, term in enumerate(dict.fromkeys(term for epoch in epochs for term in epoch.losses)):
        values = [epoch.losses.get(term) for epoch in epochs]
        first, last = (next((v for v in order if v is not None), None) for order in (values, reversed(values)))
        title = f"Loss “{term}” over {len(values)} epochs: from {fixed(first, 4)} to {fixed(last, 4)}"
        charts.append((term, Markup(figures.loss_chart(tasks, values, f"loss{n}", title))))
    return charts


def _prompt_use(use: PromptUse | None) -> dict[str, Any] | None:
    if use is None or not use.counts:
        return None
    shares = [[[n / max(sum(counts), 1) for n in counts] for counts in task] for task in use.counts]
    highest = max(share for task in shares for block in task for share in block)
    blocks = []
    for b, block in enumerate(use.blocks):
        of_tasks = [task[b] for task in shares]
        total = len(of_tasks[0])
        in_use = sum(any(task[n] > 0 for task in of_tasks) for n in range(total))
        title = f"Block {block}: {in_use} of {total} prompts in use; by task, from the first: " + ", ".join(
            str(sum(share > 0 for share in task)) for task in of_tasks
        )
        chart = Markup(figures.prompt_use_chart(of_tasks, highest or 1, f"use{b}", title))
        blocks.append({"block": block, "in_use": in_use, "total": total, "chart": chart})
    return {"blocks": blocks, "highest": 100 * highest}

"""A test's results: a page for readers who know nothing about machine learning, and tables for spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.files import write_atomically
from vqprompt.core.metrics import wilson
from vqprompt.core.words import counted
from vqprompt.product.evaluation.measure import Evaluation, PerClass, Share
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.research.report.render import render, thumbnails

PAIRS, EXAMPLES, WORST = 12, 3, 24
FORMULA = re.compile(r"[=@]|[+-](?![\d.]+$)")  # how text starts that spreadsheets take for a formula


def write_page(result: Evaluation, target: Path, model: str, source: str, held_out: float | None) -> Path:
    """held_out: the accuracy that the model measured when it was taught; None if it did not."""
    counts = result.confusion
    shown = (counts.sum(0) > 0) | np.append(counts.sum(1) > 0, False)
    page = render(
        "test.html", result=result, model=model, source=source, held_out=held_out, headline=_headline(result),
        share=_share, interval=_interval, wilson=wilson, picture=thumbnails(result.opened), pairs=_pairs(result),
        worst=result.mistakes()[:WORST], weakest=sorted(result.per_class, key=_weakness),
        names=[*result.classes, UNKNOWN], rows=np.flatnonzero(counts.sum(1)).tolist(),
        columns=np.flatnonzero(shown).tolist(),
    )  # fmt: skip
    write_atomically(target, page)
    return target


def _headline(result: Evaluation) -> str:
    """The result in a few sentences."""
    weak = [c for c in result.per_class if c.recall.value is not None and c.recall.value < 0.7]
    text = f"The answer was right for {result.accuracy.hits} of {counted(result.accuracy.total, 'image')}."
    if unknown := result.called_unknown.hits:
        text += f" {unknown} were called unknown; without this answer, {result.without_unknown.hits} were right."
    balanced, plain = result.balanced_accuracy, result.accuracy.value
    if balanced is not None and plain is not None and plain - balanced > 0.02:
        text += f" Large classes make this look better: if every class counts the same, it is {balanced:.1%}."
    if weak:
        worst = min(weak, key=_weakness)
        text += (
            f" {counted(len(weak), 'class')} {'is' if len(weak) == 1 else 'are'} recognized less than 7 times in 10; "
            f"of {worst.name}, {worst.recall.total - worst.recall.hits} of {worst.recall.total} were missed."
        )
    return text


def _weakness(c: PerClass) -> tuple[bool, float, str]:
    return c.recall.value is None, c.recall.value or 0.0, c.name


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def _interval(share: Share) -> str:
    low, high = share.interval
    return f"{100 * low:.0f}–{100 * high:.0f}" if share.total else "–"


def _pairs(result: Evaluation) -> list[dict[str, Any]]:
    """Classes that are mixed up, with images: some that were taken for the other class, and some of that class."""
    totals = {c.name: c.recall.total for c in result.per_class}
    return [
        {
            "label": label, "answer": answer, "times": times, "total": totals[label],
            "wrong": [a for a in result.images if a.label == label and a.answer == answer][:EXAMPLES],
            "right": [a for a in result.images if a.label == answer and a.right][:EXAMPLES],
        }
        for label, answer, times in result.confused_pairs()[:PAIRS]
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- tables


def images_csv(evaluation: Evaluation) -> str:
    """One line per image."""
    rows = [
        (a.where, a.label, a.answer, a.best, f"{a.probability:.6f}", f"{a.familiarity:.6f}", int(a.right))
        for a in (*evaluation.images, *evaluation.others)
    ]
    return _csv(("image", "class", "answer", "most_likely", "probability", "familiarity", "right"), rows)


def classes_csv(evaluation: Evaluation) -> str:
    """One line per class."""
    rows = []
    for c in evaluation.per_class:
        numbers = [c.recall.total, c.recall.hits, c.recall.value, *c.recall.interval]
        numbers += [c.precision.total, c.precision.value, *c.precision.interval]
        rows.append((c.name, *("" if n is None else f"{n:.6f}" if isinstance(n, float) else n for n in numbers)))
    heads = ("class", "images", "right", "recall", "recall_low", "recall_high", "named_so", "precision")
    return _csv((*heads, "precision_low", "precision_high"), rows)


def _csv(heads: tuple[str, ...], rows: list[Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(
        [f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell for cell in row] for row in rows
    )
    return text.getvalue()

"""The page of a test, for readers who know nothing about machine learning.

The matrix and the diagram are SVG. With 200 classes the matrix has 40,000 cells, and only those with an image in them
are drawn. Zooming works without scripts, with radio buttons and CSS.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vqprompt.core.files import write_atomically
from vqprompt.core.words import counted
from vqprompt.product.evaluation.measure import Evaluation, Share
from vqprompt.product.model.pictures import UNKNOWN
from vqprompt.research.report.render import render, thumbnail

PAIRS, EXAMPLES, WORST = 12, 3, 24
LONGEST = 28  # characters of a class name beside the matrix


def write_page(result: Evaluation, target: Path, model: str, source: str, held_out: float | None) -> Path:
    """held_out: the accuracy that the model measured when it was taught; None if it did not."""
    page = render(
        "test.html", found=result, model=model, source=source, held_out=held_out, headline=_headline(result),
        share=_share, interval=_interval, pairs=_pairs(result), worst=_worst(result), matrix=Markup(_matrix(result)),
        diagram=Markup(_diagram(result)), weakest=sorted(result.per_class, key=_weakness), unknown_word=UNKNOWN,
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    return target


def _headline(result: Evaluation) -> str:
    """The result in a few sentences."""
    weak = [c for c in result.per_class if c.recall.value is not None and c.recall.value < 0.7]
    text = f"The answer was right for {result.accuracy.hits} of {counted(result.accuracy.total, 'image')}."
    balanced, plain = result.balanced_accuracy, result.accuracy.value
    if balanced is not None and plain is not None and plain - balanced > 0.02:
        text += f" Large classes make this look better: if every class counts the same, it is {balanced:.1%}."
    if weak:
        worst = min(weak, key=lambda c: (c.recall.value, c.name))
        text += (
            f" {counted(len(weak), 'class')} {'is' if len(weak) == 1 else 'are'} recognized less than 7 times in 10; "
            f"of {worst.name}, {worst.recall.total - worst.recall.hits} of {worst.recall.total} were missed."
        )
    return text


def _weakness(c: Any) -> tuple[bool, float, str]:
    return c.recall.value is None, c.recall.value or 0.0, c.name


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def _interval(share: Share) -> str:
    low, high = share.interval
    return f"{100 * low:.0f}–{100 * high:.0f}" if share.total else "–"


def _pairs(result: Evaluation) -> list[dict[str, Any]]:
    pairs = []
    for label, answer, times in result.confused_pairs()[:PAIRS]:
        wrong = [a for a in result.images if a.label == label and a.answer == answer][:EXAMPLES]
        right = [a for a in result.images if a.label == answer and a.right][:EXAMPLES]
        pictures = [
            [(a.where, thumbnail(result.opened.get(a.where), a.where)) for a in part] for part in (wrong, right)
        ]
        total = next(c.recall.total for c in result.per_class if c.name == label)
        pairs.append({"label": label, "answer": answer, "times": times, "total": total, "wrong": pictures[0],
                      "right": pictures[1]})  # fmt: skip
    return pairs


def _worst(result: Evaluation) -> list[dict[str, Any]]:
    return [{"m": m, "picture": thumbnail(result.opened.get(m.where), m.where)} for m in result.mistakes()[:WORST]]


def _matrix(result: Evaluation) -> str:
    """Rows: the class of the images. Columns: what the model says; the last one is unknown."""
    tested = [c for c in range(len(result.classes)) if result.confusion[c].sum()]
    columns = [c for c in range(len(result.classes) + 1) if c in set(tested) or result.confusion[:, c].sum()]
    names = [*result.classes, UNKNOWN]
    cell, left = 12, 150
    width, height = left + cell * len(columns), left + cell * len(tested)
    shapes = []
    for y, row in enumerate(tested):
        total = result.confusion[row].sum()
        shapes.append(_label(left - 4, left + (y + 0.75) * cell, names[row], "end"))
        for x, column in enumerate(columns):
            count = int(result.confusion[row, column])
            if not count:
                continue
            strength = 0.15 + 0.85 * count / total
            color = "var(--accent)" if row == column else "#8a8f98" if column == len(result.classes) else "var(--wrong)"
            hint = f"{names[row]}: {count} of {total} named {names[column]}"
            shapes.append(
                f'<rect x="{left + x * cell}" y="{left + y * cell}" width="{cell - 1}" height="{cell - 1}" '
                f'fill="{color}" fill-opacity="{strength:.2f}"><title>{escape(hint)}</title></rect>'
            )
    for x, column in enumerate(columns):
        shapes.append(_label(left + (x + 0.75) * cell, left - 4, names[column], "start", turned=True))
    title = f"Confusion matrix of {counted(len(tested), 'class')}"
    return (
        f'<svg class="themed" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        f'style="--whole:{width}px">{"".join(shapes)}</svg>'
    )


def _label(x: float, y: float, name: str, anchor: str, turned: bool = False) -> str:
    short = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="8" text-anchor="{anchor}"{turn}>{escape(short)}</text>'


def _diagram(result: Evaluation) -> str:
    """Reliability: how sure the model was, and how often it was right."""
    side, pad = 300, 36
    most = max((n for n, _, _ in result.reliability), default=1) or 1
    shapes = [
        f'<line x1="{pad}" y1="{pad + side}" x2="{pad + side}" y2="{pad}" stroke="#8a8f98" stroke-dasharray="4 4"/>',
        f'<rect x="{pad}" y="{pad}" width="{side}" height="{side}" fill="none" stroke="currentColor" opacity=".25"/>',
    ]
    for b, (count, sure, right) in enumerate(result.reliability):
        if not count:
            continue
        step = side / len(result.reliability)
        x, tall = pad + b * step, right * side
        low, high = Share(round(right * count), count).interval
        hint = f"{counted(count, 'answer')} given with {sure:.0%} on average; {right:.0%} right"
        middle, shade = x + step / 2, 0.25 + 0.75 * float(np.sqrt(count / most))
        shapes.append(
            f'<rect x="{x + 2:.1f}" y="{pad + side - tall:.1f}" width="{step - 4:.1f}" height="{tall:.1f}" '
            f'fill="var(--accent)" fill-opacity="{shade:.2f}"><title>{escape(hint)}</title></rect>'
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{pad + side * (1 - low):.1f}" '
            f'y2="{pad + side * (1 - high):.1f}" stroke="currentColor"/>'
        )
    shapes += [
        f'<text x="{pad + side / 2}" y="{pad + side + 28}" font-size="12" text-anchor="middle">how sure it was</text>',
        f'<text x="14" y="{pad + side / 2}" font-size="12" text-anchor="middle" '
        f'transform="rotate(-90 14 {pad + side / 2})">how often it was right</text>',
    ]
    for tick in (0, 50, 100):
        at = side * tick / 100
        shapes.append(f'<text x="{pad + at}" y="{pad + side + 13}" font-size="10" text-anchor="middle">{tick} %</text>')
        shapes.append(f'<text x="{pad - 3}" y="{pad + side - at + 3}" font-size="10" text-anchor="end">{tick}</text>')
    box = f"0 0 {side + 2 * pad} {side + 2 * pad}"
    return f'<svg class="themed" viewBox="{box}" role="img" aria-label="Reliability">{"".join(shapes)}</svg>'

"""A test's results for spreadsheets: CSV by image and by class."""

from __future__ import annotations

import csv
import io
from typing import Any

from vqprompt.product.evaluation.measure import Evaluation


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
    writer.writerows([_harmless(cell) for cell in row] for row in rows)
    return text.getvalue()


def _harmless(cell: Any) -> Any:
    """A cell that spreadsheets do not take for a formula: text that starts like one gets an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@" and not _number(cell) else cell


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

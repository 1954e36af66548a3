"""Tables of text cells as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vqprompt.core.files import write_atomically

Cells = Sequence[str]

TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "×": r"$\times$",
    "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"$^\S$", "Δ": r"$\Delta$", "τ": r"$\tau$", "λ": r"$\lambda$",
}  # fmt: skip


def markdown(title: str, headings: Cells, rows: Sequence[Cells], notes: Sequence[str]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"### {title}\n\n{table}\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"


def comma_separated(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def latex(title: str, headings: Cells, rows: Sequence[Cells], notes: Sequence[str], columns: str) -> str:
    """columns: LaTeX's letters for the alignment of each column."""
    lines = [" & ".join(map(escape_tex, line)) + r" \\" for line in (headings, *rows)]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    below = r" \\ ".join(map(escape_tex, notes))
    return (
        "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
        f"\\caption{{{escape_tex(title)}}}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n"
        f"\\end{{tabular}}\n\n\\footnotesize {below}\n\\end{{table}}\n"
    )


def write_files(texts: dict[Path, str]) -> list[Path]:
    """Write texts to their paths."""
    for path, text in texts.items():
        write_atomically(path, text)
    return list(texts)


def escape_tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)

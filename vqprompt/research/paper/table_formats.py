"""A table of text cells as Markdown, CSV, LaTeX and a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.core.files import write_atomically

TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "×": r"$\times$",
    "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"$^\S$", "Δ": r"$\Delta$", "τ": r"$\tau$", "λ": r"$\lambda$",
}  # fmt: skip


@dataclass(frozen=True)
class TextTable:
    """The same cells in every format. alignment: LaTeX's letter for each column. numbers: headings and rows for CSV,
    with one column per number, not rounded."""

    name: str  # of its files
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    alignment: str
    numbers: Sequence[Sequence[Any]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n\n" + "\n".join(f"- {note}" for note in self.notes) + "\n"

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.numbers)
        return text.getvalue()

    def latex(self) -> str:
        lines = [" & ".join(map(escape_tex, line)) + r" \\" for line in (self.headings, *self.rows)]
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        below = r" \\ ".join(map(escape_tex, self.notes))
        return (
            "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
            f"\\caption{{{escape_tex(self.title)}}}\n\\begin{{tabular}}{{{self.alignment}}}\n\\toprule\n{body}\n"
            f"\\bottomrule\n\\end{{tabular}}\n\n\\footnotesize {below}\n\\end{{table}}\n"
        )

    def write(self, folder: Path, page: str) -> list[Path]:
        """Write NAME.md, .csv, .tex and .html into the folder. page: the table as HTML."""
        texts = {"md": self.markdown(), "csv": self.csv(), "tex": self.latex(), "html": page}
        for kind, text in texts.items():
            write_atomically(folder / f"{self.name}.{kind}", text)
        return [folder / f"{self.name}.{kind}" for kind in texts]


def escape_tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)

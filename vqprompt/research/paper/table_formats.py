"""A table of text cells as Markdown, CSV, LaTeX and a page with figures. All tables are written this way."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from vqprompt.core.files import write_atomically
from vqprompt.research.report import figures
from vqprompt.research.report.pages import PAGE_NAME, line_in_words
from vqprompt.research.report.render import render

NONE = "–"
TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "×": r"$\times$",
    "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"$^\S$", "Δ": r"$\Delta$", "τ": r"$\tau$", "λ": r"$\lambda$",
}  # fmt: skip


class Chart(NamedTuple):
    name: str  # of its file
    caption: str
    svg: str
    lines: Sequence[figures.Line]


def in_words(caption: str, lines: Sequence[figures.Line]) -> str:
    """A chart's caption and values as text, for people who cannot see the chart."""
    return f"{caption}: " + "; ".join(map(line_in_words, lines))


def link(run: Path | None, page: Path) -> str | None:
    """To the page of a run, relative to the folder of another page; None if there is none."""
    if run is None or not (run / PAGE_NAME).exists():
        return None
    return quote(Path(os.path.relpath(run / PAGE_NAME, page)).as_posix())


@dataclass(frozen=True)
class TextTable:
    """The same cells in every format. columns: cells by heading. text: headings of columns that hold no numbers.
    numbers: rows for CSV by column, not rounded. runs: per row, the folders of its runs by seed, to which seeds
    link on the page. source: where the paper has it. warning: on top of the page."""

    name: str  # of its files
    title: str
    columns: Mapping[str, Sequence[str]]
    notes: Sequence[str]
    text: Collection[str]
    numbers: Sequence[Mapping[str, Any]]
    charts: Sequence[Chart] = ()
    runs: Sequence[Mapping[int, Path | None]] = ()
    source: str = ""
    warning: str = ""

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*self.columns.values(), strict=True))

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n\n" + "\n".join(f"- {note}" for note in self.notes) + "\n"

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.numbers[0]) if self.numbers else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.numbers)
        return text.getvalue()

    def latex(self) -> str:
        lines = [" & ".join(map(escape_tex, line)) + r" \\" for line in (self.columns, *self.rows)]
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        alignment = "".join("l" if heading in self.text else "r" for heading in self.columns)
        below = r" \\ ".join(map(escape_tex, self.notes))
        return (
            "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
            f"\\caption{{{escape_tex(self.title)}}}\n\\begin{{tabular}}{{{alignment}}}\n\\toprule\n{body}\n"
            f"\\bottomrule\n\\end{{tabular}}\n\n\\footnotesize {below}\n\\end{{table}}\n"
        )

    def html(self, folder: Path) -> str:
        """folder: where the page will be written; links to the runs' own pages are relative to it."""
        return render("table.html", table=self, svg=Markup, link=lambda run: link(run, folder))

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.md, .csv, .tex and .html into the folder, and the figures as .svg."""
        texts = {f"{self.name}.md": self.markdown(), f"{self.name}.csv": self.csv(), f"{self.name}.tex": self.latex()}
        texts[f"{self.name}.html"] = self.html(folder)
        texts |= {f"{chart.name}.svg": figures.standalone(chart.svg, chart.lines) for chart in self.charts}
        for name, text in texts.items():
            write_atomically(folder / name, text)
        return [folder / name for name in texts]


def escape_tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)

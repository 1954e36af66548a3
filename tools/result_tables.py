"""Make the tables and figures of docs/reproducing.md from the files in results/.

    python tools/result_tables.py

A table stands between `<!-- bench table NAME --results FILE -->`, as on the command line, and `<!-- end -->`; its
figures go to docs/figures. With several names, it is a summary.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from vqprompt.research.paper.grids import find_grid
from vqprompt.research.paper.table_rows import find_rows
from vqprompt.research.paper.tables import make_charts, make_table, summarize, table_labels
from vqprompt.research.report.figures import standalone

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproducing.md"
BLOCK = re.compile(r"(<!-- bench table (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def asked(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--results", action="append", type=Path)
    parser.add_argument("--methods", default="")
    return parser.parse_args(command.split())


def fill(page: str) -> str:
    """The page, with every table made from the results again."""

    def table(block: re.Match[str]) -> str:
        start, command, end = block.groups()
        names, sources, methods = (getattr(asked(command), key) for key in ("names", "results", "methods"))
        grids, chosen = [find_grid(name) for name in names], list(filter(None, methods.split(",")))
        rows = [find_rows(grid, ROOT / source, False, chosen) for grid, source in zip(grids, sources, strict=True)]
        labels = table_labels(names, sources)
        made = make_table(grids[0], rows[0]) if len(grids) == 1 else summarize(dict(zip(labels, rows, strict=True)))
        _, text = made.markdown().split("\n\n", 1)
        return f"{start}\n{text}\n{end}"

    return BLOCK.sub(table, page)


def draw(page: str) -> dict[str, str]:
    """The figures that the page shows, by file name."""
    drawn = {}
    for command in (asked(command) for _, command, _ in BLOCK.findall(page)):
        for name, source in zip(command.names, command.results, strict=True):
            grid = find_grid(name)
            for chart in make_charts(grid, find_rows(grid, ROOT / source, from_bench=False)):
                if f"figures/{chart.name}.svg" in page:
                    drawn.setdefault(f"{chart.name}.svg", standalone(chart.svg, chart.lines))
    return drawn


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, svg in draw(PAGE.read_text(encoding="utf-8")).items():
        (ROOT / "docs" / "figures" / name).write_text(svg, encoding="utf-8")
        print(f"docs/figures/{name}")

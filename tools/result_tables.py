"""Make the tables and figures of docs/reproducing.md from the files in results/.

    python tools/result_tables.py

A table stands between `<!-- bench table NAME --results FILE -->` and `<!-- end -->`; its figures go to docs/figures.
"""

from __future__ import annotations

import re
from pathlib import Path

from vqprompt.research.paper.grids import find_grid
from vqprompt.research.paper.table_rows import find_rows
from vqprompt.research.paper.tables import make_charts, make_table
from vqprompt.research.report.figures import standalone

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproducing.md"
BLOCK = re.compile(r"(<!-- bench table (\S+) --results (\S+)(?: --methods (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page, with every table made from the results again."""

    def table(block: re.Match[str]) -> str:
        start, name, source, methods, end = block.groups()
        grid = find_grid(name)
        rows = find_rows(grid, ROOT / source, False, methods.split(",") if methods else ())
        _, text = make_table(grid, rows).markdown().split("\n\n", 1)
        return f"{start}\n{text}\n{end}"

    return BLOCK.sub(table, page)


def draw(page: str) -> dict[str, str]:
    """The figures that the page shows, by file name."""
    drawn = {}
    for _, name, source, _, _ in BLOCK.findall(page):
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

"""Fills in the list of modules of docs/architecture.md: every module with the first sentence of its docstring.

python tools/architecture_table.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "vqprompt"
BLOCK = re.compile(r"(<!-- modules -->\n).*?(<!-- end -->)", re.DOTALL)


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<!al\.)(?<=[.!?])\s", text)[0]


def listing() -> str:
    """A heading per folder, then a line per module."""
    lines: list[str] = []
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        modules = sorted(path for path in folder.glob("*.py") if path.name not in ("__init__.py", "_version.py"))
        if folder == PACKAGE or not (modules or first_sentence(folder / "__init__.py")):
            continue
        name, room = folder.relative_to(PACKAGE).as_posix(), folder.parent == PACKAGE
        about = first_sentence(folder / "__init__.py")
        lines += ["", f"{'###' if room else '####'} `{name}/`", *(["", about] if about else []), ""]
        lines += [f"- `{path.relative_to(PACKAGE).as_posix()}`: {first_sentence(path)}" for path in modules]
    return "\n".join(lines).strip() + "\n"


def fill(page: str) -> str:
    return BLOCK.sub(lambda found: found[1] + listing() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

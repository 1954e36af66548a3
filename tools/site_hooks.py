"""Pages of the docs site that are kept elsewhere: the README is the site's first page, and so on.

Links from these pages into docs/ are links within the site. Links from docs/ to files that are not pages (results,
code) are shown as plain text, because the site does not contain these files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}  # fmt: skip
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def within_site(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, hash_sign, anchor = target.partition("#")
        name = path.removeprefix("../")
        if name in PAGES:
            return f"[{text}]({PAGES[name]}{hash_sign}{anchor})"
        inside = not path or path.startswith("http") or files.get_file_from_path(path) is not None
        return link[0] if inside else f"{text} (`{name}`)"

    return LINK.sub(within_site, markdown)

"""The page of a check: thumbnails of doubtful images, the most doubtful first, beside what they are compared with."""

from __future__ import annotations

from pathlib import Path

from vqprompt.core.files import write_atomically
from vqprompt.product.check.findings import CheckResult
from vqprompt.research.report.render import render, thumbnail

MOST = 300  # findings with pictures


def write_page(found: CheckResult, target: Path, source: str, listed: Path) -> Path:
    """listed: where the list for `learn --exclude` is."""
    items = [
        {"f": f, "picture": thumbnail(found.opened.get(f.where), f.where),
         "other": thumbnail(found.opened.get(f.other), f.other) if f.other else None}
        for f in found.findings[:MOST]
    ]  # fmt: skip
    page = render(
        "check.html", found=found, items=items, source=source, listed=str(listed), doubtful=found.doubtful,
        more=max(0, len(found.findings) - MOST),
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    return target


def write_list(found: CheckResult, target: Path) -> Path:
    """The list that `vqprompt learn --exclude` takes."""
    reasons = {f.where: f"{f.kind}: {f.says}" for f in reversed(found.findings) if f.leave_out}
    lines = [
        "# Images that `vqprompt learn --exclude` leaves out, most doubtful first. Nothing was moved or deleted.",
        "# Delete the lines of images that are right.",
    ]
    for where in found.left_out:
        reason = " ".join(reasons[where].split())
        lines += ["", f"# {reason}", where]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, "\n".join(lines) + "\n")
    return target

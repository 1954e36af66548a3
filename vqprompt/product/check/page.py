"""The page of a check: thumbnails of doubtful images, the most doubtful first, beside what they are compared with."""

from __future__ import annotations

from pathlib import Path

from vqprompt.core.files import write_atomically
from vqprompt.product.check.findings import CheckResult
from vqprompt.research.report.render import render, thumbnails

MOST = 300  # findings with pictures


def write_page(report: CheckResult, target: Path, source: str, listed: Path) -> Path:
    """listed: where the list for `learn --exclude` is."""
    pictures = thumbnails(report.opened)
    page = render("check.html", found=report, picture=pictures, source=source, listed=listed, most=MOST)
    write_atomically(target, page)
    return target


def write_list(report: CheckResult, target: Path) -> Path:
    """The list that `vqprompt learn --exclude` takes."""
    reasons = {f.where: f"{f.kind}: {f.says}" for f in reversed(report.findings) if f.leave_out}
    lines = [
        "# Images that `vqprompt learn --exclude` leaves out, most doubtful first. Nothing was moved or deleted.",
        "# Delete the lines of images that are right.",
    ]
    for where in report.left_out:
        reason = " ".join(reasons[where].split())
        lines += ["", f"# {reason}", where]
    write_atomically(target, "\n".join(lines) + "\n")
    return target

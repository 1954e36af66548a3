"""What a check finds, for people and for programs: a result, a page with pictures, and a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vqprompt.core.files import write_atomically
from vqprompt.research.report.render import render, thumbnails

MOST = 300  # findings with pictures on the page


class Kind(StrEnum):
    """What is wrong with an image; the value is what people read."""

    UNREADABLE = "cannot be read"
    SAME_TWO_CLASSES = "the same picture in two classes"
    SAME_TEST = "also in the test folder"
    SAME = "an exact copy"
    NEAR_TWO_CLASSES = "nearly the same picture in two classes"
    NEAR_TEST = "nearly the same picture in the test folder"
    NEAR = "nearly the same picture"
    LABEL = "looks like another class"
    BLANK = "shows nothing"
    DARK = "too dark"
    BRIGHT = "over-exposed"
    BLURRED = "blurred"
    FOREIGN = "of another kind than the other images"
    UNLIKE = "unlike its class"
    TINY = "tiny"


@dataclass(frozen=True)
class Finding:
    """One doubtful image. doubt: from 0 to 1. says: the reason in words. other: the image it is compared with.
    likelier: a class that fits better. leave_out: whether the list for `learn --exclude` names it; of several copies,
    it names all except one."""

    where: str
    label: str
    kind: Kind
    doubt: float
    says: str
    other: str | None = None
    likelier: str | None = None
    leave_out: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "image": self.where, "class": self.label, "kind": self.kind.name.lower(), "title": str(self.kind),
            "says": self.says, "doubt": self.doubt, "leave_out": self.leave_out, "likelier": self.likelier,
            "other": self.other,
        }  # fmt: skip


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. classes: how many images each has. alike: pairs of classes, with the share of their images
    that are taken for the other. few: classes with few images, and how many they have. opened: functions that read an
    image, by its path."""

    images: int
    classes: dict[str, int]
    findings: tuple[Finding, ...]
    alike: tuple[tuple[str, str, float], ...]
    few: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    seconds: float
    opened: dict[str, Callable[[], Any]] = field(default_factory=dict, repr=False)

    @property
    def left_out(self) -> list[str]:
        """Images that `learn --exclude` should leave out, most doubtful first, each once."""
        return list(dict.fromkeys(f.where for f in self.findings if f.leave_out))

    @property
    def doubtful(self) -> int:
        """The number of doubtful images."""
        return len({f.where for f in self.findings})

    def counts(self) -> dict[Kind, int]:
        return dict(Counter(f.kind for f in self.findings))

    def to_json(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "classes": self.classes,
            "doubtful": self.doubtful,
            "findings": [finding.to_json() for finding in self.findings],
            "alike": [{"classes": [one, other], "share": share} for one, other, share in self.alike],
            "few": [{"class": name, "images": count} for name, count in self.few],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
        }


def write_page(report: CheckResult, target: Path, source: str, listed: Path) -> Path:
    """Thumbnails of doubtful images, the most doubtful first, beside what they are compared with. listed: where the
    list for `learn --exclude` is."""
    pictures = thumbnails(report.opened)
    page = render("check.html", report=report, picture=pictures, source=source, listed=listed, most=MOST)
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

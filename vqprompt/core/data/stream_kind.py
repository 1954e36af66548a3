"""The kind of a stream, as one short text, such as `blurry:50,10` or `domains+online:200` (docs/research.md).

disjoint          every class in one task
domains           one task per domain: the same classes again, in another style
blurry:D,B        D % of the classes stay in one task; of the others, B % of the images come in other tasks (Si-Blurry)
repeated:R        R % of the images of each class come in later tasks
few-shot:N,W,S    a first task of N classes, then tasks of W classes with S images each
FILE.json         a list of tasks, each a list of images: [["crow/1.jpg", "owl/7.jpg"], ["crow/2.jpg"]]
KIND+online:N     any of these, shown once in pieces of N images, each followed by a test; `online:N`: disjoint ones
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vqprompt.core.errors import UserError, shown

PERCENT, COUNT = r"(?:100|[1-9]?\d)", r"[1-9]\d{0,8}"
FORMS = re.compile(
    rf"(disjoint|domains|(?:blurry:{PERCENT},|repeated:){PERCENT}|few-shot:{COUNT},{COUNT},{COUNT}|.+\.json)?"
    rf"(?:(?:^|\+)online:({COUNT}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class StreamKind:
    """name: disjoint, domains, blurry, repeated, few-shot or file. piece: images between two tests of an online stream;
    0: it is not online."""

    name: str
    numbers: tuple[int, ...]
    file: str
    piece: int

    @classmethod
    def parse(cls, text: str) -> StreamKind:
        """Raises UserError for what is no kind of stream."""
        if not text or not (found := FORMS.fullmatch(text)):
            raise UserError(
                f"--stream {shown(text)}: no such kind; there are disjoint, domains, blurry:50,10 and repeated:30 (in "
                "percent), few-shot:30,5,5 (classes, then ways and shots), FILE.json and, alone or after +, online:100"
            )
        kind = "file" if (found[1] or "").endswith(".json") else found[1] or "disjoint"
        name, _, numbers = kind.partition(":")
        return cls(name, tuple(map(int, re.findall(r"\d+", numbers))), found[1] or "", int(found[2] or 0))

    @property
    def returns(self) -> bool:
        """Whether classes come back in later tasks, or may (a file)."""
        return self.name in ("domains", "blurry", "repeated", "file") or self.piece > 0

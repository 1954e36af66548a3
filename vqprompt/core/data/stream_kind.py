"""Which kind of stream a data set becomes, as one short text: `blurry:50,10`, `few-shot:30,5,5`, `domains+online:200`.

| text | tasks |
| --- | --- |
| `disjoint` | every class in one task |
| `domains` | one task per domain: the same classes again, in another style |
| `blurry:D,B` | D % of the classes stay in one task; of the others, B % of the images come in other tasks (Si-Blurry) |
| `repeated:R` | R % of the images of each class come in later tasks |
| `few-shot:N,W,S` | a first task of N classes, then tasks of W classes with S images each |
| `FILE.json` | a list of tasks, each a list of images: `[["crow/1.jpg", "owl/7.jpg"], ["crow/2.jpg"]]` |

`+online:N` after any of them: images are shown once, in pieces of N, and every piece is followed by a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vqprompt.core.errors import UserError, shown
from vqprompt.core.words import did_you_mean

NUMBERS = {"disjoint": 0, "domains": 0, "blurry": 2, "repeated": 1, "few-shot": 3}  # how many each kind has
FILE, PERCENT = "file", ("blurry", "repeated")
PIECE = 100  # images between two tests of an online stream, if it does not say


@dataclass(frozen=True)
class StreamKind:
    """name: one of NUMBERS, or FILE. piece: images between two tests of an online stream; 0: it is not online."""

    name: str = "disjoint"
    numbers: tuple[int, ...] = ()
    file: Path = Path()
    piece: int = 0

    @classmethod
    def parse(cls, text: str) -> StreamKind:
        """Raises UserError for what is no kind of stream."""
        kind, plus, online = text.partition("+")
        if not plus and re.match(r"online\b", text):
            kind, plus, online = "disjoint", "+", text
        if plus and not (found := re.fullmatch(r"online(?::([1-9]\d{0,8}))?", online)):
            raise UserError(
                f"--stream {shown(text)}: after + comes online or online:N, with N images between two tests"
            )
        piece = int(found[1] or PIECE) if plus and found else 0
        if kind.endswith(".json"):
            if not Path(kind).is_file():
                raise UserError(f"--stream {shown(text)}: {kind} is no file; give a JSON file with the images per task")
            return cls(FILE, (), Path(kind), piece)
        name, _, given = kind.partition(":")
        if name not in NUMBERS:
            hint = did_you_mean(name, [*NUMBERS, "online", "FILE.json"])
            raise UserError(f"--stream {shown(text)}: no such kind of stream; {hint}")
        numbers = tuple(int(n) for n in re.findall(r"(?a:\d{1,9})", given))
        least, most = (0, 100) if name in PERCENT else (1, 10**9)
        fine = len(numbers) == NUMBERS[name] and all(least <= n <= most for n in numbers)
        if not fine or given != ",".join(map(str, numbers)):
            example = {"blurry": "blurry:50,10", "repeated": "repeated:30", "few-shot": "few-shot:30,5,5"}.get(
                name, name
            )
            percent = ", in percent" if name in PERCENT else ""
            raise UserError(f"--stream {shown(text)}: give it as in {example}{percent}")
        return cls(name, numbers, piece=piece)

    @property
    def returns(self) -> bool:
        """Whether classes come back in later tasks. Of a file, only its content tells."""
        return self.name in ("domains", *PERCENT) or self.piece > 0

    @property
    def own_tasks(self) -> bool:
        """Whether it decides how many tasks there are for a learner, not the setting `tasks`."""
        return self.name in ("domains", "few-shot", FILE) or self.piece > 0

"""`vqprompt` that kills itself at a moment of a run, so that the moment is met on slow machines as on fast ones:

python tests/killed.py MOMENT FOLDER run --out FOLDER …
"""

import json
import os
import signal
import sys
from pathlib import Path

from vqprompt.commands.app import main


def checkpoint_of(folder: Path) -> dict:
    path = folder / "checkpoint.json"
    return json.loads(path.read_text()) if path.exists() else {"tasks": [], "unfinished": None}


MOMENTS = {
    "begun, nothing saved yet": lambda folder: (folder / "config.json").exists(),
    "in the middle of the first task": lambda folder: checkpoint_of(folder)["unfinished"] is not None,
    "between tasks": lambda folder: (folder / "metrics.json").exists(),
    "while a checkpoint is being written": lambda folder: any(folder.glob(".*.partial")),
    "late in the last task": lambda folder: (
        (c := checkpoint_of(folder))["unfinished"] and (len(c["tasks"]), c["unfinished"]["epoch"]) == (2, 2)
    ),
}


def die_at(moment: str, folder: Path) -> None:
    """SIGKILL this process at a moment. Each of them is just before or just after a file gets its name."""
    plain, reached = os.replace, MOMENTS[moment]

    def replace(source, target):
        for step in (lambda: None, lambda: plain(source, target)):
            step()
            if reached(folder):
                os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace


if __name__ == "__main__":
    die_at(sys.argv[1], Path(sys.argv[2]))
    sys.argv[:3] = ["vqprompt"]
    main()

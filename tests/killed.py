"""A run that is killed at one moment after another, then goes on to its end:

python tests/killed.py MOMENT;MOMENT;… run --out FOLDER …

Each time, a process kills itself with SIGKILL, so that the moment is met on slow machines as on fast ones. They are
forked from one process, because importing PyTorch takes seconds.
"""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  # the first optimizer would import it

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


def run(arguments: list[str], moment: str | None) -> None:
    if moment is not None:
        die_at(moment, Path(arguments[arguments.index("--out") + 1]))
    sys.argv = ["vqprompt", *arguments]
    main()


def work(moments: list[str], arguments: list[str]) -> None:
    for moment in (*moments, None):
        child = multiprocessing.get_context("fork").Process(target=run, args=(arguments, moment))
        child.start()
        child.join()
        assert child.exitcode == (0 if moment is None else -signal.SIGKILL), f"{moment or 'at last'}: {child.exitcode}"
        arguments = [*arguments, "--resume"]


if __name__ == "__main__":
    work(sys.argv[1].split(";"), sys.argv[2:])

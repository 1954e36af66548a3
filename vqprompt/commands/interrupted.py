"""What the terminal shows after Ctrl-C, or when a process was lost: what was kept, and the command to continue."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vqprompt.commands.console import SafeConsole, running
from vqprompt.commands.options import Quiet, Verbose
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.lifelines import end_run

RESUMABLE_COMMANDS = ("run", "demo")
CHECKPOINT = "checkpoint.json"


def as_command(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command: it has -q and -v, and says after Ctrl-C what was kept. (Typer would end silently.)"""

    @functools.wraps(command)
    def complete(*arguments: Any, quiet: bool, verbose: bool, **named: Any) -> None:
        running.quiet, running.verbose, running.out = quiet, verbose, named.get("out")
        try:
            command(*arguments, **named)
        except KeyboardInterrupt:
            end_run(130, report_interruption, lost=True)

    own = inspect.signature(command, eval_str=True)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in (("quiet", Quiet), ("verbose", Verbose))
    ]
    parameters = [*own.parameters.values(), *more]
    complete.__doc__ = re.sub(r"(\S)\n +(?=\S)", r"\1 ", command.__doc__ or "")  # the terminal wraps paragraphs
    complete.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # Typer reads it
    return complete


def report_interruption(reason: str = "interrupted") -> None:
    lines = ["", reason]
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command in RESUMABLE_COMMANDS and running.out:
        lines += [*_kept(running.out), "Go on with:", f"  {_quoted('--resume')}"]
    elif command == "learn":
        lines.append("The model has not changed: it changes in one step, at the end. Give the same command again.")
    elif command == "search" or (command == "bench" and "run" in sys.argv):
        lines += ["Finished runs and checkpoints are kept. Go on with:", f"  {_quoted()}"]
    SafeConsole(stderr=True).print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _kept(out: Path) -> list[str]:
    """One line per run in the folder (a demo has several): how many tasks are kept."""
    folders = sorted({file.parent for file in [*out.glob(CHECKPOINT), *out.glob(f"*/{CHECKPOINT}")]})
    return [f"Kept in {folder}: {_kept_tasks(folder)}." for folder in folders] or ["Nothing was saved yet."]


def _kept_tasks(folder: Path) -> str:
    from vqprompt.research.results.result import FILE, RunResult  # slow to import, and needed for this alone

    try:
        result = RunResult.read(folder)
        in_task = (folder / CHECKPOINT).stat().st_mtime > (folder / FILE).stat().st_mtime
    except (UserError, OSError):  # no task is finished yet
        return "a part of task 1"
    part = f", and a part of task {result.learned + 1}" if in_task and not result.done else ""
    return f"{result.learned} of {len(result.tasks)} tasks{part}"


def _quoted(*options: str) -> str:
    """The same command with these options, to be pasted into a shell."""
    name = Path(sys.argv[0]).name
    start = ["python", "-m", "vqprompt"] if name == "__main__.py" else [name]
    return shlex.join([*start, *sys.argv[1:], *(option for option in options if option not in sys.argv)])

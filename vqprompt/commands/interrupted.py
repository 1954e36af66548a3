"""What the terminal shows after Ctrl-C, or when a process was lost: that work is kept, and the command to continue."""

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
from vqprompt.core.runtime.lifelines import end_run


def as_command(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command: it has -q and -v, and says after Ctrl-C how to go on. (Typer would end silently.)"""

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
    if command == "learn":
        lines.append("The model has not changed: it changes in one step, at the end. Give the same command again.")
    elif command in ("run", "demo", "search") or (command == "bench" and "run" in sys.argv):
        goes_on = _quoted("--resume") if command in ("run", "demo") else _quoted()
        lines += ["Finished tasks and checkpoints are kept. Go on with:", f"  {goes_on}"]
    SafeConsole(stderr=True).print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _quoted(*options: str) -> str:
    """The same command with these options, to be pasted into a shell."""
    name = Path(sys.argv[0]).name
    start = ["python", "-m", "vqprompt"] if name == "__main__.py" else [name]
    return shlex.join([*start, *sys.argv[1:], *(option for option in options if option not in sys.argv)])

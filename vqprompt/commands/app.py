"""The command `vqprompt`: its sub-commands, and what a person sees when something goes wrong."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import traceback
from functools import partial

import typer

from vqprompt._version import __version__
from vqprompt.commands import bench, check, export, listings, teach, test
from vqprompt.commands.console import accept_all_characters, print_error, running
from vqprompt.commands.interrupted import as_command, report_interruption
from vqprompt.commands.options import Command, Group, option
from vqprompt.commands.predict import predict
from vqprompt.commands.run import demo, run
from vqprompt.commands.search import search
from vqprompt.commands.serve import serve
from vqprompt.commands.watch import watch
from vqprompt.core.errors import UserError
from vqprompt.core.files import CANNOT_WRITE
from vqprompt.core.runtime.lifelines import LOST_STATUS, ProcessLost, end_run, started_together

app = typer.Typer(
    cls=Group,
    help="Teach a vision model new classes, again and again. It remembers the old ones without keeping their images."
    "\n\n"
    "Start with [bold]vqprompt learn MODEL.vqp FOLDER[/bold] (one folder per class inside), then "
    "[bold]vqprompt predict MODEL.vqp PHOTO.jpg[/bold]. Researchers start with [bold]vqprompt demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "VQPROMPT"},
)
OWN_MODEL, RESEARCH = "A model of your own", "Research: compare methods on streams of tasks"
for command in (
    teach.example, check.check, teach.learn, predict, watch, serve, test.test, teach.show, teach.relabel, teach.unlearn,
    teach.merge, teach.rename, teach.forget, teach.undo, export.export, teach.cache,
):  # fmt: skip
    app.command(cls=Command, rich_help_panel=OWN_MODEL)(as_command(command))
for research_command in (demo, run, search, listings.methods, listings.backbones, listings.datasets):
    app.command(cls=Command, rich_help_panel=RESEARCH)(as_command(research_command))
app.add_typer(bench.app, name="bench", rich_help_panel=RESEARCH)

TRAIN = ("torch", "scipy", "sklearn", "matplotlib", "huggingface_hub", "yaml")  # modules of the extra `train`
EXTRAS = {**dict.fromkeys(TRAIN, "train"), "optuna": "search"}  # by module
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # these may come without the name of a file


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"vqprompt {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: bool = option("Print the version and exit.", False, "--version", is_eager=True, callback=print_version),
) -> None:
    if started_together() > 1 and context.invoked_subcommand != "run":
        raise UserError(
            f"vqprompt {context.invoked_subcommand}: {started_together()} processes were started together, but only "
            "`vqprompt run` works in several; start this one without torchrun"
        )


def main() -> None:
    """Run the command. Exit status 2: the user can fix it, and standard error says how."""
    # a tenth of a short command's time would go into searching PyTorch's modules, which stay, for garbage
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)
    accept_all_characters()
    try:
        app()
    except ProcessLost as error:
        end_run(LOST_STATUS, partial(report_interruption, str(error)), lost=True)
    except Exception as error:
        explanation = explain(error)
        if running.verbose:
            traceback.print_exc()
        if explanation is not None:
            end_run(2, partial(print_error, explanation))
        if started_together() > 1:
            end_run(1, traceback.print_exc)
        raise


def explain(error: Exception) -> str | None:
    """What the user can do about it; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        extra = EXTRAS[error.name]
        return f"this needs {error.name}, which a small install does not have; pip install 'vqprompt[{extra}]'"
    if isinstance(error, RecursionError):
        return "a file or setting is nested too deeply; give a simpler one"
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "a path has a null byte in it; check the command line"
    return explain_disk_error(error)


def explain_disk_error(error: Exception) -> str | None:
    """One sentence that names the path; None if the error is not about a file or a disk."""
    number = error.errno if isinstance(error, OSError) else None
    if os.strerror(errno.ENOSPC) in str(error):  # safetensors raises its own type, without a number
        number = errno.ENOSPC
    named = getattr(error, "filename", None)
    if number is None or (named is None and number not in DISK_FULL):
        return None
    path = str(named or running.out or "writing a file")
    advice = CANNOT_WRITE.get(number, "check the path")
    return f"{path if len(path) <= 200 else path[:200] + '…'}: {os.strerror(number)}; {advice}"

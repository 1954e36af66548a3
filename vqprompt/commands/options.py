"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from vqprompt.core.errors import UserError


class PlainHelp:
    """Help without Python's types: arguments are names in capitals, and flags have nothing behind them. All options can
    be given as variables (`VQPROMPT_LEARN_SIZE`); help mentions those that were declared."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]  # of the other base class
        for each in parameters:
            if each.param_type_name == "argument":
                each.metavar = each.metavar or each.name.upper()
                continue
            each.allow_from_autoenv = False  # it would go by the names of parameters, not of options
            if each.envvar is None and not each.is_eager:
                name = max(each.opts, key=len).strip("-").replace("-", "_")
                each.envvar, each.show_envvar = f"{context.auto_envvar_prefix}_{name}".upper(), False
            if each.is_flag or each.multiple:
                each.metavar = each.metavar or ("" if each.is_flag else "VALUE")
        return parameters


class Command(PlainHelp, TyperCommand): ...


class Group(PlainHelp, TyperGroup): ...


def option(help: str, default: Any = None, *names: str, **more: Any) -> Any:
    """An option, as the default of a command's parameter. default: `...` if it must be given."""
    return typer.Option(default, *names, help=help, **more)


def flag(name: str, help: str) -> Any:
    """An option that is given or not: there is no --no-NAME."""
    return typer.Option(False, name, help=help)


def argument(help: str, default: Any = ..., **more: Any) -> Any:
    """An argument, which must be given unless it has a default."""
    return typer.Argument(default, help=help, **more)


DEVICE = "Where to compute: auto, cpu, cuda, cuda:1 … auto takes a GPU if it can."
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's file, such as garden.vqp.")]
NewSize = Annotated[int | None, typer.Option("--size", help="Image size in px, for a new model.")]
NewBackbone = Annotated[
    str | None,
    typer.Option("--backbone", help="best, a name of `vqprompt backbones`, or a weights file; for a new model."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs to read.")]
Device = Annotated[str, typer.Option(help=DEVICE)]
Preview = Annotated[bool, typer.Option("--preview", help="Only tell which answers would change; change nothing.")]
ClassFolders = Annotated[
    Literal["outer", "inner"] | None,
    typer.Option(help="Of folders in folders, which ones are the classes. Without this you are asked if it matters."),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Send settings, the losses of every step and accuracies to mlflow or tensorboard during the run. "
        "mlflow writes to ./mlflow.db, or to MLFLOW_TRACKING_URI; tensorboard writes to the run's folder, in "
        "tensorboard/. May be given twice."
    ),
]

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print no progress and no notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print where an error comes from, for a bug report.")]


def numbers(text: str, option: str, wanted: str) -> list[int]:
    """Whole numbers with commas between them. wanted: what the error says was expected."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text[:100]!r}: expected {wanted}") from None

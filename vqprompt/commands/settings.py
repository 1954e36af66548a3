"""Defaults of options from a file, vqprompt.toml, and from the environment. What the command line says wins."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.words import shorten

FILE = "vqprompt.toml"


def read_settings(group: Any, given: Path | None) -> dict[str, Any]:
    """Typer's `default_map` for a group of commands. given: a file; otherwise vqprompt.toml here, if there is one."""
    path = given or Path(FILE)
    tables: dict[str, Any] = {}
    if given is not None or path.is_file():
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
    return _defaults(group, tables, str(path), "VQPROMPT")


def _defaults(command: Any, table: Any, where: str, prefix: str) -> dict[str, Any]:
    """The defaults of a command by the names of its parameters; of a group, by the names of its commands."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: this must be a table, such as [learn]")
    inside = getattr(command, "commands", None)
    options = {option.lstrip("-"): p for p in command.params for option in p.opts if option.startswith("--")}
    known = options if inside is None else inside
    for key in table.keys() - known.keys():
        raise UserError(f"{where}: there is no {key}; there are {shorten(sorted(known))}")
    if inside is not None:
        return {
            name: _defaults(c, table.get(name, {}), f"{where} [{name}]", f"{prefix}_{name}")
            for name, c in inside.items()
        }
    defaults = {options[name].name: value for name, value in table.items()}
    for name, parameter in options.items():
        if (text := os.environ.get(f"{prefix}_{name}".upper().replace("-", "_"))) is not None:
            defaults[parameter.name] = text.split() if parameter.multiple else text
    return defaults

"""Fills the templates in `templates/`. Every value is escaped, except figures, which come in as `Markup`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vqprompt.core.words import counted
from vqprompt.research.report import figures, formats


def render(template: str, **content: Any) -> str:
    """One page. A template that uses a name which `content` lacks is an error, not a blank."""
    return _environment().get_template(template).render(**content)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vqprompt.research.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    css = (files("vqprompt.research.report") / "templates" / "style.css").read_text(encoding="utf-8")
    environment.globals |= {
        "css": Markup(css), "cell_colors": figures.cell_colors, "color_scale": figures.color_scale,
    }  # fmt: skip
    environment.filters |= {
        "percent": formats.percent, "fixed": formats.fixed, "duration": formats.duration, "short": formats.short,
        "counted": counted,
    }  # fmt: skip
    return environment

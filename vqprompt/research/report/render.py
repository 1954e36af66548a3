"""What pages are made of: templates, numbers as people read them, small pictures.

Every value in a template of a page is escaped, except figures, which come in as `Markup`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from vqprompt.core.data import decode as decoding
from vqprompt.core.words import counted, duration

UNKNOWN = "–"
THUMBNAIL = 112  # px
TEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "×": r"$\times$",
    "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"$^\S$", "Δ": r"$\Delta$", "τ": r"$\tau$", "λ": r"$\lambda$",
})  # fmt: skip


def render(template: str, **content: Any) -> str:
    """One page. A template that uses a name which `content` lacks is an error, not a blank."""
    return _environment().get_template(template).render(**content)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vqprompt.research.report"), autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    css = (files("vqprompt.research.report") / "templates" / "style.css").read_text(encoding="utf-8")
    environment.globals["css"] = Markup(css)
    environment.filters |= {
        "percent": percent, "fixed": fixed, "short": short, "counted": counted, "tex": lambda text: text.translate(TEX),
        "duration": lambda seconds: UNKNOWN if seconds is None else duration(seconds),
    }  # fmt: skip
    return environment


def fixed(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}\N{NO-BREAK SPACE}%"


def short(count: int) -> str:
    """22056576 → 22.1 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}\N{NO-BREAK SPACE}{unit}"
    return str(count)


def thumbnail(opened: Callable[[], Any], where: str = "image") -> str | None:
    """A data: address of a small JPEG; None for what cannot be read."""
    try:
        image = decoding.decode(opened(), where)
    except (ValueError, OSError):
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(packed.getvalue()).decode()


def thumbnails(opened: Mapping[str, Callable[[], Any]]) -> Callable[[str | None], str | None]:
    """For templates: `thumbnail` of an image, by where it is. opened: functions that read them."""
    return lambda where: thumbnail(opened[where], where) if where and where in opened else None

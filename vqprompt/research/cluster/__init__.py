"""Other machines: which of them can be used, how to reach them, and how to send files there and back."""

from __future__ import annotations

from collections.abc import Sequence

from vqprompt.core.errors import UserError

PLACES = {"local": ["local"], "ray": ["ray", "ray=HOST:PORT"], "slurm": ["slurm", "slurm=PARTITION"]}


def parse_on(on: str, kinds: Sequence[str] = tuple(PLACES)) -> tuple[str, str | None]:
    """`--on`: a kind of place, and the address of Ray's head or a partition of SLURM, if one is given."""
    kind, equals, address = on.partition("=")
    if kind not in kinds or (equals and (kind == "local" or not address)):
        *forms, last = [form for each in kinds for form in PLACES[each]]
        raise UserError(f"--on {on}: expected {', '.join(forms)} or {last}")
    return kind, address or None

"""How much work a teaching may be: instant, good or best."""

from __future__ import annotations

from vqprompt.errors import UserError

EFFORTS = ("instant",)


def check_effort(effort: str) -> None:
    if effort not in EFFORTS:
        raise UserError(f"effort {effort!r} is unknown; there are {', '.join(EFFORTS)}")

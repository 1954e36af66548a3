"""How much work a teaching may be. A model file is taught at effort instant today."""

from __future__ import annotations

from vqprompt.errors import UserError

EFFORTS = {
    "instant": "closed form on frozen features: seconds, and exact",
    "good": "prompts are trained",
    "best": "the backbone is tuned slowly",
}


def check_effort(effort: str) -> None:
    """Refuse what does not exist, and say of what cannot be done yet what can be done instead."""
    if effort not in EFFORTS:
        raise UserError(f"effort {effort!r} is unknown; there are {', '.join(EFFORTS)}")
    if effort != "instant":
        raise UserError(
            f"effort {effort!r} ({EFFORTS[effort]}) needs all images of a teaching again and again, and what it trains "
            "does not go into a model file yet; use --effort instant, or train with vqprompt run --data FOLDER --out "
            "RUN and predict with that folder"
        )

"""Model files of older formats become format 4 while they are read.

Format 3 is format 4 without counterexamples, corrections and the world. Format 2 was format 1 with trained networks.
How both differ from format 3: versions had no numbers; the solution of a version was a dictionary `facts`, in which
older files lack the weighing; events of the history had a text `detail`; the content ids were called `names`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FORMATS = (1, 2, 3)
OLDEST_WEIGHING = {"certainty": "largest", "nearness": 0.35, "far": 4.0, "steep": 5.0}  # where a file names none
FOR_GOOD = ("a class", "a class, for good")  # details of classes that were forgotten for good
SOLUTION = ("shrinkage", "temperature", "certainty", "nearness", "threshold", "background")
MEASUREMENTS = ("accuracy", "per_class", "calibration_error")


def migrated(
    version: int, description: dict[str, Any], tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Description and tensors as format 4 has them. What is wrong in them stays wrong, and is found by the checks of
    format 4; what is not even of the right type may raise any error here."""
    if version == 3:
        return description, tensors
    versions, facts = description["versions"], description["versions"][-1]["facts"]
    solution = None
    if versions[-1]["classes"]:
        solution = {key: facts[key] for key in SOLUTION} | {"weighing": facts.get("weighing", OLDEST_WEIGHING)}
        if "accuracy" in facts:
            solution["measurements"] = {key: facts[key] for key in MEASUREMENTS}
    new = {
        "backbone": description["backbone"],
        "records": description["records"],
        "trained": description.get("trained", []),
        "versions": [_version(number, version) for number, version in enumerate(versions, start=1)],
        "latest": len(versions),
        "solution": solution,
    }
    return new, {("ids" if name == "names" else name): tensor for name, tensor in tensors.items()}


def _version(number: int, version: dict[str, Any]) -> dict[str, Any]:
    facts = version["facts"]
    return {
        "number": number,
        "parent": number - 1 or None,
        "classes": version["classes"],
        "history": [_event(event) for event in version["history"]],
        "measured": facts.get("measured", True),
        "moved": facts.get("moved", []),
        "trained": version.get("trained"),
    }


def _event(event: dict[str, Any]) -> dict[str, Any]:
    new: dict[str, Any] = {key: event[key] for key in ("date", "what", "effort", "classes") if key in event}
    detail = event.get("detail", "")
    if event["what"] == "renamed":
        new["name"], _, new["new_name"] = detail.partition(" → ")
    elif event["what"] == "forgot" and detail not in FOR_GOOD:
        new["name"] = detail
    return new

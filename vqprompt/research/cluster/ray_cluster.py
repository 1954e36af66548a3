"""A Ray cluster: connect within seconds or say why not, and ask every machine what it has."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.research.cluster.requirements import Requirements

SECONDS_TO_ANSWER = 5.0
SECONDS_TO_GREET = 120.0  # a worker's process has to start and to import PyTorch
HOW = (
    "start one with `ray start --head`, and run this command on a machine of the cluster, with the address that Ray "
    "printed, as in --on ray=10.0.0.1:6379"
)


def import_ray() -> Any:
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # the default of a future Ray; without it, Ray warns
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs Ray: pip install 'vqprompt[ray]'") from None
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at this address. address=None: the cluster that this machine is part
    of; if there is none, one is started on this machine, and ended after use."""
    ray = import_ray()
    if address is not None:
        check_answers(address)
    already = ray.is_initialized()
    if not already:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=address, **quiet) if address else ray.init(include_dashboard=False, **quiet)
        except (Exception, SystemExit) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(
                f"--on ray: the cluster at {address or 'this machine'} cannot be used ({reason}); {HOW}"
            ) from None
    try:
        yield ray
    finally:
        if not already:
            ray.shutdown()


def check_answers(address: str) -> None:
    """Refuse an address where nothing listens, within seconds. (Ray itself would try for two minutes.)"""
    host, colon, port = address.rpartition(":")
    if address.startswith("ray://") or not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--on ray={address}: expected HOST:PORT of the head, as in --on ray=10.0.0.1:6379; {HOW}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise UserError(f"--on ray={address}: nobody answers there ({error.strerror or error}); {HOW}") from None


def alive_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def check_machines(ray: Any, requirements: Requirements, cpus: float, gpus: float) -> int:
    """Ask every machine that could get work whether it has what is needed. Refuse if one has not, or if there
    is none. Returns how many runs the cluster can do at once."""
    nodes = alive_nodes(ray)
    able = [n for n in nodes if n["Resources"].get("CPU", 0) >= cpus and n["Resources"].get("GPU", 0) >= gpus]
    if not able:
        resources = "; ".join(
            f"{n['NodeManagerHostname']}: {n['Resources'].get('CPU', 0):g} CPUs, {n['Resources'].get('GPU', 0):g} GPUs"
            for n in nodes
        )
        raise UserError(f"--on ray: no machine has {cpus:g} CPUs and {gpus:g} GPUs ({resources}); ask for less per run")
    asked = [_ask(ray, node, requirements) for node in able]
    for node, answer in zip(able, asked, strict=True):
        if missing := _what_is_missing(ray, node, requirements, answer):
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            raise UserError(f"--on ray: the machine {name} cannot be used: {missing}")
    counts = [n["Resources"].get("CPU", 0) // cpus if cpus else float("inf") for n in able]
    if gpus:
        slots = [
            max(1, int(1 / gpus)) * int(n["Resources"]["GPU"]) if gpus < 1 else n["Resources"]["GPU"] // gpus
            for n in able
        ]
        counts = [min(a, b) for a, b in zip(counts, slots, strict=True)]
    return max(1, int(min(sum(counts), 1_000_000)))


def _ask(ray: Any, node: dict[str, Any], requirements: Requirements) -> Any:
    """The coming answer of a machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(_introduce).options(scheduling_strategy=there).remote(requirements)


def _what_is_missing(ray: Any, node: dict[str, Any], requirements: Requirements, answer: Any) -> str | None:
    """What a machine answers. None if nothing is missing, or if it has left the cluster meanwhile."""
    from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError

    latest = time.monotonic() + SECONDS_TO_GREET
    while True:
        try:
            missing: str | None = ray.get(answer, timeout=SECONDS_TO_GREET)
            return missing
        except GetTimeoutError:
            return f"it did not answer within {SECONDS_TO_GREET:.0f} seconds"
        except RayError as error:
            if node["NodeID"] not in {other["NodeID"] for other in alive_nodes(ray)}:
                return None
            if not isinstance(error, TaskUnschedulableError) or time.monotonic() > latest:
                # most often: it has no vqprompt, or one so old that this module is not in it
                reason = str(error).strip().rpartition("\n")[2]
                return f"it cannot run vqprompt {requirements.version} ({reason}); install the same version there"
        time.sleep(0.2)  # it has just joined, and the cluster does not know it everywhere yet
        answer = _ask(ray, node, requirements)


def _introduce(requirements: Requirements) -> str | None:
    """In a worker: what its machine does not have."""
    return requirements.missing()

"""`vqprompt run --processes N`: starts the processes of a run, as `torchrun` does, and says what happened to them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

import typer

from vqprompt.commands.interrupted import report_interruption
from vqprompt.core.runtime.lifelines import LAUNCHED, LOST_STATUS


def launch(count: int) -> None:
    """Start this command `count` times on this machine and wait for the end. Ends with their exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # we print our own messages
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch prints C++ stacks about lost connections
    os.environ[LAUNCHED] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "vqprompt", *sys.argv[1:])
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        report_interruption(sys.argv, f"ended by {error.sigval.name}")
        raise typer.Exit(128 + error.sigval) from None
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise typer.Exit(_explain(statuses, count)) from None


def _explain(statuses: dict[int, int], count: int) -> int:
    """Say which process was killed, if one was, and return the exit status of the run. A process that ended by itself
    has printed its own message. statuses: exit status by rank; negative: the signal that killed the process."""
    because_of_others = (LOST_STATUS, 128 + signal.SIGTERM)  # it ended only because another process had ended
    explained = [status for status in statuses.values() if status > 0 and status not in because_of_others]
    if explained:
        return max(explained)
    killed = {rank: signal.Signals(-status).name for rank, status in statuses.items() if status < 0}
    reason = "a process ended"
    if killed:
        rank, name = next(iter(killed.items()))
        reason = f"process {rank + 1} of {count} was killed ({name})"
    report_interruption(sys.argv, f"{reason}, so the others have stopped")
    return 1

"""What the runs of a grid on other machines have in common, on Ray and on SLURM."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vqprompt.core.errors import UserError
from vqprompt.research.cluster.wanted import Wanted, host_name
from vqprompt.research.paper.work import Advanced, Failed, Finished, Lost, do_run
from vqprompt.research.results.config import RunConfig
from vqprompt.research.runs import runner

MOST_LOSSES = 3  # in a row, without a new checkpoint: then the run itself probably kills its machines
PASSED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # variables that the workers get


@dataclass(frozen=True)
class RemoteRun:
    """A run for another machine. wanted: what that machine must have. threads: that PyTorch may use there. environment:
    variables to set there. The other fields are as in `do_run`."""

    config: RunConfig
    track: tuple[str, ...]
    wanted: Wanted
    threads: int
    seconds_between: float
    checkpoint_seconds: float = field(default_factory=lambda: runner.CHECKPOINT_SECONDS)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    )

    def refusal(self) -> Failed | None:
        """On the other machine: why it cannot do the run; None if it can."""
        lacking = self.wanted.lacking()
        return None if lacking is None else Failed(f"the machine {host_name()} cannot be used: {lacking}")

    def do(
        self, folder: Path, send: Callable[[Advanced], None], shown_folder: Path | None = None, at_once: int = 1
    ) -> Finished | Failed:
        """On the other machine: do the run."""
        os.environ.update(self.environment)
        torch.set_num_threads(self.threads)
        return do_run(
            self.config, folder, send, self.seconds_between, shown_folder=shown_folder, track=self.track,
            at_once=at_once, checkpoint_seconds=self.checkpoint_seconds,
        )  # fmt: skip


def after_loss(times: int, reason: str) -> Lost | Failed:
    """What becomes of a run that lost its machine. times: losses in a row, without a new checkpoint."""
    if times > MOST_LOSSES:
        return Failed(f"it lost its machine {times} times without making progress ({reason})")
    return Lost(reason)


def refuse_local_tracking(track: Sequence[str]) -> None:
    if "mlflow" in track and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UserError(
            "--track mlflow on other machines needs a server that all of them can reach; set MLFLOW_TRACKING_URI to it"
        )

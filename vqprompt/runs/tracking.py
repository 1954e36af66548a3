"""Tracking: a run's numbers told to MLflow or TensorBoard as they come, for those who watch many runs in one place.

It is no part of what a run is: it changes no result, and a tracker that fails is left out from then on. Every value has
a name and a step, and what a tracker has already is not told it again: a run that was killed and resumed leaves the
same points as one that was not.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vqprompt.errors import UserError
from vqprompt.files import write_atomically
from vqprompt.runs.config import flatten

Points = list[tuple[str, int, float]]
"""Names, steps (from 1) and values."""


FINAL = ("faa", "caa", "forgetting")


class Tracker:
    """Made before any work, to refuse what cannot work; begun when the run begins."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.goes_on = (out / "config.json").exists()  # asked before the run writes its own
        self.last: dict[str, int] = {}  # the last step there is of each name

    def begin(self, config: dict[str, str]) -> None: ...
    def log(self, points: Points) -> None: ...
    def finish(self, metrics: dict[str, Any]) -> None: ...
    def close(self, status: str) -> None: ...


class MLflow(Tracker):
    """A run of MLflow's for every run; the folder remembers its id."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        from mlflow import MlflowClient

        self.client, self.note, self.run = MlflowClient(), out / "mlflow_run_id.txt", None
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "vqprompt"
        found = self.client.get_experiment_by_name(name)
        self.experiment = found.experiment_id if found else self.client.create_experiment(name)
        if found and found.lifecycle_stage != "active":
            raise UserError(f"the experiment {name!r} was deleted; restore it, or set MLFLOW_EXPERIMENT_NAME")
        if self.goes_on and self.note.exists():
            run_id = self.note.read_text(encoding="utf-8").strip()
            with suppress(Exception):  # which one depends on the store
                self.run = self.client.get_run(run_id)
            if self.run is None or self.run.info.lifecycle_stage != "active":
                raise UserError(f"the run {run_id} is not in this store; set MLFLOW_TRACKING_URI to the one where it "
                                f"was begun, or delete {self.note} to begin another")  # fmt: skip

    def begin(self, config: dict[str, str]) -> None:
        from mlflow.entities import Param

        if self.run is None:
            self.run = self.client.create_run(self.experiment, run_name=self.out.as_posix())
            write_atomically(self.note, self.run.info.run_id)
        self.id, data = self.run.info.run_id, self.run.data
        self.client.update_run(self.id, "RUNNING")
        # what a parameter was first it stays, for MLflow; and no value may be longer
        params = [Param(key, value[:6000]) for key, value in config.items() if key not in data.params]
        self.client.log_batch(self.id, params=params)
        self.last = {name: max(m.step for m in self.client.get_metric_history(self.id, name)) for name in data.metrics}

    def log(self, points: Points) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, step, value in points]
        for first in range(0, len(metrics), 1000):  # MLflow takes no more at once
            self.client.log_batch(self.id, metrics[first : first + 1000])

    def finish(self, metrics: dict[str, Any]) -> None:
        for name in ("config.json", "metrics.json", "report.html"):
            if (self.out / name).exists():
                self.client.log_artifact(self.id, str(self.out / name))

    def close(self, status: str) -> None:
        self.client.set_terminated(self.id, status)


class TensorBoard(Tracker):
    """Event files in the run's folder."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        import torch.utils.tensorboard  # noqa: F401

    def begin(self, config: dict[str, str]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder, self.texts = self.out / "tensorboard", set[str]()
        if self.goes_on and folder.exists():
            there = EventAccumulator(str(folder)).Reload()
            self.last = {name: there.Scalars(name)[-1].step for name in there.Tags()["scalars"]}
            self.texts = {name.removesuffix("/text_summary") for name in there.Tags()["tensors"]}
        self.writer = SummaryWriter(str(folder))
        *beginning, self.end = hparams({k: _number(v) for k, v in config.items()}, dict.fromkeys(FINAL, 0))
        if "config" not in self.texts:
            self._text("config", config, *beginning)

    def _text(self, name: str, rows: dict[str, str], *summaries: Any) -> None:
        cells = [f"|{key}|{value.replace('|', '¦')}|" for key, value in rows.items()]
        for summary in summaries:
            self.writer._get_file_writer().add_summary(summary)
        self.writer.add_text(name, "\n".join([f"|{name}||", "|---|---|", *cells]))
        self.writer.flush()

    def log(self, points: Points) -> None:
        for name, step, value in points:
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # before a checkpoint says that these steps are done

    def finish(self, metrics: dict[str, Any]) -> None:
        if "report" not in self.texts:  # TensorBoard shows no pages: the numbers, and where the page is
            numbers = {name.upper(): f"{metrics[name]:.2f}" for name in FINAL}
            self._text("report", numbers | {"page": str((self.out / "report.html").resolve())}, self.end)

    def close(self, status: str) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard}


def open_tracker(name: str, out: Path) -> Tracker:
    if name not in TRACKERS:
        raise UserError(f"--track {name}: no such tracker; there are {' and '.join(TRACKERS)}")
    try:
        return TRACKERS[name](out)
    except ImportError as error:
        raise UserError(f'--track {name}: a library is missing ({error}); pip install "vqprompt[{name}]"') from None
    except UserError as error:
        raise UserError(f"--track {name}: {error}") from None
    except Exception as error:  # a server that does not answer, a damaged store …
        raise UserError(f"--track {name}: cannot be used ({_line(error)}); mend that or leave it out") from None


class Tracking:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], out: Path) -> None:
        self.trackers = {name: open_tracker(name, out) for name in names}

    def begin(self, config: dict[str, Any]) -> None:
        self._tell(lambda tracker: tracker.begin(flatten(config)))

    def losses(self, steps_before: int, losses: dict[str, list[float]]) -> None:
        """Of an epoch's steps, term by term; steps count on from task to task."""
        self._log([(f"loss/{name}", step, value) for name, values in losses.items()
                   for step, value in enumerate(values, steps_before + 1)])  # fmt: skip

    def accuracies(self, accuracies: Sequence[float]) -> None:
        """On every task so far; the last of them is the step."""
        after, average = len(accuracies), sum(accuracies) / len(accuracies)
        tasks = [(f"accuracy/task_{task:02}", after, value) for task, value in enumerate(accuracies, 1)]
        self._log([*tasks, ("accuracy/average", after, average)])

    def finish(self, metrics: dict[str, Any]) -> None:
        self._log([(name, len(metrics["tasks"]), metrics[name]) for name in FINAL])
        self._tell(lambda tracker: tracker.finish(metrics))

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        status = "FINISHED" if kind is None else "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
        self._tell(lambda tracker: tracker.close(status))

    def _log(self, points: Points) -> None:
        self._tell(lambda tracker: tracker.log([p for p in points if p[1] > tracker.last.get(p[0], 0)]))

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        """Disks fill up and servers go away; what is being learned matters more."""
        for name, tracker in list(self.trackers.items()):
            try:
                tell(tracker)
            except Exception as error:
                del self.trackers[name]
                text = f"--track {name} failed and is left out from here on ({tracker.out}: {_line(error)})"
                warnings.warn(text, stacklevel=2)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text

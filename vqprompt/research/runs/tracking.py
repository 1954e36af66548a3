"""Tracking: sends a run's numbers to MLflow or TensorBoard while it runs, to watch many runs in one place.

Tracking changes no result. A tracker that fails is dropped with a warning, and the run goes on. Every value has a name
and a step; a step that a tracker already has is not sent again, so a run that was killed and resumed leaves the same
points as one that was not.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.research.results.config import flatten
from vqprompt.research.results.result import RunResult


class Point(NamedTuple):
    name: str
    step: int  # from 1
    value: float


# Trackers are created before any work, so that they can refuse what cannot work; `begin` is called when the run begins.


class MLflow:
    """One MLflow run per run. A file in the run's folder keeps its id, for a resume."""

    def __init__(self, out: Path, resuming: bool) -> None:
        from mlflow import MlflowClient

        self.out, self.client, self.note, self.run = out, MlflowClient(), out / "mlflow_run_id.txt", None
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "vqprompt"
        experiment = self.client.get_experiment_by_name(name)
        self.experiment = experiment.experiment_id if experiment else self.client.create_experiment(name)
        if experiment and experiment.lifecycle_stage != "active":
            raise UserError(f"the experiment {name!r} was deleted; restore it, or set MLFLOW_EXPERIMENT_NAME")
        if resuming and self.note.exists():
            run_id = self.note.read_text(encoding="utf-8").strip()
            with suppress(Exception):  # its type depends on the store
                self.run = self.client.get_run(run_id)
            if self.run is None or self.run.info.lifecycle_stage != "active":
                raise UserError(f"the run {run_id} is not in this store; set MLFLOW_TRACKING_URI to the one where it "
                                f"was started, or delete {self.note} to start a new one")  # fmt: skip

    def begin(self, config: dict[str, str]) -> None:
        from mlflow.entities import Param

        if self.run is None:
            self.run = self.client.create_run(self.experiment, run_name=self.out.as_posix())
            write_atomically(self.note, self.run.info.run_id)
        self.id, data = self.run.info.run_id, self.run.data
        self.client.update_run(self.id, "RUNNING")
        # MLflow refuses to change a parameter, and refuses values of more than 6000 characters
        params = [Param(key, value[:6000]) for key, value in config.items() if key not in data.params]
        self.client.log_batch(self.id, params=params)
        histories = {name: self.client.get_metric_history(self.id, name) for name in data.metrics}
        self.last_step = {name: max(metric.step for metric in history) for name, history in histories.items()}

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(point.name, point.value, now, point.step) for point in points]
        for first in range(0, len(metrics), 1000):  # MLflow takes at most 1000 per call
            self.client.log_batch(self.id, metrics[first : first + 1000])

    def finish(self, numbers: dict[str, float]) -> None:
        for name in ("config.json", "metrics.json", "report.html"):
            if (self.out / name).exists():
                self.client.log_artifact(self.id, str(self.out / name))

    def close(self, status: str) -> None:
        self.client.set_terminated(self.id, status)


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, out: Path, resuming: bool) -> None:
        import torch.utils.tensorboard  # noqa: F401

        self.out, self.resuming = out, resuming

    def begin(self, config: dict[str, str]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder, self.texts, self.last_step = self.out / "tensorboard", set[str](), dict[str, int]()
        if self.resuming and folder.exists():
            there = EventAccumulator(str(folder)).Reload()
            self.last_step = {name: there.Scalars(name)[-1].step for name in there.Tags()["scalars"]}
            self.texts = {name.removesuffix("/text_summary") for name in there.Tags()["tensors"]}
        self.writer = SummaryWriter(str(folder))
        values: dict[str, Any] = dict(config)
        for key, text in config.items():
            with suppress(ValueError):
                values[key] = float(text)
        *beginning, self.end = hparams(values, dict.fromkeys(("faa", "caa", "forgetting"), 0))
        self._text("config", config, *beginning)

    def _text(self, name: str, rows: dict[str, str], *summaries: Any) -> None:
        """A table, if it is not there already."""
        if name not in self.texts:
            cells = [f"|{key}|{value.replace('|', '¦')}|" for key, value in rows.items()]
            for summary in summaries:
                self.writer._get_file_writer().add_summary(summary)
            self.writer.add_text(name, "\n".join([f"|{name}||", "|---|---|", *cells]))
            self.writer.flush()

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self.writer.add_scalar(point.name, point.value, point.step)
        self.writer.flush()  # now, because the next checkpoint will say that these steps are done

    def finish(self, numbers: dict[str, float]) -> None:
        """TensorBoard cannot show pages, so it gets the numbers and the page's path."""
        shown = {name.upper(): f"{value:.2f}" for name, value in numbers.items()}
        self._text("report", {**shown, "page": str((self.out / "report.html").resolve())}, self.end)

    def close(self, status: str) -> None:
        self.writer.close()


Tracker = MLflow | TensorBoard
TRACKERS: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard}


class Tracking:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], out: Path) -> None:
        self.out = out
        resuming = (out / "config.json").exists()  # checked before this run writes its own
        self.trackers = {name: open_tracker(name, out, resuming) for name in names}

    def begin(self, config: dict[str, Any]) -> None:
        self._call(lambda tracker: tracker.begin(flatten(config)))

    def losses(self, steps_before: int, losses: dict[str, list[float]]) -> None:
        """The losses of every step of one epoch, by term. Steps are counted through all tasks."""
        self._log([Point(f"loss/{name}", step, value) for name, values in losses.items()
                   for step, value in enumerate(values, steps_before + 1)])  # fmt: skip

    def accuracies(self, accuracies: Sequence[float]) -> None:
        """The accuracies on all tasks so far. The step is the number of tasks."""
        values = {f"task_{task:02}": value for task, value in enumerate(accuracies, 1)}
        values["average"] = sum(accuracies) / len(accuracies)
        self._log([Point(f"accuracy/{name}", len(accuracies), value) for name, value in values.items()])

    def finish(self, result: RunResult) -> None:
        final = {name: getattr(result, name) for name in ("faa", "caa", "forgetting")}
        numbers = {name: value for name, value in final.items() if value is not None}
        self._log([Point(name, len(result.tasks), value) for name, value in numbers.items()])
        self._call(lambda tracker: tracker.finish(numbers))

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        status = "FINISHED" if kind is None else "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
        self._call(lambda tracker: tracker.close(status))

    def _log(self, points: Sequence[Point]) -> None:
        self._call(lambda tracker: tracker.log([p for p in points if p.step > tracker.last_step.get(p.name, 0)]))

    def _call(self, action: Callable[[Tracker], None]) -> None:
        """Do something with every tracker; drop those that fail. A full disk or a lost server must not end a run."""
        for name, tracker in list(self.trackers.items()):
            try:
                action(tracker)
            except Exception as error:
                del self.trackers[name]
                reason = f"{self.out}: {_first_line(error)}"
                warnings.warn(f"--track {name} failed and is not used any more ({reason})", stacklevel=2)


def open_tracker(name: str, out: Path, resuming: bool) -> Tracker:
    if name not in TRACKERS:
        raise UserError(f"--track {name}: no such tracker; there are {' and '.join(TRACKERS)}")
    try:
        return TRACKERS[name](out, resuming)
    except ImportError as error:
        raise UserError(f'--track {name}: a library is missing ({error}); pip install "vqprompt[{name}]"') from None
    except Exception as error:  # a server that does not answer, a damaged store …
        fault = str(error) if isinstance(error, UserError) else f"cannot be used ({_first_line(error)}); leave it out"
        raise UserError(f"--track {name}: {fault}") from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

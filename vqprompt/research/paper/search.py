"""A search for settings: the same number of trials for every method, tested on held-out training images.

What is notable about this implementation:
- a trial is an ordinary run, done by the executors of the paper's tables
- trials are chosen in rounds, each from its own seed and from what earlier rounds reached. So the same seed gives the
  same trials, however many run at once, and also if the search is interrupted and continued
- the first trial of a method has the settings that it would have without a search, as far as they are in the ranges
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.words import counted
from vqprompt.research.methods import METHODS, find_method
from vqprompt.research.paper.grids import Run, data_name
from vqprompt.research.paper.pool import left_to_do
from vqprompt.research.paper.table_formats import NONE, Chart, Linked, TextTable
from vqprompt.research.paper.table_rows import differences, setting_of
from vqprompt.research.report import figures
from vqprompt.research.results.config import RunConfig, resolve
from vqprompt.research.results.result import RunResult

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

NAME, JOURNAL, SETTINGS = "search", "trials.log", "settings.toml"
EDGE = 0.05  # a value in the first or last twentieth of its range is at the edge
Ranges = Mapping[str, tuple[float, float]]


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("a search needs Optuna: pip install 'vqprompt[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the command prints its own messages
    return optuna


class Search:
    """The trials of some methods, in a folder.

    given: settings of all runs, among them `seed` and `validation`. trials: per method. ranges: instead of, or in
    addition to, those that the methods declare. at_once: trials of a method that are chosen together.
    """

    def __init__(
        self, out: Path, methods: Sequence[str], given: Mapping[str, Any], trials: int, ranges: Ranges, at_once: int = 4
    ) -> None:
        self.optuna, self.out, self.given, self.trials, self.at_once = import_optuna(), out, given, trials, at_once
        self.ranges = {method: {**find_method(method).search_space, **ranges} for method in methods}
        self.runs = {method: Run(method, self._config(method)) for method in methods}  # as without a search
        self.spaces = {method: self._space(method) for method in methods}

    def _config(self, method: str, values: Mapping[str, Any] | None = None) -> RunConfig:
        return resolve({**self.given, **(values or {}), "method": method}, recipe=True)

    def _space(self, method: str) -> dict[str, BaseDistribution]:
        if not self.ranges[method]:
            raise UserError(f"{method} declares no range to search; give one, as in --range lr=1e-4:0.1")
        space: dict[str, BaseDistribution] = {}
        for key, (low, high) in self.ranges[method].items():
            whole = isinstance(setting_of(self.runs[method].config.model_dump(), key), int)
            kind = self.optuna.distributions.IntDistribution if whole else self.optuna.distributions.FloatDistribution
            limits = (int(low), int(high)) if whole else (low, high)
            for value in limits:
                self._config(method, {key: value})  # refuses unknown settings and impossible values
            space[key] = kind(*limits, log=low > 0 and high / low >= 10)
        return space

    # ------------------------------------------------------------------ trials

    @cached_property
    def storage(self) -> Any:
        journal = self.optuna.storages.journal
        return self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(self.out / JOURNAL)))

    @cached_property
    def studies(self) -> dict[str, Study]:
        """By method. Trials of the folder that were made with other settings are refused."""
        return {method: self._study(method, run.config.model_dump(mode="json")) for method, run in self.runs.items()}

    def _study(self, method: str, config: dict[str, Any]) -> Study:
        study: Study = self.optuna.create_study(
            study_name=method, storage=self.storage, direction="maximize", load_if_exists=True
        )
        then = study.user_attrs.get("settings")
        if then is None:
            own = {key: setting_of(config, key) for key in self.ranges[method]}
            low, high = ({key: limits[end] for key, limits in self.ranges[method].items()} for end in (0, 1))
            study.enqueue_trial({k: v for k, v in own.items() if v is not None and low[k] <= v <= high[k]})
            study.set_user_attr("settings", config)
            return study
        changed = differences(config, then)
        if then["seed"] != config["seed"]:
            changed["seed"] = config["seed"], then["seed"]
        if changed:
            pairs = ", ".join(f"{key}={before} then, {now} now" for key, (now, before) in changed.items())
            raise UserError(
                f"--out {self.out}: holds trials of {method} with other settings ({pairs}); give the same ones, or "
                "another folder"
            )
        return study

    def next_round(self, failed: Collection[str] = ()) -> list[Run]:
        """The runs of trials that are open; if there are none, of the next trials; none at the end.

        failed: names of runs. A trial that failed counts. If all open trials of a method have failed, they stay open
        for the next time, because the fault is probably not in their settings.
        """
        todo: list[Run] = []
        for method, study in self.studies.items():
            while True:
                trials = _in_state(study, "RUNNING")
                runs = [Run(_name(method, t), self._config(method, _rounded(t.params))) for t in trials]
                unfinished = left_to_do(runs, self.out)
                new = [run for run in unfinished if run.name not in failed]
                if new or (unfinished and len(unfinished) == len(runs)):
                    todo += new
                    break
                for trial, run in zip(trials, runs, strict=True):
                    if run in unfinished:
                        study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                    else:
                        study.tell(trial.number, RunResult.read(self.out / run.name).faa)
                if not self._ask(study):
                    break
        return todo

    def _ask(self, study: Study) -> int:
        """Begin the next trials of a method. Returns how many."""
        begun = len(study.trials) - len(_in_state(study, "WAITING"))
        numbers = range(begun, min(begun + self.at_once, self.trials))
        for number in numbers:
            seed = (10_000 * self.given["seed"] + number) % 2**32
            study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            study.ask(self.spaces[study.study_name])
        return len(numbers)

    def left(self) -> int:
        """How many trials are to be done, of all methods."""
        over = (sum(trial.state.is_finished() for trial in study.trials) for study in self.studies.values())
        return sum(max(0, self.trials - count) for count in over)

    # ------------------------------------------------------------------ what was found

    def write(self) -> list[Found]:
        """Write the settings file, and the trials as a table. They tell of all methods in the folder, also of those
        that an earlier search was about."""
        names = self.optuna.study.get_all_study_names(self.storage)
        studies = [self.optuna.load_study(study_name=name, storage=self.storage) for name in names]
        found = [Found(study.study_name, study.trials) for study in studies if _in_state(study, "COMPLETE")]
        lines = ["# Chosen by `vqprompt search` on held-out training images, for `vqprompt bench run --settings`."]
        for each in found:
            values = (f"{json.dumps(key)} = {json.dumps(value)}" for key, value in each.settings.items())
            lines += ["", f"[{json.dumps(each.method)}]", *values]
        write_atomically(self.out / SETTINGS, "\n".join([*lines, ""]))
        self._table(found).write(self.out)
        return found

    def _table(self, found: Sequence[Found]) -> TextTable:
        trials = [(each, trial) for each in found for trial in each.trials]
        keys = list(dict.fromkeys(key for _, trial in trials for key in trial.params))
        values = [[_rounded(trial.params).get(key) for key in keys] for _, trial in trials]
        columns: dict[str, list[str]] = {
            "method": [each.title for each, _ in trials],
            "trial": [Linked({trial.number: self.out / _name(each.method, trial)}) for each, trial in trials],
            **{key: [NONE if row[n] is None else f"{row[n]:g}" for row in values] for n, key in enumerate(keys)},
            "FAA": ["failed" if trial.value is None else f"{trial.value:.2f}" for _, trial in trials],
        }
        numbers = [
            {"method": each.method, "trial": t.number, **dict(zip(keys, row, strict=True)), "faa": t.value}
            for (each, t), row in zip(trials, values, strict=True)
        ]
        notes = [
            f"FAA: final average accuracy on {self.given['validation']:.0%} of the training images, which were held "
            "out. Test images were not used. The best trial of a method comes first.",
            *(note for each in found for note in (f"{each.title}: {each.summary}", *each.warnings)),
        ]
        if len({len(each.trials) for each in found}) > 1:
            notes.append(
                "The methods have different numbers of trials; give the same --trials for all to compare them."
            )
        charts = [each.chart(key) for each in found for key in each.settings]
        title = f"Trials on held-out training images of {data_name(self.given['data'])}"
        return TextTable(NAME, title, columns, notes, {"method"}, numbers, charts)


class Found:
    """What the trials of a method found. trials: those that are over, the best first."""

    def __init__(self, method: str, trials: Sequence[FrozenTrial]) -> None:
        over = [trial for trial in trials if trial.state.is_finished()]
        self.method, self.title = method, METHODS[method].title
        self.trials = sorted(over, key=lambda trial: (math.inf if trial.value is None else -trial.value, trial.number))
        self.faa, self.settings = self.trials[0].value or 0.0, _rounded(self.trials[0].params)
        looked: list[dict[str, Any]] = [trial.distributions for trial in over]
        # of a range that was widened later, the widest
        self.ranges = {
            key: (min(d[key].low for d in looked), max(d[key].high for d in looked)) for key in self.settings
        }
        self.log = {key: distribution.log for key, distribution in looked[-1].items()}

    @property
    def summary(self) -> str:
        chosen = (f"{key} = {value:g}, searched from {self._searched(key)}" for key, value in self.settings.items())
        return f"{self.faa:.2f} in the best of {counted(len(self.trials), 'trial')}: {'; '.join(chosen)}"

    def _searched(self, key: str) -> str:
        low, high = self.ranges[key]
        return f"{low:g} to {high:g}"

    @property
    def warnings(self) -> list[str]:
        """About best values at the edge of their range: a better one may lie beyond."""
        warnings = []
        for key, value in self.settings.items():
            low, here, high = map(
                math.log if self.log[key] else float, (self.ranges[key][0], value, self.ranges[key][1])
            )
            if not EDGE <= (here - low) / (high - low) <= 1 - EDGE:
                warnings.append(
                    f"{self.title}: the best {key}, {value:g}, is at the edge of its range, {self._searched(key)}; a "
                    f"better one may lie beyond: give --range {key}=LOW:HIGH and more --trials"
                )
        return warnings

    def chart(self, key: str) -> Chart:
        """Accuracy against the values of a setting."""
        points = [(_rounded(t.params)[key], t.value) for t in self.trials if t.value is not None]
        caption = f"{self.title}: accuracy on held-out images against {key}, searched from {self._searched(key)}"
        title = f"{caption}: " + ", ".join(f"{faa:.2f} % at {value:g}" for value, faa in sorted(points))
        name = f"{NAME}-{self.method}-{key}"
        return Chart(name, caption, *figures.search_chart(points, self.ranges[key], self.log[key], name, title, key))


def _name(method: str, trial: FrozenTrial) -> str:
    return f"{method}/trial{trial.number:03}"


def _in_state(study: Study, state: str) -> list[FrozenTrial]:
    return [trial for trial in study.trials if trial.state.name == state]


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Four digits are enough, and can be read."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}

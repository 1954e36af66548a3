"""A search for the settings of a method, in trials that are tested on held-out training images.

What is notable about this implementation:
- a trial is an ordinary run, done by the executors of the paper's tables
- trials are chosen in rounds, each from its own seed and from what earlier rounds reached. So the same seed gives the
  same trials, however many run at once, and also if the search is interrupted and continued
- the first trial has the settings that a run would have without a search, as far as they are in the ranges
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.words import counted
from vqprompt.research.methods import find_method
from vqprompt.research.paper.grids import Run, data_name
from vqprompt.research.paper.pool import left_to_do
from vqprompt.research.paper.table_rows import differences, setting_of
from vqprompt.research.report import figures
from vqprompt.research.report.render import render
from vqprompt.research.results.config import RunConfig, flatten, resolve
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs.refusals import by_content

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

NEAR = 5.0  # on a logarithmic scale, what is near a value: from a fifth of it to five times
JOURNAL, SETTINGS, PAGE = "trials.log", "settings.toml", "search.html"  # in the folder of a search


class Search:
    """The trials of one method.

    given: settings of all runs, among them `seed`, `validation` and `data`. start: settings of this method that are
    known to be good; they win over `given`, and a range is searched near them. ranges: instead of, or in addition to,
    those that the method declares. trials: how many in total. at_once: how many are chosen together.
    """

    def __init__(
        self, out: Path, method: str, given: Mapping[str, Any], start: dict[str, Any],
        ranges: Mapping[str, tuple[float, float]], trials: int, at_once: int,
    ) -> None:  # fmt: skip
        import optuna  # here, because it is an extra

        optuna.logging.set_verbosity(optuna.logging.ERROR)  # the command prints its own messages
        self.optuna: Any = optuna
        self.out, self.method, self.title = out, method, find_method(method).title
        self.start, self.given, self.trials, self.at_once = start, {**given, **start}, trials, at_once
        self.config = self.config_of({})  # as without a search
        if not self.config.validation:
            raise UserError("a search needs images to test on; hold some out, as with --validation 0.2")
        good, saved = flatten(start).keys(), self.config.model_dump()
        declared = find_method(method).search_space.items()
        known = {key: near(*limits, setting_of(saved, key)) for key, limits in declared if key in good}
        self.ranges = {**dict(declared), **known, **ranges}
        if not self.ranges:
            raise UserError(f"{method} declares no range to search; give one, as in --range lr=1e-4:0.1")
        self.space = {key: self._distribution(key, *limits) for key, limits in self.ranges.items()}

    def config_of(self, values: Mapping[str, Any]) -> RunConfig:
        return resolve({**self.given, **values, "method": self.method}, recipe=True)

    def _distribution(self, key: str, low: float, high: float) -> BaseDistribution:
        for value in (low, high):
            self.config_of({key: value})  # refuses unknown settings and impossible values
        kinds, log = self.optuna.distributions, logarithmic(low, high)
        distribution: BaseDistribution = kinds.FloatDistribution(low, high, log=log)
        if isinstance(setting_of(self.config.model_dump(), key), int):
            distribution = kinds.IntDistribution(int(low), int(high), log=log)
        return distribution

    @cached_property
    def study(self) -> Study:
        """What Optuna knows. Trials that were made with other settings are refused."""
        backend = self.optuna.storages.journal.JournalFileBackend(str(self.out / JOURNAL))
        name = f"{self.method}, seed {self.config.seed}"
        try:
            storage = self.optuna.storages.JournalStorage(backend)
            how = {"direction": "maximize", "load_if_exists": True}
            study: Study = self.optuna.create_study(study_name=name, storage=storage, **how)
        except (ValueError, KeyError) as error:
            raise UserError(f"{self.out / JOURNAL}: damaged ({error}); restore it, or give another folder") from None
        config = by_content(self.config.model_dump(mode="json"))
        if "settings" not in study.user_attrs:
            own = {key: value for key in self.ranges if (value := setting_of(config, key)) is not None}
            inside = {key: value for key, value in own.items() if self.ranges[key][0] <= value <= self.ranges[key][1]}
            study.enqueue_trial(inside)
            study.set_user_attr("settings", config)
        if changed := differences(config, study.user_attrs["settings"]):
            pairs = ", ".join(f"{key}={then} then, {now} now" for key, (now, then) in changed.items())
            raise UserError(
                f"--out {self.out}: holds trials of {self.method} with other settings ({pairs}); give the same ones, "
                "or another folder"
            )
        return study

    def _in_state(self, *names: str) -> list[FrozenTrial]:
        return [trial for trial in self.study.trials if trial.state.name in names]

    def folder(self, trial: FrozenTrial) -> str:
        return f"{self.method}/seed{self.config.seed}/trial{trial.number:03}"

    def next_round(self, failed: Collection[str] = ()) -> list[Run]:
        """The runs of trials that are open; if there are none, of the next trials; none at the end.

        failed: names of runs. A trial that failed counts. If all open trials have failed, they stay open for the next
        time, because the fault is probably not in their settings.
        """
        while True:
            trials = self._in_state("RUNNING")
            runs = {t.number: Run(self.folder(t), self.config_of(rounded(t.params))) for t in trials}
            unfinished = left_to_do(list(runs.values()), self.out)
            todo = [run for run in unfinished if run.name not in failed]
            if todo or (unfinished and len(unfinished) == len(runs)):
                return todo
            for number, run in runs.items():
                if run in unfinished:
                    self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
                else:
                    self.study.tell(number, RunResult.read(self.out / run.name).faa)
            begun = len(self.study.trials) - len(self._in_state("WAITING"))
            numbers = range(begun, min(begun + self.at_once, self.trials))
            for number in numbers:
                seed = (10_000 * self.config.seed + number) % 2**32
                self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
                self.study.ask(self.space)
            if not numbers:
                return []

    @property
    def left(self) -> int:
        """How many trials are not over."""
        return max(0, self.trials - len(self._in_state("COMPLETE", "FAIL")))

    @property
    def over(self) -> list[FrozenTrial]:
        """The trials that are over, the best first."""
        trials = self._in_state("COMPLETE", "FAIL")
        return sorted(trials, key=lambda trial: (math.inf if trial.value is None else -trial.value, trial.number))

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the best trial."""
        return rounded(self.over[0].params)

    @property
    def warnings(self) -> list[str]:
        """About best values at the edge: no trial beyond them was worse."""
        tried = {key: [trial.params[key] for trial in self.over] for key in self.ranges}
        return [
            f"{self.title}: the best {key} is at the edge of what was tried, so a better one may lie beyond; give more "
            f"--trials, or a wider --range {key}=LOW:HIGH"
            for key, values in tried.items()
            if values[0] in (min(values), max(values))
        ]

    def __str__(self) -> str:
        ranges = ((key, self.settings[key], *limits) for key, limits in self.ranges.items())
        chosen = [f"{key} = {best:g}, searched from {low:g} to {high:g}" for key, best, low, high in ranges]
        return f"{self.over[0].value:.2f} in the best of {counted(len(self.over), 'trial')}: {'; '.join(chosen)}"

    def chart(self, key: str) -> Markup:
        """Accuracy against the values of a setting."""
        points = [(trial.params[key], trial.value) for trial in self.over if trial.value is not None]
        title = f"{self.title}, accuracy by {key}: " + ", ".join(f"{y:.2f} % at {x:.4g}" for x, y in sorted(points))
        limits, name = self.ranges[key], f"{self.method}-{key}"
        return Markup(figures.search_chart(points, limits, logarithmic(*limits), name, title, key))


def write_findings(searches: Sequence[Search], out: Path) -> list[Search]:
    """Write the settings file, in which a section has all that its method started from, with the best values instead;
    and the page. Returns the searches that have a result."""
    successful = [search for search in searches if any(trial.value is not None for trial in search.over)]
    lines = ["# Chosen by `vqprompt search` on held-out training images, for `vqprompt bench run --settings`."]
    for search in successful:
        section = {**search.start, **search.settings}
        values = (f"{toml(key)} = {toml(value)}" for key, value in section.items() if value is not None)
        lines += ["", f"[{toml(search.method)}]", *values]
    if successful:
        write_atomically(out / SETTINGS, "\n".join([*lines, ""]))
        config = successful[0].config
        page = render("search.html", searches=successful, data=data_name(config.data), config=config)
        write_atomically(out / PAGE, page)
    return successful


def toml(value: Any) -> str:
    """A value of a JSON file in TOML. It has no null, which is the default of every setting that can be null."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml(key)} = {toml(inner)}' for key, inner in value.items() if inner is not None)}}}"
    return json.dumps(value, ensure_ascii=False)


def logarithmic(low: float, high: float) -> bool:
    return low > 0 and high / low >= 10


def near(low: float, high: float, value: float) -> tuple[float, float]:
    """The part of a range that is near a good value, so that few trials find a better one."""
    low, high = min(low, value), max(high, value)
    return (max(low, value / NEAR), min(high, value * NEAR)) if logarithmic(low, high) else (low, high)


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Four digits are enough, and can be read."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}

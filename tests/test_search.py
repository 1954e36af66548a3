"""Searches: the same seed gives the same trials whatever happens; the best is written where `bench` reads it."""

import json
import math
import sys
from pathlib import Path

import pytest

from vqprompt.commands import bench
from vqprompt.research.methods import METHODS
from vqprompt.research.paper.table_rows import setting_of
from vqprompt.research.results.config import flatten, resolve
from vqprompt.research.results.result import RunResult


def accuracy_of(lr: float) -> float:
    """Best at 0.01."""
    return 90 - 10 * (math.log10(lr) + 2) ** 2


class Pretended:
    """Does runs without learning anything: their accuracy follows from the rate. failing: which trials fail; after: how
    many runs end before Ctrl-C is pressed."""

    def __init__(self, failing=(), after: float = math.inf, reverse: bool = False) -> None:
        self.rates: dict[str, float] = {}  # by name, in the order in which they were begun
        self.failing, self.after, self.reverse = failing, after, reverse

    def __call__(self, todo, out, executor, track, more, total):
        failed = {}
        while todo:
            for run in reversed(todo) if self.reverse else todo:
                if len(self.rates) == self.after:
                    raise KeyboardInterrupt
                assert run.config.validation == 0.2 and run.name not in self.rates
                self.rates[run.name] = run.config.lr
                (out / run.name).mkdir(parents=True, exist_ok=True)
                if int(run.name[-3:]) in self.failing:
                    failed[run.name] = "out of memory"
                else:
                    (out / run.name / "config.json").write_text(run.config.model_dump_json())
                    RunResult(done=True, faa=accuracy_of(run.config.lr)).write(out / run.name)
            todo = more(failed)
        return failed


@pytest.fixture
def search(command, monkeypatch, tmp_path):
    """`vqprompt search linear …`, with pretended runs."""

    def run(*options, out: Path = tmp_path / "out", runs: Pretended | None = None, method: str = "linear"):
        runs = runs or Pretended()
        monkeypatch.setattr(bench, "run_with_bars", runs)
        status, printed, err = command("search", method, "--data", "quickdraw50", "--out", out, *options)
        return status, printed, err, runs

    return run


def test_the_same_seed_gives_the_same_trials_whatever_happens(search, tmp_path):
    """Interrupted in the middle of a round, continued with more trials, and ended in another order."""
    whole = search("--trials", "12", out=tmp_path / "whole")[3].rates
    assert len(set(whole.values())) == 12 and whole["linear/seed1/trial000"] == resolve({"method": "linear"}).lr
    low, high = METHODS["linear"].search_space["lr"]
    assert all(low <= rate <= high for rate in whole.values())

    status, _, err, first = search("--trials", "8", runs=Pretended(after=6, reverse=True))
    assert status == 130 and "Go on with:" in err
    second = search("--trials", "8", runs=Pretended(reverse=True))[3]
    third = search("--trials", "12")[3]
    assert [len(part.rates) for part in (first, second, third)] == [6, 2, 4], "nothing is done twice"
    assert first.rates | second.rates | third.rates == whole
    for name in ("settings.toml", "search.html"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert search("--trials", "4", "--seed", "2")[3].rates.keys().isdisjoint(whole), "another seed, other trials"


def test_the_best_settings_are_written_where_bench_reads_them(search, command, tmp_path, monkeypatch):
    status, printed, err, runs = search("--trials", "16", method="linear,l2p++")
    assert status == 0, err
    chosen = bench.read_settings(tmp_path / "out" / "settings.toml")
    for method in ("linear", "l2p++"):
        rates = [rate for name, rate in runs.rates.items() if name.startswith(f"{method}/")]
        best = max(rates, key=accuracy_of)
        assert len(rates) == 16 and chosen[method] == {"lr": best}
        assert f"{accuracy_of(best):.2f} in the best of 16 trials: lr = {best:g}, searched from" in " ".join(
            printed.replace("│", " ").split()
        )
    assert 0.003 < chosen["linear"]["lr"] < 0.03, "close to the true optimum"
    page = (tmp_path / "out" / "search.html").read_text()
    assert page.count("<svg") == 2 and 'href="linear/seed1/trial000/report.html"' in page and "edge" not in page
    planned = {}
    monkeypatch.setattr(
        bench, "run_with_bars", lambda todo, *rest: planned.update({r.config.method: r for r in todo}) or {}
    )
    options = ["--methods", "linear", "--seeds", "1", "--settings", tmp_path / "out" / "settings.toml"]
    assert command("bench", "run", "cub200", "--small", "--out", tmp_path / "tables", *options)[0] == 0
    assert planned["linear"].config.lr == chosen["linear"]["lr"]


def test_the_file_repeats_the_best_trial_with_all_that_it_started_from(search, command, tmp_path, monkeypatch):
    start, runs = tmp_path / "start.json", []
    section = {"epochs": 3, "first_tasks": None, "lr": 0.02, "rebalancing": {"lr": 0.001, "ratio": 2}, "mirror": True}
    start.write_text(json.dumps({"l2p++-v2": section}))
    search("--settings", start, "--trials", "6", "--range", "rebalancing.lr=1e-4:1e-2", method="l2p++-v2,linear")
    chosen = bench.read_settings(tmp_path / "out" / "settings.toml")["l2p++-v2"]
    best = max((tmp_path / "out" / "l2p++-v2").rglob("config.json"), key=lambda file: RunResult.read(file.parent).faa)
    monkeypatch.setattr(bench, "run_with_bars", lambda todo, *rest: runs.extend(todo) or {})
    options = ["--methods", "l2p++-v2", "--seeds", "1", "--set", "validation=0.2"]
    options += ["--data", "quickdraw50", "--settings", tmp_path / "out" / "settings.toml"]
    assert command("bench", "run", "cub200", "--out", tmp_path / "tables", *options)[0] == 0
    again, trial = (flatten(config) for config in (runs[0].config.model_dump(), json.loads(best.read_text())))
    assert chosen["epochs"] == 3 and trial["options.rebalancing.ratio"] == "2"
    assert {k for k in trial if again[k] != trial[k]} <= {"backbone", "size", "tasks"}, "the table's own"


def test_a_best_value_at_the_edge_of_its_range_is_pointed_out(search, tmp_path):
    status, _, err, _ = search("--trials", "8", "--range", "lr=0.0001:0.001")
    assert status == 0 and "the best lr is at the edge of what was tried" in err and "--range lr=LOW:HIGH" in err
    assert "At the edge" in (tmp_path / "out" / "search.html").read_text()
    status, _, err, runs = search("--trials", "20", "--range", "lr=0.0001:1")
    assert status == 0 and "edge" not in err, "in a wider range, with more trials, the best is inside"
    assert len(runs.rates) == 12 and max(runs.rates.values()) > 0.001


def test_it_starts_from_a_file_and_looks_near_what_it_says(search, tmp_path, monkeypatch):
    """Every method that learns, from the settings that were chosen for the embedded backbone."""
    monkeypatch.setattr("vqprompt.research.report.figures.search_chart", lambda *given: "")  # so many take long
    file, runs, methods = Path(__file__).parents[1] / "results" / "cub200-settings.toml", {}, set()

    class Noting(Pretended):
        def __call__(self, todo, out, executor, track, more, total):
            for run in todo:
                runs.setdefault(run.config.method, []).append(run.config)
            methods.update(run.config.method for run in todo)
            return super().__call__(todo, out, executor, track, more, total)

    options = ["--settings", file, "--set", "epochs=20", "--set", "first_tasks=4", "--trials", "4", "--tasks", "10"]
    assert search(*options, method="all", runs=Noting())[0] == 0
    assert methods == {name for name, method in METHODS.items() if method.search_space}
    for name, own in bench.read_settings(file).items():
        first, *others = runs[name]
        expected = resolve({"method": name, "epochs": 20, "first_tasks": 4, "validation": 0.2, **own}, recipe=True)
        assert first == expected, name
        assert len(others) == 3 and all(config.first_tasks == 4 for config in others)
        for key in METHODS[name].search_space.keys() & own.keys():
            low, high = METHODS[name].search_space[key]
            values = [setting_of(config.model_dump(), key) for config in others]
            assert low < own[key] < high, f"{name}: {key} is at the edge of what is searched"
            assert all(own[key] / 5 <= value <= own[key] * 5 for value in values) or high / low < 10
    ranges = {"--settings": file, "--range": "lr=0.0001:0.001", "--trials": "6", "--out": tmp_path / "wide"}
    rates = search(*(part for pair in ranges.items() for part in pair))[3].rates.values()
    assert all(0.0001 <= rate <= 0.001 for rate in rates), "a range that is given stays as it is"


def test_whole_numbers_stay_whole(search):
    seen = []

    class Noting(Pretended):
        def __call__(self, todo, out, executor, track, more, total):
            seen.extend(todo)
            return super().__call__(todo, out, executor, track, more, total)

    assert search("--range", "epochs=1:30", "--trials", "4", runs=Noting())[0] == 0
    epochs = [run.config.epochs for run in seen]
    assert all(isinstance(count, int) and 1 <= count <= 30 for count in epochs) and len(set(epochs)) > 1


def test_a_trial_that_fails_counts_but_a_round_in_which_all_fail_is_tried_again(search, tmp_path):
    status, _, err, runs = search("--trials", "8", runs=Pretended(failing=[1, 4, 5, 6, 7]))
    assert status == 1 and "linear/seed1/trial001: out of memory" in err and len(runs.rates) == 8
    assert "failed" in (tmp_path / "out" / "search.html").read_text()
    again = search("--trials", "8")[3].rates
    assert list(again) == [f"linear/seed1/trial{n:03}" for n in (4, 5, 6, 7)]
    assert again.items() <= runs.rates.items(), "with the same settings"


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--range", "lr=1"], "as in lr=1e-4:0.1"), (["--range", "lr=1:0.1"], "as in lr=1e-4:0.1"),
     (["--range", "taw=1:2"], "no setting is called 'taw'"), (["--range", "epochs=-1:3"], "epochs"),
     (["--set", "first_tasks=11"], "there are 10 tasks"), (["--set", "first_tasks=0"], "first_tasks"),
     (["--set", "seed=3"], "seed cannot be set"), (["--set", "validation=0"], "--validation 0.2"),
     (["--on", "mars"], "--on mars")],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_before_any_work(search, tmp_path, options, word):
    status, _, err, _ = search(*options, runs=lambda *given: pytest.fail("runs began"))
    assert status == 2 and word in err and not (tmp_path / "out").exists()


def test_any_method_that_cannot_learn_the_stream_is_refused(search):
    refused = search("--set", "stream=repeated:30", method="ease,linear", runs=lambda *given: pytest.fail("runs began"))
    assert refused[0] == 2 and "ease cannot learn --stream repeated:30" in refused[2]


def test_trials_with_other_settings_are_not_mixed(search, tmp_path):
    assert search("--trials", "1")[0] == 0
    status, _, err, _ = search("--trials", "2", "--set", "epochs=3")
    assert status == 2 and "holds trials of linear with other settings (epochs=20 then, 3 now)" in err
    file = tmp_path / "tasks.json"
    for images, expected in (("a", 0), ("a", 0), ("b", 2)):  # the path is the same
        file.write_text(f'[["{images}.png"]]')
        assert search("--trials", "1", "--set", f"stream={file}", out=tmp_path / "file")[0] == expected


def test_a_damaged_journal_is_named(search, tmp_path):
    assert search("--trials", "1")[0] == 0
    journal = tmp_path / "out" / "trials.log"
    journal.write_text("{}\n" + journal.read_text()[5:])
    status, _, err, _ = search("--trials", "2", runs=lambda *given: pytest.fail("runs began"))
    assert status == 2 and f"{journal}: damaged" in err


def test_trials_are_ordinary_runs(command, tiny_weights, tmp_path):
    """For real, with a very small backbone."""
    small = {"size": 28, "epochs": 1, "train_per_class": 6, "test_per_class": 2}
    options = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    options += ["--data", "quickdraw50", "--tasks", "2,2,3", "--backbone", tiny_weights]
    options += ["--set", "first_tasks=2", "--trials", "3", "--round", "2", "--workers", "2", "--out", tmp_path / "out"]
    status, printed, err = command("search", "linear", *options)
    assert status == 0, err
    folders = [tmp_path / "out" / "linear" / "seed1" / f"trial00{n}" for n in range(3)]
    results = [RunResult.read(folder) for folder in folders]
    assert all(result.done and result.validation == 0.2 and len(result.tasks) == 2 for result in results)
    assert f"{max(result.faa for result in results):.2f} in the best of 3 trials" in printed
    assert all((folder / "report.html").is_file() for folder in folders)


def test_without_optuna_the_message_names_the_extra(search, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, _, err, _ = search()
    assert status == 2 and "pip install 'vqprompt[search]'" in err

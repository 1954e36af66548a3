"""The paper's tables: what is declared can be run, what was run is not run again, and every format tells the same."""

import csv
import json
import os
import re
import runpy
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from statistics import mean
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from vqprompt.commands import bench as bench_cli
from vqprompt.commands.bench import read_settings
from vqprompt.core.errors import UserError
from vqprompt.research.methods import METHODS
from vqprompt.research.paper import pool as runner
from vqprompt.research.paper.execution import Advanced, Executor, Failed, Finished
from vqprompt.research.paper.grids import GRIDS, NUMBERS, Quoted, combine, described, find_grid, plan, smaller
from vqprompt.research.paper.pool import LocalExecutor, left_to_do
from vqprompt.research.paper.table_rows import Row, differences, make_rows, read_runs
from vqprompt.research.paper.tables import TextTable, make_charts, make_table
from vqprompt.research.results.config import flatten
from vqprompt.research.runs import runner as runs

RESULTS = Path(__file__).parents[1] / "results"
CUB = GRIDS["cub200"]


@pytest.fixture
def bench(command):
    """Run `vqprompt bench …`."""
    return lambda *arguments: command("bench", *arguments)


@pytest.fixture
def tiny(tiny_weights):
    return {"backbone": str(tiny_weights), "epochs": 1, "train_per_class": 4, "test_per_class": 2}


def write_run(folder: Path, run, faa: float, caa: float, done: bool = True, hardware: str = "abacus") -> None:
    """A run's files as if it had been done."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(run.config.model_dump_json())
    metrics = {
        "done": done, "faa": faa, "caa": caa, "forgetting": 4.0, "hardware": hardware,
        "losses": [{"task": 0, "epoch": 0, "losses": {"task": 1.0}}],
        "prompt_use": {"blocks": [0], "counts": [[[3, 0]], [[1, 2]]]},
        "accuracy": [[90.0, 82.0], [None, 90.0]], "within_task": [98.0, 95.0], "kept_bytes": 1_000_000,
        "average_accuracy": [2 * caa - faa, faa], "parameters": {"trainable": 249_800}, "images_per_second": 1500.2,
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics))


def cells(text: str) -> dict[str, dict[str, str]]:
    """The rows of a Markdown table by their first cell, each by the headings."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


class TestGrids:
    @pytest.mark.parametrize("grid", [*GRIDS.values(), *map(smaller, GRIDS.values())], ids=lambda grid: grid.name)
    def test_every_run_is_valid_and_has_a_name_of_its_own(self, grid):
        planned = plan(grid)
        assert len({run.name for run in planned}) == len(planned) >= 2 * len(grid.seeds)
        for run in planned:
            assert run.name.startswith(f"{grid.name}/") and run.name.endswith(f"/seed{run.config.seed}")
            assert re.fullmatch(r"[\w.,=+/-]+", run.name)

    def test_tables_vary_what_the_paper_varies(self):
        assert {run.config.tasks for run in plan(GRIDS["mitigation"])} == {5, 10, 20}
        assert {run.config.method for run in plan(GRIDS["mitigation"])} == {
            "l2p++", "l2p++-v2", "evoprompt", "vq-prompt-s", "vq-prompt",
        }  # fmt: skip
        assert {run.config.backbone for run in plan(GRIDS["self-supervised"])} == {"ibot-b16", "dino-b16"}
        assert {run.config.tasks for run in plan(GRIDS["imagenet-r-20"])} == {20}
        pool = {(r.config.options["pool"], r.config.options["length"]) for r in plan(GRIDS["ablation-pool"])}
        assert pool == {(n, length) for n in (10, 30, 50, 100) for length in range(4, 25, 4)}
        soft, quantized = (
            {r.config.options["tau"] for r in plan(GRIDS["ablation-tau"]) if r.config.method == method}
            for method in ("soft-prompt", "vq-prompt-s")
        )
        assert soft == quantized and 1.0 in soft and min(soft) < 0.1
        weights = {(r.config.options["vq_weight"], r.config.options["commitment_weight"])
                   for r in plan(GRIDS["ablation-loss"])}  # fmt: skip
        assert {(0.4, 0.1), (0.1, 0.4), (0.0, 0.0)} <= weights

    def test_small_ones_are_small(self):
        for run in (run for grid in GRIDS.values() for run in plan(smaller(grid))):
            assert (run.config.data, run.config.backbone, run.config.size) == ("quickdraw50", "vit-s14", 28)

    def test_names_are_readable_and_stable(self):
        assert plan(CUB, ["vq-prompt"], [1])[0].name == "cub200/vq-prompt/seed1"
        assert plan(GRIDS["ablation-tau"])[0].name == "ablation-tau/soft-prompt/tau=0.01/seed0"
        assert plan(GRIDS["self-supervised"])[0].name == "self-supervised/dualprompt/backbone=ibot-b16/seed0"

    def test_what_is_changed_is_in_the_name(self):
        changes = {"data": "cub200=/my/birds.zip", "backbone": "/w/mine.pth", "epochs": 3, "device": "cpu"}
        (run,) = plan(GRIDS["imagenet-r-10"], ["vq-prompt"], [4], changes)
        assert run.name == "imagenet-r-10/cub200/w_mine/vq-prompt/epochs=3/seed4"
        assert (run.config.data, run.config.epochs) == ("cub200=/my/birds.zip", 3)
        (run,) = plan(CUB, ["ft"], [1], {"data": "cub200=/my/birds.zip"})
        assert run.name == "cub200/ft/seed1", "where the data is makes no other run of it"

    def test_a_change_on_an_axis_takes_its_place(self):
        planned = plan(GRIDS["mitigation"], ["vq-prompt"], [1], {"tasks": 10})
        assert [run.name for run in planned] == ["mitigation/vq-prompt/tasks=10/seed1"]

    def test_settings_of_one_method(self):
        by_method = {"slca": {"lr": 0.5, "rebalancing.lr": 0.25}, "ft": {"epochs": 7}}
        ft, slca = plan(CUB, ["slca", "ft"], [1], {"epochs": 3}, by_method)
        assert (ft.name, slca.name) == (
            "cub200/ft/epochs=7/seed1",
            "cub200/slca/epochs=3/lr=0.5/rebalancing.lr=0.25/seed1",
        )
        assert (ft.config.epochs, slca.config.epochs, slca.config.lr) == (7, 3, 0.5)
        assert slca.config.options["rebalancing"]["lr"] == 0.25

    def test_the_committed_settings_are_what_held_out_images_chose(self):
        """The best of each method's held-out runs; FT takes FT++'s, Soft-Prompt VQ-Prompt-S's, RanPAC APER's. Our own
        methods have theirs as defaults."""
        settings = read_settings(RESULTS / "cub200-settings.toml")
        files = (RESULTS / "cub200-rates.json", RESULTS / "cub200-beyond-held-out.json")
        saved = [run for file in files for run in json.loads(file.read_text())]
        assert all(run["config"]["validation"] == 0.2 for run in saved)
        methods = {run["config"]["method"] for run in saved} - {"moving-prompts", "moving-weights"}
        assert settings.keys() == methods | {"ft", "soft-prompt", "ranpac"}
        for name in methods:
            best = max((run for run in saved if run["config"]["method"] == name), key=lambda run: run["faa"])["config"]
            flat = {key.removeprefix("options."): value for key, value in flatten(best).items()}
            assert {key: json.loads(flat[key]) for key in settings[name]} == settings[name], name

    def test_other_methods_can_join(self):
        assert [run.name for run in plan(CUB, ["linear"], [1])] == ["cub200/linear/seed1"]
        with pytest.raises(UserError, match="did you mean 'vq-prompt'"):
            plan(CUB, ["vq-promt"])
        with pytest.raises(UserError, match="imagenet-r-10"):
            find_grid("imagenet")


class TestPaper:
    def test_as_printed(self):
        assert NUMBERS["cub200", "vq-prompt"][:4] == (86.72, 0.94, 90.33, 1.03)
        assert NUMBERS["imagenet-r-10", "vq-prompt"][:4] == (78.71, 0.22, 83.24, 0.68)
        assert NUMBERS["imagenet-r-20", "ft"][:4] == (4.75, 0.40, 22.8, 0.37)
        assert NUMBERS["cifar100", "lwf"] == Quoted(64.83, 1.03)
        assert NUMBERS["self-supervised/backbone=dino-b16", "hide-prompt"][:4] == (68.11, 0.18, 71.70, 0.01)
        assert NUMBERS["mitigation/tasks=20", "l2p++-v2"][:4] == (70.99, 0.26, 77.65, 0.79)
        assert NUMBERS["mitigation/tasks=5", "evoprompt"] == NUMBERS["imagenet-r-5", "evoprompt"]
        assert (NUMBERS["imagenet-a", "vq-prompt"].faa, NUMBERS["vtab", "vq-prompt"].faa) == (52.96, 90.46)
        assert NUMBERS["ablation-tau/tau=1.0", "soft-prompt"].faa == 77.15

    def test_misprints_are_marked(self):
        for method, own in (("dualprompt", "83.05"), ("coda-p", "86.25")):
            assert NUMBERS["cifar100", method][:4] == NUMBERS["cub200", method][:4]
            assert "misprint" in NUMBERS["cub200", method].mark and own in NUMBERS["cifar100", method].mark
        assert "78.83" in NUMBERS["imagenet-r-10", "vq-prompt"].mark

    def test_every_number_has_its_row(self):
        rows = {
            ("/".join([grid.name, *described(variant)]), method)
            for grid in GRIDS.values()
            for sweep in grid.sweeps
            for method in sweep.methods
            for variant in combine(grid.axes(sweep))
        }
        assert NUMBERS.keys() <= rows
        ours = ("ablation", "cub200-rates", "streams")  # of a figure few numbers are printed, of our own tables none
        assert {row for row in rows if not row[0].startswith(ours)} == {k for k in NUMBERS if not k[0].startswith(ours)}


class TestTables:
    @pytest.fixture
    def out(self, tmp_path):
        """VQ-Prompt with the paper's backbone and seeds 1, 2, 3; FT with another backbone; one not finished."""
        for run, faa in zip(plan(CUB, ["vq-prompt"], [1, 2, 3]), (86.0, 87.0, 89.0), strict=True):
            write_run(tmp_path / run.name, run, faa, faa + 3)
        (other,) = plan(CUB, ["ft"], [1], {"backbone": "vit-s14"})
        write_run(tmp_path / other.name, other, 9.0, 20.0)
        (unfinished,) = plan(CUB, ["bic"], [1])
        write_run(tmp_path / unfinished.name, unfinished, 1.0, 1.0, done=False)
        return tmp_path

    def rows(self, out: Path, grid=CUB) -> list[Row]:
        return make_rows(grid, read_runs(out), out)

    def table(self, out: Path, grid=CUB, figure: bool = False) -> TextTable:
        return make_table(grid, self.rows(out, grid), figure)

    def test_by_hand(self, out):
        rows = cells(self.table(out).markdown())
        # (86 + 87 + 89) / 3 = 87.333…; deviations −4/3, −1/3, 5/3: √((16 + 1 + 25) / 9 / 3) = 1.2472…
        assert rows["VQ-Prompt"] == {
            "method": "VQ-Prompt", "FAA": "87.33 ± 1.25", "CAA": "90.33 ± 1.25", "forgetting": "4.00 ± 0.00",
            "trainable": "249,800", "images/s": "1,500", "paper FAA": "86.72 ± 0.94", "paper CAA": "90.33 ± 1.03",
            "Δ FAA": "+0.61", "Δ CAA": "+0.00", "seeds": "1, 2, 3", "backbone": "vit-b16-in21k",
        }  # fmt: skip
        assert "Hardware: abacus: all" in self.table(out).notes
        bic = rows["BiC"]
        assert (bic["FAA"], bic["paper FAA"], bic["seeds"]) == ("–", "81.91 ± 2.59", "–"), "not finished: not counted"
        assert rows["DualPrompt"]["paper FAA"] == "66.00 ± 0.57‡"

    def test_the_paper_s_rows_alone(self, tmp_path):
        """What somebody gets whose runs all failed."""
        table = self.table(tmp_path)
        assert len(table.write(tmp_path)) == 4
        assert cells(table.markdown())["SLCA"]["paper FAA"] == "84.71 ± 0.40" and len(table.rows) == 10

    def test_it_is_said_what_ran_on_which_hardware(self, out):
        (other,) = plan(CUB, ["slca"], [1])
        write_run(out / other.name, other, 80.0, 90.0, hardware="slide rule")
        (fourth,) = plan(CUB, ["vq-prompt"], [4])
        write_run(out / fourth.name, fourth, 89.0, 92.0, hardware="slide rule")
        table = self.table(out)
        assert [note for note in table.notes if "Hardware" in note] == [
            "Hardware: abacus: FT, VQ-Prompt",
            "Hardware: slide rule: SLCA, VQ-Prompt",
        ]
        kept = {row["method"]: row["hardware"] for row in csv.DictReader(table.csv().splitlines())}
        assert (kept["slca"], kept["vq-prompt"]) == ("slide rule", "abacus; slide rule")

    def test_other_backbones_are_marked(self, out):
        table = self.table(out)
        row = cells(table.markdown())["FT"]
        assert [row[key] for key in ("FAA", "CAA", "Δ FAA", "Δ CAA")] == ["9.00†", "20.00†", "-2.04†", "-11.96†"]
        assert (row["seeds"], row["backbone"]) == ("1", "vit-s14†")
        (note,) = [note for note in table.notes if note.startswith("†")]
        assert "NOT the paper's backbone" in note and "vit-s14" in note and "vit-b16-in21k" in note
        assert "Not the paper’s backbone" in table.html(out) and "vit-s14†" in table.html(out)
        assert r"vit-s14$^\dagger$" in table.latex()
        assert "†" not in " ".join(cells(table.markdown())["VQ-Prompt"].values())

    def test_backbones_and_settings_are_never_mixed(self, out):
        for changes in ({"backbone": "vit-s14"}, {"epochs": 2}):
            (run,) = plan(CUB, ["vq-prompt"], [1], changes)
            write_run(out / run.name, run, 10.0, 10.0)
        table = self.table(out)
        rows = [(row.seeds, row.backbone, row.changed) for row in self.rows(out) if row.method == "vq-prompt"]
        assert rows == [
            ([1, 2, 3], "vit-b16-in21k", {}),
            ([1], "vit-s14", {"backbone": ("vit-s14", "vit-b16-in21k")}),
            ([1], "vit-b16-in21k", {"epochs": ("2", "20")}),
        ]
        assert "§ epochs is 2, not 20: VQ-Prompt" in table.notes
        assert [name for name in cells(table.markdown()) if "VQ" in name] == ["VQ-Prompt", "VQ-Prompt, epochs=2§"]

    def test_nor_are_held_out_images(self, tmp_path):
        (run,) = plan(CUB, ["ft"], [1], {"validation": 0.2})
        write_run(tmp_path / run.name, run, 50.0, 60.0)
        assert cells(self.table(tmp_path).markdown())["FT§"]["paper FAA"] == "11.04 ± 0.78"
        assert all(row.difference("faa") is None for row in self.rows(tmp_path))

    def test_other_data_is_not_subtracted(self, tmp_path):
        grid = GRIDS["ablation-tau"]
        (run,) = plan(grid, ["vq-prompt-s"], [1], {"data": "cub200=/birds", "tau": 1.0})
        write_run(tmp_path / run.name, run, 50.0, 60.0)
        table = self.table(tmp_path, grid)
        row = cells(table.markdown())["VQ-Prompt-S§"]
        assert (row["tau"], row["FAA"], row["CAA"], row["paper FAA"]) == ("1.0", "50.00", "60.00", "78.05‡")
        assert "Δ FAA" not in row, "nothing is in that column"
        assert "§ data is cub200, not imagenet-r: VQ-Prompt-S" in table.notes

    def test_runs_of_other_tables_count_where_they_are_the_same(self, tmp_path):
        for method in ("l2p++", "linear"):
            (run,) = plan(GRIDS["imagenet-r-5"], [method], [1])
            write_run(tmp_path / run.name, run, 70.0, 78.0)
        grid = GRIDS["mitigation"]
        (row,) = (row for row in self.rows(tmp_path, grid) if row.runs)
        assert (row.title, row.variant, row.seeds) == ("L2P++", {"tasks": 5}, [1])

    def test_what_another_table_has_done_is_not_done_again(self, tmp_path):
        """Also where the user has changed settings, in which case the table cannot tell whose runs they are."""
        changes = {"epochs": 3, "backbone": "vit-s14"}
        for seed in (1, 2):
            (run,) = plan(GRIDS["imagenet-r-5"], ["l2p++"], [seed], changes)
            write_run(tmp_path / run.name, run, 70.0, 78.0)
            (tmp_path / run.name / "report.html").write_text("how it went")
        grid = GRIDS["mitigation"]
        one, two, three = plan(grid, ["l2p++"], [1, 2, 3], {"tasks": 5, **changes})
        (tmp_path / two.name).mkdir(parents=True)  # begun here too: it goes on
        (slower,) = plan(grid, ["l2p++"], [1], {"tasks": 5, **changes, "lr": 0.5})
        (bf16,) = plan(grid, ["l2p++"], [1], {"tasks": 5, **changes, "precision": "bf16"})
        assert left_to_do([one, two, three, slower, bf16], tmp_path) == [two, three, slower, bf16]
        assert left_to_do([one], tmp_path) == []
        assert (tmp_path / one.name / "report.html").read_text() == "how it went"
        (row,) = (row for row in self.rows(tmp_path, grid) if row.runs)
        assert (row.title, row.variant, row.seeds) == ("L2P++", {"tasks": 5}, [1])

    def test_formats_agree(self, out):
        table = self.table(out)
        written = table.write(out)
        assert [path.name for path in written] == ["cub200.md", "cub200.csv", "cub200.tex", "cub200.html"]
        rows = list(csv.DictReader(written[1].open()))
        assert [row["method"] for row in rows] == [row.method for row in self.rows(out)]
        last = rows[-1]
        assert float(last["backward_transfer"]) == -8 and float(last["plasticity"]) == 90
        assert float(last["within_task"]) == 95 and float(last["kept_bytes"]) == 1e6
        assert last["area_under_curve"] == last["peak_memory"] == "", "what was not measured is not 0"
        assert float(last["faa"]) == pytest.approx(262 / 3) and float(last["faa_std"]) == pytest.approx(14**0.5 / 3)
        assert float(last["faa_difference"]) == pytest.approx(262 / 3 - 86.72)
        assert (last["seeds"], last["paper_table"], last["other_backbone"]) == ("1 2 3", "Table 3", "0")
        assert [row["other_backbone"] for row in rows if row["method"] == "ft"] == ["1"]
        latex, page = written[2].read_text(), written[3].read_text()
        assert r"VQ-Prompt & 87.33 $\pm$ 1.25 & 90.33 $\pm$ 1.25 & 4.00 $\pm$ 0.00 & 249,800" in latex
        body = latex[latex.index(r"\midrule") : latex.index(r"\bottomrule")]
        assert body.count(r"\\") == len(rows) and {line.count("&") for line in body.splitlines() if "&" in line} == {11}
        assert rf"\begin{{tabular}}{{l{'r' * 9}ll}}" in latex
        for row in table.rows:
            for cell in row:
                assert cell in page and cell in written[0].read_text()

    def test_figures(self, out):
        (chart,) = make_charts(CUB, self.rows(out))
        assert [line.name for line in chart.lines] == ["VQ-Prompt", "FT"], "as the lines end"
        assert chart.lines[0].values == pytest.approx([mean((92, 93, 95)), 262 / 3])
        written = self.table(out, figure=True).write(out)
        assert written[-1].name == "cub200.svg" and "<svg" in written[3].read_text()
        assert "VQ-Prompt" in "".join(ElementTree.parse(written[-1]).getroot().itertext())

    def test_ablation_plots(self, tmp_path):
        grid = GRIDS["ablation-loss"]
        for n, run in enumerate(plan(grid, seeds=[1])):
            write_run(tmp_path / run.name, run, 50.0 + n, 60.0)
        (chart,) = make_charts(grid, self.rows(tmp_path, grid))
        assert [line.name for line in chart.lines] == [f"VQ-Prompt, vq_weight={w}" for w in (0.0, 0.1, 0.4, 1.0)]
        assert [list(line.values) for line in chart.lines] == [[50.0 + 4 * i + j for j in range(4)] for i in range(4)]
        assert cells(self.table(tmp_path, grid).markdown())  # λ_q = 0.4, λ_c = 0.1 is the paper's default
        assert not any(line.spread for line in chart.lines) and "±" not in chart.caption

    def test_ablation_plots_show_how_seeds_differ(self, tmp_path):
        grid = GRIDS["ablation-loss"]
        for run in plan(grid, seeds=[1, 2]):
            write_run(tmp_path / run.name, run, 50.0 + 2 * run.config.seed * run.config.options["vq_weight"], 60.0)
        (chart,) = make_charts(grid, self.rows(tmp_path, grid))
        for line, weight in zip(chart.lines, (0.0, 0.1, 0.4, 1.0), strict=True):
            assert list(line.values) == pytest.approx([50 + 3 * weight] * 4)
            assert list(line.spread) == pytest.approx([weight] * 4)
        assert "± standard deviation" in chart.caption
        (default,) = [row for row in self.rows(tmp_path, grid) if row.quoted]
        assert default.variant == {"vq_weight": 0.4, "commitment_weight": 0.1}
        grid = GRIDS["ablation-tau"]
        for n, run in enumerate(plan(grid, seeds=[1])):
            write_run(tmp_path / run.name, run, 50.0 + n, 60.0)
        soft, quantized = make_charts(grid, self.rows(tmp_path, grid))[0].lines
        assert list(soft.values) == [50, 51, 52, 53, 54, 55] and list(quantized.values) == [56, 57, 58, 59, 60, 61]

    @pytest.mark.parametrize("name", ["cub200", "cub200-rates", "mitigation", "ablation-tau", "ablation-loss"])
    def test_committed_results(self, bench, tmp_path, name):
        """The tables in the documentation are made from these files, and say what is in them."""
        source = RESULTS / f"{name if name != 'mitigation' else 'cub200'}.json"
        status, out, err = bench("table", name, "--results", source, "--out", tmp_path, "--figure")
        assert status == 0, err
        assert "NVIDIA H200" in out and ("†" in out) == (name != "cub200-rates")
        assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".csv", ".tex", ".html", ".svg"}
        faa = [run["faa"] for run in json.loads(source.read_text()) if run["config"]["method"] == "vq-prompt"]
        if name == "cub200":
            assert len(faa) == 3 and cells(out)["VQ-Prompt§"]["FAA"].startswith(f"{mean(faa):.2f} ±")
            assert cells(out)["VQ-Prompt§"]["paper FAA"] == "86.72 ± 0.94"

    def test_saved_runs_make_the_same_table(self, bench, out, tmp_path):
        status, first, err = bench("table", "cub200", "--out", out, "--save", tmp_path / "new" / "kept.json")
        assert status == 0, err
        status, again, err = bench("table", "cub200", "--results", tmp_path / "new" / "kept.json")
        assert status == 0, err
        whole = {name: row for name, row in cells(first).items() if row["seeds"] != "–"}
        assert cells(again) == whole and len(whole) == 2, "without the rows of which there is only the paper's"
        kept = json.loads((tmp_path / "new" / "kept.json").read_text())
        assert len(kept) == 4, "the unfinished one is no result"
        assert all(run.keys() >= {"faa", "config", "hardware"} and "losses" not in run for run in kept)
        assert all(run["prompt_use"]["counts"] == [[[3, 0]], [[1, 2]]] for run in kept)

    @pytest.mark.parametrize("name", ["streams", "mitigation", "cub200"])
    def test_runs_of_methods_that_the_table_does_not_name_are_shown(self, bench, tmp_path, name):
        runs = json.loads((RESULTS / "streams.json").read_text())
        for options, expected in (
            ((), {run["config"]["method"] for run in runs}),
            (("--methods", "slca,ranpac"), {"slca", "ranpac"}),
        ):
            status, _, err = bench("table", name, "--results", RESULTS / "streams.json", "--out", tmp_path, *options)
            assert status == 0, err
            with open(tmp_path / f"{name}.csv") as file:
                assert {row["method"] for row in csv.DictReader(file)} == expected

    def test_a_file_that_holds_no_results(self, bench, tmp_path):
        file = tmp_path / "x.json"
        assert f"--results {file}: no such file or folder" in bench("table", "cub200", "--results", file)[2]
        incomplete = ['[{"faa": 1}]', '[{"config": {}, "done": true}]', '[{"config": {"method": "ft"}, "done": true}]']
        for text in ("{}", "[1]", "not json", "[" * 100_000, *incomplete):
            file.write_text(text)
            status, _, err = bench("table", "cub200", "--results", file)
            assert status == 2 and str(file) in err

    def test_nothing_to_show(self, bench, tmp_path):
        assert "holds no finished run of vtab" in bench("table", "vtab", "--out", tmp_path)[2]
        assert f"--out {tmp_path / 'x'}: no such file or folder" in bench("table", "vtab", "--out", tmp_path / "x")[2]
        assert bench("table", "vtab")[0] == 2


class TestSummary:
    """Two tables: VQ-Prompt and CODA-P are in both, and SLCA only in one."""

    @pytest.fixture
    def out(self, tmp_path):
        for name, accuracies in {
            "cub200": {"vq-prompt": (70.0, 74.0), "coda-p": (72.0, 72.0), "slca": (90.0, 90.0)},
            "imagenet-r-10": {"vq-prompt": (60.0, 60.0), "coda-p": (50.0, 50.0)},
        }.items():
            for method, values in accuracies.items():
                for run, faa in zip(plan(GRIDS[name], [method], [1, 2]), values, strict=True):
                    write_run(tmp_path / run.name, run, faa, faa)
        return tmp_path

    def test_ranks_and_means_by_hand(self, bench, out):
        status, printed, err = bench("table", "cub200", "imagenet-r-10", "--out", out, "--figure")
        assert status == 0, err
        shown = {"cub200": "72.00 ± 2.00", "imagenet-r-10": "60.00 ± 0.00", "mean": "66.00", "mean rank": "1.25"}
        rows = cells(printed)
        assert rows["VQ-Prompt"] == {"method": "VQ-Prompt", **shown}, "equal on CUB-200: ranks 1.5 and 1"
        assert list(rows) == ["VQ-Prompt", "CODA-P", "SLCA"] and rows["CODA-P"]["mean rank"] == "1.75"
        assert [rows["SLCA"][key] for key in ("imagenet-r-10", "mean", "mean rank")] == ["–", "–", "–"]
        assert "best of the 2 methods that have a number in every column" in printed
        last = list(csv.DictReader((out / "summary.csv").read_text().splitlines()))[1]
        assert (last["method"], float(last["mean"]), float(last["mean_rank"])) == ("CODA-P", 61.0, 1.75)
        assert r"VQ-Prompt & 72.00 $\pm$ 2.00 & 60.00 $\pm$ 0.00 & 66.00 & 1.25 \\" in (out / "summary.tex").read_text()
        assert "CODA-P" in "".join(ElementTree.parse(out / "summary.svg").getroot().itertext())
        assert "<svg" in (out / "summary.html").read_text()

    def test_each_table_has_its_own_results(self, bench, out):
        for name in ("cub200", "imagenet-r-10"):
            assert bench("table", name, "--out", out, "--save", out / f"{name}.json")[0] == 0
        names, files = ["cub200", "imagenet-r-10"], [out / "cub200.json", out / "imagenet-r-10.json"]
        status, _, err = bench("table", *names, "--results", files[0])
        assert status == 2 and "--results for each table, in their order" in err
        status, printed, err = bench("table", *names, *(part for file in files for part in ("--results", file)))
        assert status == 0 and cells(printed)["VQ-Prompt"]["mean rank"] == "1.25", err

    def test_one_table_of_two_sets_of_runs(self, bench, out):
        """Such as with two data sets: none of them may be lost."""
        (other,) = plan(GRIDS["cub200"], ["vq-prompt"], [1], {"data": "flowers102=/flowers"})
        write_run(out / "flowers" / other.name, other, 90.0, 90.0)
        sources = [out / "cub200", out / "flowers"]
        given = [part for source in sources for part in ("--results", source)]
        status, printed, err = bench("table", "cub200", "cub200", *given)
        assert status == 0, err
        row = cells(printed)["VQ-Prompt"]
        assert [row[f"cub200 ({source.stem})"] for source in sources] == ["72.00 ± 2.00", "90.00§"]


def test_list(bench):
    status, out, _ = bench("list")
    names = {line.split()[0] for line in out.splitlines() if line.split()}
    assert status == 0 and {*GRIDS} <= names


class TestParameters:
    """Table 6 of the paper, counted from the methods."""

    tool = runpy.run_path(str(RESULTS.parent / "tools" / "prompt_table.py"))

    def rows(self) -> dict[tuple[str, str], list[str]]:
        return {(method, settings): rest for method, settings, *rest in self.tool["prompt_configurations"]().rows}

    def test_configurations_are_the_paper_s(self):
        rows, five = self.rows(), "[0 1 2 3 4]"
        assert rows["L2P++", "default"][:4] == ["Pre-T", "[0]", "30", "20"]
        assert rows["Deep L2P++", "default"][:4] == ["Pre-T", five, "30", "20"]
        assert rows["DualPrompt", "default"][:4] == ["Pre-T", "G: [0 1], E: [2 3 4]", "G: 1, E: 10", "G: 6, E: 20"]
        assert rows["CODA-P", "default"][:4] == ["Pre-T", five, "100", "8"]
        assert rows["HiDe-Prompt", "default"][:4] == ["Pre-T", five, "10", "40"]
        assert rows["HiDe-Prompt", "preset cifar-100"][:4] == ["Pre-T", five, "10", "10"]
        assert rows["EvoPrompt", "default"][0] == "Pro-T" and rows["EvoPrompt", "default"][3] == "5"
        assert rows["EvoPrompt", "default"][1] == f"[{' '.join(map(str, range(12)))}]"
        assert rows["VQ-Prompt", "default"][:4] == ["Pre-T", five, "10", "8"]
        assert ("FT", "default") not in rows, "it does not prompt"
        assert ("APER", "default") not in rows, "it has adapters, not prompts"

    def test_parameters_are_counted(self):
        rows = self.rows()
        # in each of 5 blocks: 10 keys and 10 prompts of length 8, all 768 wide
        assert rows["VQ-Prompt", "default"][-1] == f"{5 * 10 * (1 + 8) * 768:,}"
        assert rows["HiDe-Prompt", "default"][-1] == f"{5 * 10 * 40 * 768:,}"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--set", "seed=3"], "seed cannot be set"), (["--seeds", "one"], "1,2,3"),
     (["--methods", "vq"], "unknown method"),
     (["--set", "taw=1"], "taw")],
)  # fmt: skip
def test_refusals(bench, tmp_path, arguments, word):
    status, _, err = bench("run", "cub200", "--small", "--out", tmp_path, *arguments)
    assert status == 2 and word in err and err.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.spawns
@pytest.mark.slow
def test_one_fails_the_others_finish_and_nothing_is_done_twice(bench, tmp_path, tiny, monkeypatch):
    """Of four runs the first is killed, the second's folder is another run's, the third was interrupted before."""
    grid = find_grid("cub200", small=True)
    todo = plan(grid, ["linear", "vq-prompt"], [1, 2], tiny)
    killed, blocked, interrupted, _ = todo
    (tmp_path / blocked.name).mkdir(parents=True)
    (tmp_path / blocked.name / "config.json").write_text("{}")

    def stop(event):
        if event.task == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(interrupted.config, tmp_path / interrupted.name, progress=stop)
    first = json.loads((tmp_path / interrupted.name / "metrics.json").read_text())["task_seconds"]

    failed = {}
    for run, event in LocalExecutor(1).run(todo, tmp_path):
        if run is killed and isinstance(event, Advanced):
            for child in active_children():
                os.kill(child.pid, signal.SIGKILL)
        if isinstance(event, Failed):
            failed[run.name] = event.reason
    assert list(failed) == [killed.name, blocked.name]
    assert "ended with status -9" in failed[killed.name] and "other settings" in failed[blocked.name]
    seconds = json.loads((tmp_path / interrupted.name / "metrics.json").read_text())["task_seconds"]
    assert len(seconds) == 4 and seconds[0] == first[0], "the first task was not learned again"

    times = {run.name: (tmp_path / run.name / "metrics.json").stat().st_mtime_ns for run in todo[2:]}
    options = ["run", "cub200", "--small", "--out", tmp_path, "--methods", "linear,vq-prompt", "--seeds", "1,2"]
    for key, value in tiny.items():
        options += ["--set", f"{key}={value}"]
    status, out, err = bench(*options)
    assert status == 1, "one is still blocked"
    assert "2 of 4 runs are done already" in out and f"✓ {killed.name}" in out and f"✗ {blocked.name}" in out
    assert "1 of 4 runs failed" in err and f"{blocked.name}: " in err
    assert times == {run.name: (tmp_path / run.name / "metrics.json").stat().st_mtime_ns for run in todo[2:]}

    (tmp_path / blocked.name / "config.json").write_text(blocked.config.model_dump_json())
    (tmp_path / blocked.name / "metrics.json").write_text(
        (tmp_path / killed.name / "metrics.json").read_text().replace('"seed": 1', '"seed": 2')
    )
    monkeypatch.setattr(runner, "start_worker", lambda *given: pytest.fail("nothing is left to do"))
    status, out, _ = bench(*options)
    assert status == 0 and "4 of 4 runs are done already" in out
    metrics = [json.loads((tmp_path / run.name / "metrics.json").read_text()) for run in todo]
    faa = [result["faa"] for result in metrics[2:]]
    assert f"{mean(faa):.2f} ± {abs(faa[0] - faa[1]) / 2:.2f}†" in out
    assert f'href="{quote(interrupted.name)}/report.html"' in (tmp_path / "cub200-small.html").read_text()


def test_runs_that_share_queries_end_as_runs_alone_do(tmp_path, tiny):
    changes = {**tiny, "tasks": [2, 2], "augment": "crop"}
    todo = plan(smaller(CUB), ["linear", "vq-prompt", "hide-prompt"], [1], changes)
    assert not any(isinstance(event, Failed) for _, event in LocalExecutor(1).run(todo, tmp_path / "shared"))
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["cub200-small"], "what they shared is gone"
    for run in todo:
        alone = runs.run(run.config, tmp_path / "alone" / run.name, report=False)
        assert json.loads((tmp_path / "shared" / run.name / "metrics.json").read_text())["accuracy"] == alone.accuracy


def test_a_worker_that_is_killed_between_two_runs_costs_none(tmp_path, tiny):
    first, *others = plan(smaller(CUB), ["linear"], [1, 2], {**tiny, "tasks": [2, 2]})

    def more():
        for worker in active_children() if others else ():
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        return [others.pop()] if others else []

    events = [event for _, event in LocalExecutor(1).run([first], tmp_path, more=more)]
    assert [type(event) for event in events if isinstance(event, Failed | Finished)] == [Finished] * 2


def test_nothing_is_waited_for_when_no_run_could_be_started(tmp_path, tiny):
    class Nowhere(Executor):
        at_once = 1

        def opened(self, todo):
            return nullcontext()

        def start(self, run):
            raise OSError("no room")

        def events(self):
            pytest.fail("would wait for ever")

    todo = plan(smaller(CUB), ["linear"], [1], tiny)
    assert {event for _, event in Nowhere().run(todo, tmp_path)} == {Failed("no room")}


def test_all_methods_each_with_its_settings(bench, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(
        bench_cli, "run_with_bars", lambda todo, *rest: seen.update({r.config.method: r for r in todo}) or {}
    )
    file = tmp_path / "rates.toml"
    file.write_text('["l2p++"]\nlr = 0.125\n"rebalancing.lr" = 0.5\n')
    options = ["run", "cub200", "--small", "--methods", "all", "--seeds", "1", "--settings", file, "--out", tmp_path]
    status, _, err = bench(*options)
    assert status == 0, err
    assert seen.keys() == METHODS.keys()
    assert (seen["l2p++"].config.lr, seen["l2p++"].config.options["rebalancing"]["lr"]) == (0.125, 0.5)
    assert seen["coda-p"].config.lr == 1e-3
    for text, why in (
        ("[l2q]\nlr = 1", "l2q"),
        ("lr = 1", "lr"),
        ("[ft]\nseed = 3", "seed cannot be set"),
        ("][", "TOML"),
    ):
        file.write_text(text)
        status, _, err = bench(*options)
        assert status == 2 and why in err, err


@pytest.mark.slow
def test_every_table_small_end_to_end(tmp_path, tiny):
    """All of them with a very small backbone, by one worker. Of the many runs of a table, every third."""
    grids = [smaller(grid) for grid in GRIDS.values()]
    changes = {**tiny, "tasks": [2, 2]}
    todo = []
    for grid in grids:
        runs_of_grid = plan(replace(grid, seeds=(1,)), changes=changes)
        todo += runs_of_grid[:: 3 if len(runs_of_grid) > 4 else 1]
    assert not any(isinstance(event, Failed) for _, event in LocalExecutor(1).run(todo, tmp_path))
    finished = read_runs(tmp_path)
    assert len(finished) == len(todo)
    for grid in grids:
        rows = make_rows(grid, finished, tmp_path)
        assert sum(len(row.runs) for row in rows) == sum(run.name.startswith(f"{grid.name}/") for run in todo)
        names = {path.suffix for path in make_table(grid, rows, figure=True).write(tmp_path)}
        assert names == {".md", ".csv", ".tex", ".html", ".svg"}


def test_differences_know_what_matters():
    (a,), (b,) = (plan(CUB, ["vq-prompt-s"], [seed], {"rebalancing.lr": lr}) for seed, lr in ((1, 1e-3), (2, 1e-2)))
    one, other = (run.config.model_dump(mode="json") for run in (a, b))
    assert differences(one, other) == {}, "nothing is rebalanced, so its rate does not matter"
    assert differences(one, {**one, "precision": "bf16"}) == {"precision": ("auto", "bf16")}
    assert differences({**one, "data": "/my/cub200.zip", "device": "cuda"}, one) == {}
    older = {key: value for key, value in one.items() if key != "test_crop"}
    assert differences(older, one) == {}
    assert differences({**one, "data": "/a/photos.v1"}, {**one, "data": "/b/photos.v2"}).keys() == {"data"}
    assert differences({**one, "backbone": "a/model.pth"}, {**one, "backbone": "b/model.pth"}).keys() == {"backbone"}


def test_which_runs_are_one_and_the_same(tmp_path):
    (run,) = plan(CUB, ["vq-prompt"], [1], {"data": "cub200=/here/birds.zip", "backbone": "vit-s14"})
    write_run(tmp_path / "other" / "seed1", run, 50.0, 60.0)
    written = json.loads((tmp_path / "other" / "seed1" / "config.json").read_text())
    del written["options"]["learn"]  # an option that did not exist when it was written
    (tmp_path / "other" / "seed1" / "config.json").write_text(json.dumps(written))

    def known(**changes) -> bool:
        given = {"data": "cub200=/here/birds.zip", "backbone": "vit-s14", **changes}
        (run,) = plan(CUB, ["vq-prompt"], [1], given)
        left = left_to_do([run], tmp_path)
        shutil.rmtree(tmp_path / run.name, ignore_errors=True)  # as if it had not been linked
        return not left

    assert known() and known(data="cub200=/elsewhere/birds.zip") and known(device="cpu", deterministic=False)
    assert not known(data="/here/birds.zip") and not known(learn="first-task") and not known(precision="bf16")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.pth").touch()
    given = {"data": "/here/birds.zip", "backbone": str(tmp_path / "a" / "model.pth")}
    (run,) = plan(CUB, ["vq-prompt"], [1], given)
    write_run(tmp_path / "other" / "seed2", run, 50.0, 60.0)
    assert known(**given) and not known(**{**given, "backbone": str(tmp_path / "b" / "model.pth")})
    assert not known(**{**given, "data": "/there/birds.zip"})


def test_an_interrupted_adoption_leaves_nothing_behind(tmp_path, monkeypatch):
    (run,) = plan(CUB, ["vq-prompt"], [1])
    write_run(tmp_path / "other" / "seed1", run, 50.0, 60.0)
    place = tmp_path / run.name
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "getpid", lambda: (1 << 22) + 1)  # a process that is not there any more
        patch.setattr(runner, "_link", lambda source, target: interrupt(shutil.copy(source, target)))
        left_to_do([run], tmp_path)
    assert not place.exists() and len(read_runs(tmp_path)) == 1
    assert left_to_do([run], tmp_path) == [] and list(place.parent.iterdir()) == [place]


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_refused_before_any_run(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("vqprompt.commands.bench.run_with_bars", lambda *given: pytest.fail("runs began"))
    for data, word in (("foo=1", "neither a data set"), ("cub200=/no/such.zip", "/no/such.zip does not exist")):
        status, _, err = bench("run", "cub200", "--small", "--data", data, "--out", tmp_path / "out")
        assert status == 2 and word in err and err.count("error") == 1
    (tmp_path / "file").touch()
    status, _, err = bench("run", "cub200", "--small", "--out", tmp_path / "file" / "out")
    assert status == 2 and "is a file; give a folder" in err
    status, _, err = bench("run", "streams", "--small", "--methods", "simplecil,ease", "--out", tmp_path / "out")
    assert status == 2 and "ease cannot learn --stream domains" in err, "the last stream of the table it can"


def test_nothing_is_planned_twice(bench, tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr("vqprompt.commands.bench.run_with_bars", lambda todo, *rest: planned.extend(todo) or {})
    bench("run", "cub200", "--small", "--methods", "linear,vq-prompt,linear", "--seeds", "1,1", "--out", tmp_path)
    assert [run.name.split("/")[1:] for run in planned] == [["vq-prompt", "seed1"], ["linear", "seed1"]]

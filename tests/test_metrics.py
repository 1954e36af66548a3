"""Numbers worked out by hand. accuracy[i][j]: task i after task j."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqprompt.core import metrics as m
from vqprompt.core.errors import UserError
from vqprompt.research.results.result import EpochLosses, ParameterCounts, RunResult

THREE = [
    [90.0, 60.0, 30.0],
    [None, 80.0, 70.0],
    [None, None, 50.0],
]


def test_three_tasks_by_hand():
    assert m.average_accuracies(THREE) == [90, (60 + 80) / 2, (30 + 70 + 50) / 3]
    assert m.forgetting_per_task(THREE) == [90 - 30, 80 - 70]
    assert m.forgetting(THREE) == 35


def test_what_tasks_do_to_each_other_by_hand():
    assert m.transfer(THREE) == {
        "backward_transfer": (30 - 90 + 70 - 80) / 2, "plasticity": (90 + 80 + 50) / 3, "new_accuracy": (80 + 50) / 2,
        "old_accuracy": (60 + (30 + 70) / 2) / 2,
    }  # fmt: skip
    assert m.area_under_curve([(10, 50.0), (30, 80.0)]) == (10 * 50 + 20 * 80) / 30, (
        "a test counts for the images before"
    )


def test_forgetting_is_measured_from_the_best_and_may_be_negative():
    learned_later = [[50.0, 80.0, 60.0], [None, 40.0, 45.0], [None, None, 10.0]]
    assert m.forgetting_per_task(learned_later) == [20, -5]
    assert m.forgetting(learned_later) == 7.5


def test_a_single_task():
    assert m.average_accuracies([[73.0]]) == [73]
    assert m.forgetting_per_task([[73.0]]) == []
    assert m.forgetting([[73.0]]) == 0


def test_tasks_count_alike_whatever_their_size():
    """FAA is a mean over tasks, as in the appendix, not over images."""
    assert m.average_accuracies([[100.0, 100.0], [None, 0.0]])[-1] == 50


@pytest.mark.parametrize("i, j", [(0, 0), (0, 1), (1, 1), (0, 2), (2, 2)])
def test_an_incomplete_matrix_is_refused(i, j):
    holed = [list(row) for row in THREE]
    holed[i][j] = None
    with pytest.raises(ValueError, match=f"after task {j + 1} is incomplete"):
        m.average_accuracies(holed)


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(st.floats(0, 100), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_bounds_hold_for_any_matrix(full):
    n = len(full)
    matrix = [[full[i][j] if j >= i else None for j in range(n)] for i in range(n)]
    assert all(0 <= average <= 100 + 1e-9 for average in m.average_accuracies(matrix))
    assert -100 <= m.forgetting(matrix) <= 100


class TestResult:
    """metrics.json: what is written is what is read."""

    def test_comes_back_as_it_was(self, tmp_path):
        losses = [EpochLosses(task=0, epoch=0, losses={"task": 0.1, "vq": math.inf})]
        counts = ParameterCounts(prompting=1, trainable=2)
        result = RunResult(done=True, faa=100 / 3, accuracy=[[1.5, None]], losses=losses, parameters=counts)
        result.write(tmp_path)
        assert RunResult.read(tmp_path) == result

    def test_a_loss_that_diverged(self, tmp_path):
        RunResult(done=True, losses=[EpochLosses(task=0, epoch=0, losses={"task": math.nan})]).write(tmp_path)
        assert math.isnan(RunResult.read(tmp_path).losses[0].losses["task"])

    def test_files_of_older_versions_lack_fields(self, tmp_path):
        (tmp_path / "metrics.json").write_text('{"done": true, "faa": 50.0, "no_longer_known": 1}')
        result = RunResult.read(tmp_path)
        assert (result.schema_version, result.faa, result.caa, result.losses) == (1, 50.0, None, [])
        assert result.measures == {} and result.kept_bytes is None
        (tmp_path / "metrics.json").write_text(json.dumps({"done": True, "accuracy": THREE}))
        assert RunResult.read(tmp_path).measures == m.transfer(THREE), "they follow from the accuracies"

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "cannot be read"), ("[]", "not the result of a run"), ('{"faa": 1}', "done"),
         ('{"done": true, "schema_version": 99}', "written by a newer vqprompt")],
    )  # fmt: skip
    def test_other_files_are_refused(self, tmp_path, text, message):
        (tmp_path / "metrics.json").write_text(text)
        with pytest.raises(UserError, match=message):
            RunResult.read(tmp_path)

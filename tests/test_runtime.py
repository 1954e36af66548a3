"""What decides the last bits of a result is recorded with a run, and a resume elsewhere says what it is worth."""

import os
import threading

import pytest
import torch
from conftest import Killed

from vqprompt.core.progress import Stage
from vqprompt.core.runtime.device import keep_kernels, rounding, seeded
from vqprompt.research.results.config import resolve
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner as runs

pytestmark = pytest.mark.bits
CPU = torch.device("cpu")


@pytest.fixture
def threads():
    """Sets the number of threads; afterwards it is what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path, tiny_weights):
    settings = {"data": "quickdraw50", "backbone": str(tiny_weights), "size": 28, "tasks": [2, 2],
                "epochs": 2, "batch_size": 8, "train_per_class": 6, "test_per_class": 3, "device": "cpu"}  # fmt: skip

    def go(kill: bool = False, resume: bool = False) -> RunResult | None:
        def progress(event):
            if kill and event.task == 1 and event.stage is Stage.TESTING:
                raise Killed

        out = tmp_path / "run"
        if not kill:
            return runs.run(resolve(settings), out, resume, progress, checkpoint_seconds=0, report=False)
        with pytest.raises(Killed):
            runs.run(resolve(settings), out, resume, progress, checkpoint_seconds=0, report=False)
        return None

    return go


def notes(result: RunResult) -> list[str]:
    return [note for note in result.notes if "rounding" in note]


def test_processor_threads_and_version_are_recorded(run, threads, tmp_path):
    threads(3)
    found = rounding(CPU)
    assert found["threads"] == 3 and found["torch"] == torch.__version__ and found["device"]
    assert found["vector instructions"] == torch.backends.cpu.get_cpu_capability()
    result = run()
    assert result.rounding == [found] == RunResult.read(tmp_path / "run").rounding
    assert notes(result) == []


def test_resumed_where_it_began_there_is_nothing_to_note(run):
    run(kill=True)
    result = run(resume=True)
    assert result.done and len(result.rounding) == 1 and notes(result) == []


def test_resumed_with_another_number_of_threads_it_says_so(run, threads, tmp_path):
    threads(1)
    run(kill=True)
    threads(2)
    result = run(resume=True)
    assert [machine["threads"] for machine in result.rounding] == [1, 2]
    assert len(notes(result)) == 1 and "number of threads" in notes(result)[0]
    threads(1)
    again = run(resume=True)  # it is over, and what it is stays true
    assert again.rounding == result.rounding and notes(again) == notes(result)
    assert notes(RunResult.read(tmp_path / "run")) == notes(result)


def test_two_threads_that_draw_from_seeds_do_not_meet():
    """PyTorch has one random state for all threads."""
    torch.manual_seed(5)
    state, found = torch.random.get_rng_state(), []

    def draw(seed):
        for _ in range(50):
            with seeded(seed):
                found.append((seed, torch.rand(100).sum().item()))

    workers = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(found)) == 4 and len(found) == 200
    assert torch.equal(torch.random.get_rng_state(), state)


def test_compiled_kernels_are_kept_where_the_user_wants_them_and_only_where_they_can_be(tmp_path, monkeypatch):
    place = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(place, "")  # so that it is restored afterwards
    monkeypatch.delenv(place)
    (tmp_path / "file").touch()
    keep_kernels(tmp_path / "file" / "kernels")
    assert place not in os.environ
    keep_kernels(tmp_path / "cache" / "kernels")
    assert os.environ[place] == str(tmp_path / "cache" / "kernels")
    keep_kernels(tmp_path / "other")
    assert os.environ[place] == str(tmp_path / "cache" / "kernels"), "a place that is set already is respected"

"""Nothing is lost: a run killed at any moment, then resumed, ends with the same bits as one never killed.

Here it dies of an exception that nobody catches. With SIGKILL it is killed in faults/kills.py, at every step on disk,
and as a command in test_ranks.py.
"""

import json
import os
import time
from pathlib import Path

import pytest
from conftest import Killed, same_tensors

from vqprompt.core.progress import ignore
from vqprompt.research.learner import checkpoint
from vqprompt.research.learner.checkpoint import read_checkpoint
from vqprompt.research.results.config import resolve
from vqprompt.research.runs import runner as runs

TIMES = {"seconds", "task_seconds", "images_per_second", "peak_memory"}


def outcome(folder: Path):
    """Everything a run found out, but how long it took."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return {k: v for k, v in metrics.items() if k not in TIMES}


def assert_same_end(a: Path, b: Path) -> None:
    assert outcome(a)["done"] and outcome(b)["done"]
    assert outcome(a)["accuracy"] == outcome(b)["accuracy"]
    assert outcome(a) == outcome(b)
    assert same_tensors(read_checkpoint(a)[0], read_checkpoint(b)[0])


@pytest.fixture
def tiny_run(tmp_path, tiny_weights, monkeypatch):
    """A run of the tiny ViT that is over in a moment, with a checkpoint after every epoch."""

    def run(out: str, method: str, resume: bool = False, progress=ignore) -> Path:
        monkeypatch.setenv("VQPROMPT_HOME", str(tmp_path / f"home of {out}"))
        config = resolve(
            {"data": "quickdraw50", "backbone": str(tiny_weights), "method": method, "size": 28,
             "tasks": [2, 2], "epochs": 2, "batch_size": 8, "train_per_class": 6, "test_per_class": 3, "seed": 1}
        )  # fmt: skip
        runs.run(config, tmp_path / out, resume, progress, checkpoint_seconds=0, report=False)
        return tmp_path / out

    return run


@pytest.mark.bits
def test_killed_before_every_single_write(tiny_run, monkeypatch):
    """Every file comes into being through one os.replace: die at the first, at the second, … at the last."""
    plain, calls, fatal = os.replace, 0, -1

    def dying(source, target):
        nonlocal calls
        calls += 1
        if calls == fatal:
            raise Killed
        plain(source, target)

    monkeypatch.setattr(os, "replace", dying)
    whole = tiny_run("whole", "vq-prompt")
    writes = calls
    assert writes >= 12, "config, checkpoints in and between tasks, metrics"
    for fatal in range(1, writes + 1):
        calls = 0
        with pytest.raises(Killed):
            tiny_run(f"killed {fatal}", "vq-prompt")
        assert_same_end(whole, tiny_run(f"killed {fatal}", "vq-prompt", resume=True))


@pytest.mark.bits
def test_killed_after_every_single_batch(tiny_run):
    """No write is near: what was done since the last checkpoint is done again, to the same end."""
    calls, fatal = 0, -1

    def dying(event):
        nonlocal calls
        calls += 1
        if calls == fatal:
            raise Killed

    whole = tiny_run("whole", "vq-prompt", progress=dying)
    batches = calls
    assert batches >= 10, "training, statistics and tests of two tasks"
    for fatal in range(1, batches + 1):
        calls = 0
        with pytest.raises(Killed):
            tiny_run(f"killed {fatal}", "vq-prompt", progress=dying)
        assert_same_end(whole, tiny_run(f"killed {fatal}", "vq-prompt", resume=True))


def test_a_resume_reads_its_checkpoint_once(tiny_run, tmp_path, monkeypatch):
    """Reading and checksumming a tuned ViT-B/16 with its optimizer takes a gigabyte each time."""
    calls = 0

    def dying(event):
        nonlocal calls
        calls += 1
        if event.task == 1:
            raise Killed

    with pytest.raises(Killed):
        tiny_run("killed", "vq-prompt", progress=dying)
    (state,) = (tmp_path / "killed").glob("state-*")
    opened, plain = [], checkpoint.read_regular
    monkeypatch.setattr(checkpoint, "read_regular", lambda path: opened.append(path) or plain(path))
    tiny_run("killed", "vq-prompt", resume=True)
    assert opened.count(state) == 1


def test_the_time_before_a_kill_is_counted(tiny_run, monkeypatch):
    """Of a task that was killed after its first epoch, both parts."""
    clock, real, calls = 0.0, time.perf_counter, 0
    monkeypatch.setattr(time, "perf_counter", lambda: real() + clock)

    def dying(event):
        nonlocal clock, calls
        calls += 1
        if calls == 1:
            clock += 1000  # a long first batch
        if calls == 3:
            raise Killed

    with pytest.raises(Killed):
        tiny_run("killed", "vq-prompt", progress=dying)
    seconds = json.loads((tiny_run("killed", "vq-prompt", resume=True) / "metrics.json").read_text())["task_seconds"]
    assert len(seconds) == 2 and seconds[0] > 1000 > seconds[1]

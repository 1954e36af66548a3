"""A run folder that an earlier version wrote, in the middle of its second task: it still resumes, predicts and can be
read.

`run-of-version-2.end.safetensors` is the state that the first version reached at the end. Equal bits can be asked for
only where the rounding is that of the machine it was written on (`WRITTEN_ON`).
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vqprompt.core.data.stream import Stream
from vqprompt.core.runtime.device import rounding
from vqprompt.research.datasets import open_dataset
from vqprompt.research.learner.checkpoint import read_checkpoint
from vqprompt.research.learner.learner import Learner
from vqprompt.research.learner.predictor import Predictor
from vqprompt.research.results.config import resolve
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner as runs

pytestmark = pytest.mark.bits
DATA = Path(__file__).parent / "data"
END = DATA / "run-of-version-2.end.safetensors"
SETTINGS = {
    "data": "quickdraw50", "tasks": [2, 2, 2], "method": "vq-prompt", "backbone": "vit-s14", "seed": 2, "size": 28,
    "epochs": 3, "batch_size": 12, "augment": "none", "test_crop": 0.0, "train_per_class": 12, "test_per_class": 5,
    "device": "cpu", "pool": 3, "length": 2, "blocks": [0, 1],
}  # fmt: skip
WRITTEN_ON = {
    "device": "AMD EPYC", "vector instructions": "AVX2", "oneDNN": "default", "threads": 1, "torch": "2.13.0+cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """As the old run had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(DATA / "run-of-version-2", tmp_path / "run"))


def test_it_is_resumed_to_the_end_that_the_first_version_reached(folder):
    result = runs.run(resolve(SETTINGS), folder, resume=True, report=False)
    assert result.accuracy == [[80, 70, 50], [None, 40, 40], [None, None, 50]]
    assert [(entry.task, entry.epoch) for entry in result.losses] == [(t, e) for t in range(3) for e in range(3)]
    tensors, expected = read_checkpoint(folder)[0], load_file(END)
    assert tensors.keys() == expected.keys()
    expected.pop("method.statistics.seen")  # one number then, one per class now
    for name, tensor in expected.items():
        if rounding(torch.device("cpu")) == WRITTEN_ON:
            assert torch.equal(tensors[name], tensor), name
        else:
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-3, atol=1e-4)
    again = RunResult.read(folder)
    assert again.done and again.rounding == result.rounding and rounding(torch.device("cpu")) in again.rounding
    assert any("rounding" in note for note in result.notes) == (len(result.rounding) > 1)


def test_its_result_so_far_is_read(folder):
    result = RunResult.read(folder)
    assert (result.done, result.learned, result.accuracy[0][0]) == (False, 1, 80)
    assert (result.schema_version, bool(result.rounding)) == (2, True)


def test_it_predicts_what_it_had_learned(folder):
    """A learner, and a predictor, which needs nothing of the training."""
    stream = Stream(open_dataset("quickdraw50", size=28), [2, 2, 2], 2, 0.0, 12, 5)
    task = stream.tasks[0]
    drawings = list(task.test.read(torch.arange(10), torch.device("cpu"))[:, 0].numpy())
    predictor, learner = Predictor.load(folder, device="cpu"), Learner.load(folder, device="cpu")
    assert list(predictor.classes) == learner.classes == task.classes
    assert torch.equal(predictor.predict_proba(drawings), learner.predict_proba(drawings))
    right = [name == task.classes[i] for name, i in zip(predictor.predict(drawings), task.test.labels, strict=True)]
    assert sum(right) >= 7, "8 of 10 when the task was learned"

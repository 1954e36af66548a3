"""Two processes learn what one learns; and when one of them is lost, nothing else is."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import two_ranks
from conftest import command_environment

from vqprompt.commands.run import explain_statuses
from vqprompt.core.errors import UserError
from vqprompt.core.runtime import distributed
from vqprompt.core.runtime.distributed import Part, Ranks
from vqprompt.core.runtime.lifelines import LOST_STATUS
from vqprompt.research.methods import METHODS
from vqprompt.research.results.config import read_config_file, resolve
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(scope="session")
def of_two(tmp_path_factory):
    """What two processes find for every method, in one start."""
    file, home = tmp_path_factory.mktemp("two") / "found.pt", tmp_path_factory.mktemp("home of two")
    worker = [*TORCHRUN, two_ranks.__file__, str(file)]
    ended = subprocess.run(worker, env=command_environment(home), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return torch.load(file, weights_only=False) | {"folder": file.parent}


def test_features_of_two_processes_are_those_of_one(of_two):
    """They are computed in the same batches, so they are equal to the bit."""
    alone, together = two_ranks.frozen_features(), of_two["features"]
    assert len(together) == len(alone) > 64, "more than one batch, so that both had a turn"
    assert torch.equal(together, alone)


def test_sums_of_two_processes_are_those_of_one(of_two):
    """n, Σx and Σxxᵀ, in float64: each process adds up the batches that are its turn, and the sums are added up."""
    alone, together = two_ranks.class_sums(), of_two["sums"]
    assert alone.keys() == together.keys()
    for name, one in alone.items():
        if name.endswith("turns"):
            assert (int(one), int(together[name])) == (2, 1), "the other process had the other batch"
        else:
            assert one.dtype == together[name].dtype == torch.float64
            torch.testing.assert_close(together[name], one, rtol=1e-10, atol=1e-10)


def test_only_the_first_process_writes(of_two):
    first, second = (of_two["folder"] / f"run of {rank}" for rank in (0, 1))
    assert RunResult.read(first).done and RunResult.read(first).processes == 2
    assert (first / "report.html").exists() and not second.exists()


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_learn_what_one_learns(of_two, method):
    compare(two_ranks.learn(method), two_ranks.Learned(*of_two[method]))


def test_two_processes_can_have_their_queries_in_files(of_two):
    compare(two_ranks.learn("coda-p", augment="flip"), two_ranks.Learned(*of_two["queries in files"]))


def test_two_processes_solve_for_the_classifier_of_one(of_two):
    compare(two_ranks.learn("linear", two_ranks.CLOSED_FORM), two_ranks.Learned(*of_two["closed form"]))


def compare(alone: two_ranks.Learned, together: two_ranks.Learned) -> None:
    assert alone.tensors.keys() == together.tensors.keys()
    for name, one in alone.tensors.items():
        two = together.tensors[name]
        assert (two.shape, two.dtype) == (one.shape, one.dtype), name
        if name.endswith("qkv.bias"):  # nothing depends on the keys' biases; AdamW makes steps of their rounding errors
            one, two = (bias.unflatten(0, (3, -1))[::2] for bias in (one, two))
        if not one.numel():
            continue
        off = (two.double() - one.double()).abs() / max(1.0, float(one.abs().max()))
        assert off.square().mean().sqrt() <= 5e-6, name
        # AdamW enlarges the rounding, which differs between processors, of the few gradients whose terms cancel out
        assert off.max() <= 1e-4, f"{name}: {int((off > 1e-5).sum())} of {off.numel()} elements differ"
    assert alone.losses.keys() == together.losses.keys()
    for name, steps in alone.losses.items():
        assert together.losses[name] == pytest.approx(steps, abs=1e-5), name
    assert together.accuracies == alone.accuracies


# ---------------------------------------------------------------------------------------------- lost processes


class Storm:
    """A run that is started again and again, in one process or two."""

    EPOCHS = 40
    ARGUMENTS = ("--data", "quickdraw50", "--tasks", "3,3", "--size", "28", "--epochs", str(EPOCHS), "--batch-size",
                 "8", "--seed", "2", "--set", "train_per_class=6", "--set", "test_per_class=5", "--resume")  # fmt: skip

    def __init__(self, folder: Path, home: Path, backbone: Path) -> None:
        self.out, self.arguments = folder, [*self.ARGUMENTS, "--backbone", str(backbone), "--out", str(folder)]
        self.environment = command_environment(home) | {"VQPROMPT_CHECKPOINT_SECONDS": "0"}

    def start(self, *prefix: str, more: tuple[str, ...] = (), patience: int = 600) -> subprocess.Popen:
        """patience: seconds without a sign of life; processes give one every two seconds, if they get to it."""
        command = [*(prefix or [sys.executable]), "-m", "vqprompt", "run", *self.arguments, *more]
        return subprocess.Popen(
            command, env=self.environment | {"VQPROMPT_PATIENCE": str(patience)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def epochs_saved(self) -> int:
        path = self.out / "checkpoint.json"
        saved = json.loads(path.read_text()) if path.exists() else {"tasks": [], "unfinished": None}
        return self.EPOCHS * len(saved["tasks"]) + (saved["unfinished"] or {"epoch": 0})["epoch"]

    def wait_for_progress(self, process: subprocess.Popen) -> None:
        before, end = self.epochs_saved(), time.monotonic() + 600
        while self.epochs_saved() < before + 2:
            assert process.poll() is None and time.monotonic() < end, process.stdout.read()
            time.sleep(0.01)

    def ranks(self) -> dict[int, int]:
        """Process numbers by rank."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                mine = str(self.out) in (place / "cmdline").read_text()
                settings = dict(pair.partition("=")[::2] for pair in (place / "environ").read_text().split("\0"))
            except OSError:
                continue
            if mine and "RANK" in settings:
                found[int(settings["RANK"])] = int(place.name)
        return found


@pytest.mark.parametrize("other", [LOST_STATUS, 128 + signal.SIGTERM, -signal.SIGTERM])
def test_the_launcher_reports_a_killed_process_however_the_others_ended(other, capsys):
    assert explain_statuses({0: -signal.SIGKILL, 1: other}, 2) == 1
    assert "process 1 of 2 was killed (SIGKILL)" in capsys.readouterr().err


def test_the_launcher_adds_nothing_to_what_a_process_has_printed(capsys):
    assert explain_statuses({0: 2, 1: 128 + signal.SIGTERM}, 2) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its processes in /proc")
def test_lost_processes_lose_nothing(tmp_path, home, tiny_weights):
    """Of two processes one is killed; then the one that goes on; then one of two hangs, and all are killed. The run
    goes on with one process, and finds what a calm run of one process finds."""
    storm = Storm(tmp_path / "storm", home, tiny_weights)

    def ended(process: subprocess.Popen) -> str:
        printed, _ = process.communicate(timeout=600)
        assert storm.ranks() == {}
        return printed

    process = storm.start(more=("--processes", "2"))
    storm.wait_for_progress(process)
    os.kill(storm.ranks()[1], signal.SIGKILL)
    printed = ended(process)
    assert process.returncode == 1 and "Traceback" not in printed
    assert printed.count("process 2 of 2 was killed (SIGKILL)") == printed.count("Go on with:") == 1

    process = storm.start()
    storm.wait_for_progress(process)
    process.kill()
    ended(process)

    process = storm.start(*TORCHRUN, patience=12)
    storm.wait_for_progress(process)
    os.kill(storm.ranks()[1], signal.SIGSTOP)
    lines = [""]
    while not lines[-1].endswith("Go on with:\n"):
        lines.append(process.stdout.readline())
        assert lines[-1], f"it ended without saying why: {lines}"
    assert any(line.startswith("process 2 of 2 has given no sign of life for ") for line in lines)
    for number in (process.pid, *storm.ranks().values()):
        os.kill(number, signal.SIGKILL)
    ended(process)

    process = storm.start()
    assert "Look at" in ended(process)
    calm = runner.run(resolve(read_config_file(storm.out / "config.json")), tmp_path / "calm", report=False)
    found = RunResult.read(storm.out)
    assert found.done and found.accuracy == calm.accuracy and found.faa == calm.faa
    assert len(found.losses) == len(calm.losses) == 2 * storm.EPOCHS, "no epoch twice, none missing"
    assert [machine.get("processes", 1) for machine in found.rounding] == [2, 1]
    assert any("processes" in note and "up to rounding" in note for note in found.notes)
    assert not any("up to rounding" in note for note in calm.notes)


# ---------------------------------------------------------------------------------------------- refused


class Fake(Ranks):
    """One of several processes, of which the others are only said to exist."""

    def __init__(self, count: int, others: dict[str, object] | None = None) -> None:
        super().__init__(0, count)
        self.others = others

    def gather(self, own):
        if own is True:
            return [True]
        return [own, *(("elsewhere", {**own[1], **(self.others or {})}) for _ in range(self.count - 1))]

    def from_first(self, make):
        return make()


@pytest.mark.parametrize("what", ["version_of_vqprompt", "backbone_weights"])
def test_a_process_with_another_version_or_other_weights_is_refused(what):
    same = {"version_of_vqprompt": "1", "backbone_weights": "abc"}
    Fake(3).refuse_differences(**same)
    with pytest.raises(UserError, match=r"process 2 of 3 \(on elsewhere\) differs from process 1 .*: other, not"):
        Fake(3, {what: "other"}).refuse_differences(**same)


def test_differences_are_found_over_the_real_connection(of_two):
    refused = of_two["refused"]
    assert refused.startswith("process 2 of 2 (on ") and "in the color: blue, not red" in refused


@pytest.mark.parametrize(("count", "message"), [(17, "16 training images of task 1"), (9, "batches of 8 images")])
def test_more_processes_than_images_are_refused_before_any_work(tmp_path, tiny_weights, monkeypatch, count, message):
    config = runner.RunConfig(
        backbone=str(tiny_weights), size=28, tasks=[2, 2], train_per_class=8, batch_size=8, epochs=1
    )
    work = runner.Run(config, tmp_path / "out", lambda event: None, 60, None, (), 1)
    monkeypatch.setattr(runner.Run, "_read_saved", lambda *_: None)
    work.ranks = Fake(count)
    with pytest.raises(UserError, match=f"{count} processes cannot share .*{message}"):
        work.open(resume=False)
    assert not (tmp_path / "out").exists()


def test_a_device_that_processes_cannot_share_is_refused(monkeypatch):
    assert Fake(2).device("cpu") == "cpu"
    with pytest.raises(UserError, match="'cuda:1' with 2 processes"):
        Fake(2).device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"2 processes on .* 1 GPUs"):
        Fake(2).device("auto")


def test_processes_that_do_not_meet_give_up(monkeypatch):
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2"}  # nobody answers there
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "JOINING", timedelta(seconds=1))
    with pytest.raises(UserError, match=r"the 2 processes of this run did not meet at 127.0.0.1:9 within 1 seconds"):
        distributed.join()


def test_only_run_works_in_several_processes(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    status, _, error = command("methods")
    assert status == 2 and "without torchrun" in error


def test_bad_settings_are_refused_before_processes_are_started(command, tmp_path):
    status, _, error = command("run", "--out", tmp_path / "x", "--processes", "2", "--method", "nonsense")
    assert status == 2 and "nonsense" in error
    status, _, error = command("run", "--out", tmp_path / "x", "--processes", "0")
    assert status == 2 and "processes" in error


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_shares_cover_a_batch_once(size):
    batch = torch.arange(size)
    shares = [Part(size, rank, 3) for rank in range(3)]
    assert torch.cat([batch[share.start : share.stop] for share in shares]).tolist() == batch.tolist()
    assert all(len(batch[share.rows]) for share in shares), "everybody takes part"
    means = [share.weigh(batch[share.rows].double().mean()) for share in shares]
    assert float(sum(means)) == pytest.approx(batch.double().mean())

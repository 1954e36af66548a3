"""The command line as a person meets it: lists, refusals without tracebacks, and a real small run."""

import base64
import errno
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import command_environment
from PIL import Image
from rich.console import Console

from vqprompt import __version__
from vqprompt.commands import app as cli
from vqprompt.commands.console import console
from vqprompt.commands.progress_bar import progress_bar
from vqprompt.core.backbones.registry import BACKBONES
from vqprompt.core.files import lock_folder
from vqprompt.core.progress import Progress, Stage
from vqprompt.research.datasets import DATASETS
from vqprompt.research.learner.checkpoint import checksum
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.results.config import resolve
from vqprompt.research.runs import runner as runs
from vqprompt.research.runs.runner import Run

SMALL = ["--size", "28", "--epochs", "1", "--set", "train_per_class=6", "--set", "test_per_class=4"]

TRAINING_LOOP = "vqprompt.research.learner.learner.TrainingLoop"


@pytest.fixture
def no_training(monkeypatch):
    """Nothing may be learned before a refusal."""
    monkeypatch.setattr(TRAINING_LOOP, lambda *given: pytest.fail("training began"))


def write_images(folder: Path, classes=3, count=4) -> Path:
    for c in range(classes):
        (folder / f"class {c}").mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 16), (80 * c, 10 * i, 99)).save(folder / f"class {c}" / f"{i}.png")
    return folder


def test_version(command):
    assert command("--version")[1] == f"vqprompt {__version__}\n"


class TestLists:
    @pytest.mark.parametrize(
        ("name", "known"), [("methods", METHODS), ("backbones", BACKBONES), ("datasets", DATASETS)]
    )
    def test_one_line_each(self, command, name, known):
        status, out, _ = command(name)
        assert status == 0
        for entry in known:
            (line,) = [line for line in out.splitlines() if line.split()[:1] == [entry]]
            assert len(line.split()) > 4, "a name without a summary helps nobody"

    def test_a_narrow_terminal_cuts_no_word_of_the_backbones(self, command, monkeypatch):
        monkeypatch.setattr(console, "_width", 60)
        out = command("backbones")[1]
        assert "…" not in out and out.count("CC-BY-NC-4.0)") == 2 and max(map(len, out.splitlines()[:40])) <= 60

    def test_methods_count_the_parameters_that_prompt_and_the_adapters_that_every_task_adds(self, command):
        cells = [[cell.strip() for cell in line.split("│")] for line in command("methods")[1].splitlines()]
        counts = {row[0]: int(row[2].replace(",", "")) for row in cells if len(row) == 4 and row[2][:1].isdecimal()}
        assert counts["vq-prompt"] == 5 * 10 * 9 * 384
        assert 9 * counts["aper"] < counts["ease"] <= 10 * counts["aper"], "one task's adapters, and those of ten"

    def test_one_method_s_settings(self, command):
        status, out, _ = command("methods", "vq-prompt")
        assert status == 0
        for word in ("tau", "rebalancing.lr", "λ_q", "released", "0.4"):
            assert word in out

    def test_help_teaches(self, command):
        status, out, _ = command("run", "--help")
        assert status == 0
        for word in ("--data", "--tasks", "--resume", "--set", "--config", "--seed", "train/<class>"):
            assert word in out

    def test_help_has_arguments_in_capitals_and_no_types_behind_flags(self, command):
        _, out, _ = command("predict", "--help")
        assert "MODEL" in out and "IMAGES" in out and "bool" not in out.lower()


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--data", "no/such/folder"], ["no/such/folder", "neither a data set", "quickdraw50"]),
            (["--method", "vq-promt"], ["unknown method 'vq-promt'", "did you mean 'vq-prompt'"]),
            (["--backbone", "vit-s41"], ["vit-s41", "did you mean 'vit-s14'"]),
            (["--size", "75"], ["75", "14", "nearest that does is 70"]),
            (["--tasks", "51"], ["51 tasks of 50 classes", "1 to 50"]),
            (["--tasks", "30,30"], ["[30, 30]", "50 classes"]),
            (["--tasks", "five"], ["--tasks 'five'", "20,10,10"]),
            (["--set", "taw=5"], ["'taw'", "did you mean 'tau'"]),
            (["--set", "tau"], ["expected key=value"]),
            (["--set", "blocks=[0,99]"], ["blocks=[0, 99]"]),
            (["--epochs", "0"], ["epochs", "greater than or equal to 1"]),
            (["--validation", "1.5"], ["validation", "less than 1"]),
            (["--preset", "relased"], ["no preset 'relased'", "released"]),
            (["--config", "missing.toml"], ["missing.toml", "cannot be read"]),
            (["--device", "cuda:7"], ["cuda:7", "cpu"]),
            (["--device", "abacus"], ["abacus", "cpu"]),
            (["--set", "precision=fp8"], ["fp8", "bf16"]),
            (["--set", "compile=yes"], ["compile", "yes", "'on'"]),
            (["--set", "options=5"], ["options=5", "--set tau=5"]),
            (["--device", "meta"], ["device", "meta", "cuda:N"]),
            (["--size", "14000"], ["size", "14000", "2048"]),
            (["--set", "pool=1000000000"], ["pool=1000000000", "at most 100,000"]),
            (["--set", "length=999998"], ["GiB", "length=999998"]),
            (["--set", "pool=" + "1" * 5000], ["--set 'pool=1111", "too long"]),
            (["--tasks", "1" * 5000], ["--tasks", "20,10,10"]),
            (["--data", "x" * 300], ["xxx", "neither a data set"]),
            (["--data", "no/\x1b[2Jsuch"], ["\\x1b[2Jsuch"]),
        ],
    )
    def test_message_without_traceback(self, command, no_training, tmp_path, arguments, words):
        status, out, err = command("run", "--out", tmp_path / "out", *arguments)
        assert status == 2
        assert err.startswith("error: ") and "Traceback" not in out + err
        for word in words:
            assert word in err
        assert not (tmp_path / "out").exists(), "nothing is left behind"
        assert len(err) < 1500 and "\x1b[2J" not in err

    def test_bad_images_are_named_before_training(self, command, no_training, tmp_path):
        folder = write_images(tmp_path / "my [old] images")
        (folder / "class 1" / "broken [1].jpg").write_text("text")
        status, _, err = command("run", "--data", folder, "--tasks", 3, "--out", tmp_path / "out", "--size", 28)
        assert status == 2
        assert "class 1/broken [1].jpg: not an image; replace the file or take it out" in err
        assert "my [old] images" in err, "brackets are not markup"

    @pytest.mark.parametrize(
        ("tasks", "word"), [(4, "cannot make 4 tasks of 3 classes"), ("2,2", "do not fit 3 classes")]
    )
    def test_more_tasks_than_classes(self, command, no_training, tmp_path, tasks, word):
        folder = write_images(tmp_path / "images")
        status, _, err = command("run", "--data", folder, "--tasks", tasks, "--out", tmp_path / "out", "--size", 28)
        assert status == 2 and word in err

    @pytest.mark.parametrize(
        ("there", "out", "words"),
        [
            ("config.json", ".", "already holds a run; add --resume"),
            ("checkpoint.json", ".", "holds a learner that does not belong to a run"),
            ("file", "file", "is a file; give a folder"),
            ("file", "file/run", "file is a file; give a folder"),
            (None, "x" * 300, "File name too long"),
            (None, "/proc/nowhere/run", "/proc/nowhere"),
        ],
    )
    def test_out_that_cannot_be(self, command, no_training, tmp_path, there, out, words):
        if there:
            (tmp_path / there).write_text("{}")
        status, _, err = command("run", "--out", tmp_path / out, *SMALL)
        assert status == 2 and words in err and "Traceback" not in err

    def test_out_is_needed(self, command):
        status, _, err = command("run")
        assert status == 2 and "--out" in err

    def test_a_real_process_says_the_same(self, tmp_path, home):
        done = subprocess.run(
            [sys.executable, "-m", "vqprompt", "run", "--data", "nowhere", "--out", str(tmp_path / "out")],
            env=command_environment(home), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.startswith("error: nowhere") and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A real stream and the real backbone, in a process of its own: folder and what was printed."""
    folder = tmp_path_factory.mktemp("run") / "results"
    arguments = ["--data", "quickdraw50", "--tasks", "3,2,2", "--seed", "3", "--out", str(folder), *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "vqprompt", "run", *arguments, "--set", "rebalancing.epochs=2"],
        env=command_environment(folder.parent / "home", threads=2), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


class TestRun:
    def test_a_classifier_solved_for_trains_nothing(self, command, tmp_path):
        options = ["--set", "train_per_class=5", "--set", "test_per_class=4", "--tasks", "3,2", "--size", 28]
        options += ["--method", "linear", "--preset", "closed-form", "--out", tmp_path / "run"]
        status, printed, err = command("run", *options)
        assert status == 0, err
        metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
        assert err.splitlines()[0].startswith("data quickdraw50, method linear, backbone vit-s14, size 28, epochs 20, ")
        assert metrics["images_per_second"] is None and metrics["losses"] == []
        assert metrics["parameters"]["trainable"] == 0 and metrics["faa"] > 2 * 20, "five classes: chance is 20 %"
        assert "│        – │" in printed and "Nothing was trained." in (tmp_path / "run" / "report.html").read_text()

    def test_what_learned_in_any_task_was_trainable(self, command, tmp_path):
        options = ["--set", "train_per_class=5", "--set", "test_per_class=4", "--tasks", "3,2", "--size", 28]
        options += ["--epochs", 1, "--preset", "first-task", "--out", tmp_path / "run"]
        status, _, err = command("run", "--quiet", *options)
        assert status == 0 and err == ""
        metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
        assert metrics["parameters"]["trainable"] == 172_800 + 3 * (384 + 1), "prompts, keys, the first task's rows"

    def test_prints_a_table(self, finished):
        folder, printed = finished
        metrics = json.loads((folder / "metrics.json").read_text())
        for word in ("VQ-Prompt", "FAA", "CAA", "forgetting", f"{metrics['faa']:.2f}", "172,800", "report.html"):
            assert word in printed

    def test_metrics(self, finished):
        metrics = json.loads((finished[0] / "metrics.json").read_text())
        assert (metrics["method"], metrics["data"], metrics["backbone"]) == ("vq-prompt", "quickdraw50", "vit-s14")
        assert metrics["seed"] == 3 and metrics["done"] is True
        assert metrics["seconds"] > 0 and metrics["images_per_second"] > 0
        accuracy = metrics["accuracy"]
        assert [[a is None for a in row] for row in accuracy] == [[j < i for j in range(3)] for i in range(3)]
        for i, tested in enumerate([3 * 4, 2 * 4, 2 * 4]):
            for a in accuracy[i][i:]:
                assert 0 <= a <= 100 and a * tested / 100 == pytest.approx(round(a * tested / 100))
        last = [row[2] for row in accuracy]
        averages = [accuracy[0][0], (accuracy[0][1] + accuracy[1][1]) / 2, sum(last) / 3]
        assert metrics["faa"] == pytest.approx(averages[2])
        assert metrics["caa"] == pytest.approx(sum(averages) / 3)
        drops = [max(accuracy[0][:2]) - accuracy[0][2], accuracy[1][1] - accuracy[1][2]]
        assert metrics["forgetting"] == pytest.approx(sum(drops) / 2)
        assert [len(names) for names in metrics["tasks"]] == [3, 2, 2]
        assert metrics["parameters"]["prompting"] == 172_800
        assert [[sum(block) for block in use] for use in metrics["prompt_use"]["counts"]] == [
            [18] * 5,
            [12] * 5,
            [12] * 5,
        ]

    def test_config_repeats_the_run(self, finished):
        config = json.loads((finished[0] / "config.json").read_text())
        assert (config["tasks"], config["seed"], config["size"], config["epochs"]) == ([3, 2, 2], 3, 28, 1)
        assert (config["train_per_class"], config["test_per_class"]) == (6, 4)
        assert config["options"]["rebalancing"]["epochs"] == 2 and config["options"]["vq_weight"] == 0.4

    def test_files(self, finished):
        folder = finished[0]
        names = sorted(p.name for p in folder.iterdir())
        written = ["checkpoint.json", "classes.json", "config.json", "metrics.json", "report.html"]
        assert names == [*written, "state-3.safetensors"]
        page = (folder / "report.html").read_text()
        assert page.lstrip().lower().startswith("<!doctype html") and page.rstrip().endswith("</html>")
        assert "VQ-Prompt" in page and f"{json.loads((folder / 'metrics.json').read_text())['faa']:.1f}" in page

    def test_classes_add_up_to_the_accuracies_and_mistakes_have_pictures(self, finished):
        folder = finished[0]
        metrics, found = (json.loads((folder / name).read_text()) for name in ("metrics.json", "classes.json"))
        assert found["after"] == len(metrics["tasks"])
        assert [[c["name"] for c in found["classes"] if c["task"] == t] for t in range(3)] == metrics["tasks"]
        for task in range(3):
            own = [c for c in found["classes"] if c["task"] == task]
            share = sum(c["right"] for c in own) / sum(c["total"] for c in own)
            assert 100 * share == pytest.approx(metrics["accuracy"][task][-1])
        wrong = sum(c["total"] - c["right"] for c in found["classes"])
        sure = [m["probability"] for m in found["worst"]]
        assert len(sure) == min(wrong, 24) and sure == sorted(sure, reverse=True)
        assert all(m["label"] != m["answer"] for m in found["worst"])
        page = (folder / "report.html").read_text()
        assert page.count("<img") == len(sure) and "The worst mistakes" in page
        picture = Image.open(io.BytesIO(base64.b64decode(found["worst"][0]["picture"].partition(",")[2])))
        assert max(picture.size) <= 112

    def test_resuming_a_finished_run_is_harmless(self, finished, command, no_training):
        folder = finished[0]
        before = json.loads((folder / "metrics.json").read_text())
        tensors = (folder / "state-3.safetensors").read_bytes()
        status, out, err = command("run", "--out", folder, "--resume")
        assert status == 0, err
        assert "VQ-Prompt" in out
        after = json.loads((folder / "metrics.json").read_text())
        assert {**after, "hardware": ""} == {**before, "hardware": ""}
        assert (folder / "state-3.safetensors").read_bytes() == tensors

    def test_resuming_with_other_settings_is_refused(self, finished, command, no_training):
        status, _, err = command("run", "--out", finished[0], "--resume", "--epochs", 5)
        assert status == 2
        assert "epochs=1 then, 5 now" in err

    def test_resuming_when_the_classes_have_changed_is_refused(self, command, tmp_path, tiny_weights, monkeypatch):
        data = write_images(tmp_path / "images")
        out = ["run", "--data", data, "--tasks", 3, "--size", 28, "--epochs", 1, "--out", tmp_path / "run"]
        out += ["--backbone", tiny_weights]
        assert command(*out)[0] == 0
        (data / "class 1").rename(data / "class one")
        monkeypatch.setattr(TRAINING_LOOP, lambda *given: pytest.fail("training began"))
        status, _, err = command(*out, "--resume")
        assert status == 2 and "has other classes now" in err

    def test_resuming_with_other_images_is_refused(self, command, tmp_path, tiny_weights, monkeypatch):
        """The held-out ones would be others, and some of them learned from already."""
        data = write_images(tmp_path / "images", count=10)
        out = ["run", "--tasks", "1,1,1", "--size", 28, "--epochs", 1, "--out", tmp_path / "run"]
        out += ["--backbone", tiny_weights]
        with monkeypatch.context() as patch:
            test = Run.test
            patch.setattr(Run, "test", lambda run, task: pytest.fail("stop") if task.number else test(run, task))
            with pytest.raises(pytest.fail.Exception):
                command(*out, "--data", data)
        began = json.loads((tmp_path / "run" / "metrics.json").read_text())
        assert began["average_accuracy"] and not began["done"]
        learned = data / began["tasks"][0][0]
        spared = (learned / "0.png").rename(tmp_path / "0.png")
        monkeypatch.setattr(TRAINING_LOOP, lambda *given: pytest.fail("training began"))
        status, _, err = command(*out, "--data", data, "--resume")
        assert status == 2 and "has other images for task 1 now" in err
        spared.rename(learned / "0.png")
        monkeypatch.undo()
        moved = data.rename(tmp_path / "moved")  # the same ones at another place
        status, _, err = command(*out, "--data", moved, "--resume")
        assert status == 0, err

    def test_into_a_file_there_is_a_line_for_every_task(self, finished):
        for task in (1, 2, 3):
            assert re.search(rf"^task {task}/3 · \S.*, \d+% done, [\d.]+ s elapsed", finished[1], re.MULTILINE), (
                finished[1]
            )

    def test_notes_about_classes_left_out_and_images_held_out(self, command, tmp_path):
        options = ["--tasks", "2,2", "--validation", 0.5, "--method", "linear", "--preset", "closed-form", *SMALL]
        status, out, err = command("run", *options, "--out", tmp_path / "run")
        assert status == 0, err
        assert "note: 46 of 50 classes are in no task" in out and "Tested on 50% of the training images" in out

    def test_another_method_with_the_same_settings(self, finished):
        given = resolve({"method": "linear"}, file=json.loads((finished[0] / "config.json").read_text()))
        assert (given.method, given.epochs, given.tasks) == ("linear", 1, [3, 2, 2])

    def test_a_preset_is_never_passed_over(self, finished, command, no_training, tmp_path):
        status, _, err = command("run", "--out", finished[0], "--resume", "--preset", "closed-form")
        assert status == 2 and "rebalancing.how=train then, closed-form now" in err
        given = resolve({"rebalancing.lr": 0.5}, "released", json.loads((finished[0] / "config.json").read_text()))
        assert given.options["vq_weight"] == 0.1 and given.options["rebalancing"]["lr"] == 0.5
        assert given.options["rebalancing"]["epochs"] == 2, "as the file has it"

    def test_a_run_that_is_older_than_an_option_goes_on(self, finished, command, no_training, tmp_path):
        folder = shutil.copytree(finished[0], tmp_path / "old")
        for name in ("config.json", "checkpoint.json"):
            content = json.loads((folder / name).read_text())
            del content["options"]["learn"]
            for key in ("trainable", "images", "seconds_in_task"):  # nor were these kept
                content.get("run", {}).pop(key, None)
            content |= {"checksum": checksum(content)} if "checksum" in content else {}
            (folder / name).write_text(json.dumps(content))
        before = json.loads((folder / "metrics.json").read_text())
        status, out, err = command("run", "--out", folder, "--resume")
        assert status == 0 and "VQ-Prompt" in out, err
        assert json.loads((folder / "metrics.json").read_text())["parameters"] == before["parameters"]

    def test_two_at_once_is_refused(self, finished, command, no_training):
        with lock_folder(finished[0]):
            status, _, err = command("run", "--out", finished[0], "--resume")
        assert status == 2 and "another process is at work here" in err

    def test_a_learner_saved_over_a_run_is_noticed(self, finished, command, no_training, tmp_path):
        folder = shutil.copytree(finished[0], tmp_path / "over")
        content = json.loads((folder / "checkpoint.json").read_text())
        del content["run"]
        (folder / "checkpoint.json").write_text(json.dumps({**content, "checksum": checksum(content)}))
        status, _, err = command("run", "--out", folder, "--resume")
        assert status == 2 and "a learner was saved over this run" in err

    def test_the_folder_is_not_overwritten(self, finished, command, no_training):
        status, _, err = command("run", "--out", finished[0])
        assert status == 2 and "already holds a run" in err


class TestPredict:
    @pytest.fixture
    def pictures(self, tmp_path):
        with np.load(Path(cli.__file__).parent.parent / "assets" / "quickdraw50.npz") as packed:
            drawings = {str(name): packed["images"][c, 80] for c, name in enumerate(packed["classes"])}
        for name in ("one [b]", "two"):
            (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(drawings["apple"]).save(tmp_path / "pictures" / "one [b]" / "ä.png")
        Image.fromarray(drawings["tree"]).save(tmp_path / "pictures" / "two" / "b.PNG")
        (tmp_path / "pictures" / "notes.txt").write_text("not an image")
        return tmp_path / "pictures"

    def test_broken_images_do_not_stop_the_others(self, finished, command, pictures):
        (pictures / "two" / "broken.png").write_text("text")
        (pictures / "empty.jpg").touch()
        status, out, err = command("predict", finished[0], pictures, pictures / "two" / "b.PNG")
        assert status == 2 and len(out.splitlines()) == 3
        assert "2 of 5 images cannot be used" in err and "broken.png: not an image" in err and "empty.jpg" in err

    def test_hidden_files_are_passed_over(self, finished, command, pictures):
        (pictures / "._a.png").write_bytes(b"what a Mac leaves behind")
        status, out, err = command("predict", finished[0], pictures)
        assert status == 0 and len(out.splitlines()) == 2, err

    def test_says_what_the_learner_says(self, finished, command, pictures):
        files = sorted(pictures.rglob("*.[pP]*"))
        learner = Learner.load(finished[0])
        status, out, err = command("predict", finished[0], pictures, "--top", 2, "--json")
        assert status == 0, err
        printed = [json.loads(line) for line in out.splitlines()]
        assert [t["image"] for t in printed] == [str(file) for file in files]
        for t, scores in zip(printed, learner.predict_proba(files), strict=True):
            shares, places = scores.topk(2)
            assert list(t["classes"]) == [learner.classes[p] for p in places]
            assert list(t["classes"].values()) == pytest.approx(shares.tolist())
        status, out, _ = command("predict", finished[0], *files)
        assert status == 0
        assert [line.split(": ")[0] for line in out.splitlines()] == [str(file) for file in files]
        assert all(next(iter(t["classes"])) in line for t, line in zip(printed, out.splitlines(), strict=True))

    def test_refusals(self, finished, command, tmp_path):
        status, _, err = command("predict", finished[0], tmp_path / "nowhere.png")
        assert status == 2 and "nowhere.png: no such image file" in err
        status, _, err = command("predict", finished[0], tmp_path)
        assert status == 2 and "no image in this folder" in err
        status, _, err = command("predict", tmp_path, tmp_path / "x.png")
        assert status == 2 and "no checkpoint.json here" in err


class TestTrouble:
    """What a person sees when the machine or the person stops a run."""

    def run_that_raises(self, monkeypatch, error):
        def run(config, out, *rest, **named):
            raise error

        monkeypatch.setattr(runs, "run", run)

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), ["OUT: No space left", "free some space"]),
            (RuntimeError("I/O error: No space left on device (os error 28)"), ["OUT: No space left"]),
            (
                PermissionError(errno.EACCES, "Permission denied", "/x/metrics.json"),
                ["/x/metrics.json: Permission denied"],
            ),
            (OSError(errno.EROFS, "Read-only file system", "/x/y"), ["/x/y: Read-only file system; choose"]),
            (OSError(errno.EIO, "Input/output error", "/x/y"), ["/x/y: Input/output error"]),
            (OSError(errno.EIO, "Input/output error"), ["OUT: Input/output error; check the disk"]),
            (RecursionError("maximum recursion depth exceeded"), ["nested too deeply"]),
        ],
    )
    def test_one_sentence_instead_of_a_traceback(self, command, monkeypatch, tmp_path, error, words):
        self.run_that_raises(monkeypatch, error)
        status, _, err = command("run", "--out", tmp_path / "run")
        assert status == 2 and err.startswith("error: ") and "Traceback" not in err
        for word in words:
            assert word.replace("OUT", str(tmp_path / "run")) in err

    def test_other_errors_keep_their_traceback(self, command, monkeypatch, tmp_path):
        self.run_that_raises(monkeypatch, RuntimeError("a mistake of ours"))
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            command("run", "--out", tmp_path / "run")

    def test_ctrl_c_says_how_to_go_on(self, command, monkeypatch, tmp_path):
        self.run_that_raises(monkeypatch, KeyboardInterrupt())
        out = tmp_path / "my runs"
        status, _, err = command("run", "--tasks", "3,2", "--out", out)
        assert status == 130 and "are kept. Go on with:" in err
        assert err.endswith(f"  vqprompt run --tasks 3,2 --out '{out}' --resume\n")
        status, _, err = command("run", f"--out={out}", "--resume")
        assert err.endswith(f"  vqprompt run '--out={out}' --resume\n"), "not twice"

    def test_ctrl_c_in_other_commands(self, command, monkeypatch, tmp_path):
        monkeypatch.setattr("vqprompt.commands.bench.run_with_bars", lambda *given: interrupt())
        status, _, err = command("bench", "run", "cub200", "--small", "--out", tmp_path)
        assert status == 130 and err.endswith(f"  vqprompt bench run cub200 --small --out {tmp_path}\n")
        monkeypatch.setattr("vqprompt.core.data.source.images_in", lambda path: interrupt())
        status, _, err = command("predict", tmp_path, tmp_path)
        assert status == 130 and err == "\ninterrupted\n"


def interrupt():
    raise KeyboardInterrupt


class TestProgress:
    @pytest.fixture
    def clock(self):
        return [100.0]

    def lines(self, file: io.StringIO) -> list[str]:
        return [line for line in file.getvalue().splitlines() if line.strip()]

    def test_into_a_file_a_line_per_task_and_every_ten_seconds(self, clock):
        file = io.StringIO()
        with progress_bar(Console(file=file, width=40, get_time=lambda: clock[0])) as report:
            report(Progress(Stage.DOWNLOADING, 1, 1))  # short work is not worth a line
            for second in (2, 4, 12):
                clock[0] = 100.0 + second
                report(Progress(Stage.DECODING, (second - 2) // 2, 50))
            for second in range(41):
                clock[0] = 120.0 + second
                report(Progress(Stage.LEARNING, second, 100, second // 25, 4))
        lines = self.lines(file)
        assert lines == [
            "decoding images 5/50, 10% done, 12 s elapsed, 1 min 30 s remaining",
            "task 1/4 · learning, 0% done, 20 s elapsed",
            "task 1/4 · learning, 10% done, 30 s elapsed, 1 min 30 s remaining",
            "task 1/4 · learning, 20% done, 40 s elapsed, 1 min 20 s remaining",
            "task 2/4 · learning, 25% done, 45 s elapsed, 1 min 15 s remaining",
            "task 2/4 · learning, 35% done, 55 s elapsed, 1 min 5 s remaining",
        ]

    def test_a_resumed_run_is_not_thought_to_be_fast(self, clock):
        file = io.StringIO()
        with progress_bar(Console(file=file, width=40, get_time=lambda: clock[0])) as report:
            report(Progress(Stage.LEARNING, 80, 100, 8, 10))
            clock[0] += 10
            report(Progress(Stage.LEARNING, 81, 100, 8, 10))
        assert self.lines(file)[-1] == "task 9/10 · learning, 81% done, 10 s elapsed, 3 min 10 s remaining"

    def test_a_stage_as_long_as_the_one_before_has_its_own_speed_and_the_clock_goes_on(self, clock):
        file = io.StringIO()
        with progress_bar(Console(file=file, width=40, get_time=lambda: clock[0])) as report:
            for stage, seconds in ((Stage.DECODING, 1), (Stage.STATISTICS, 4)):
                for done in range(11):
                    report(Progress(stage, done, 10))
                    clock[0] += seconds
        assert self.lines(file)[-1] == "taking statistics 9/10, 90% done, 47 s elapsed, 4.0 s remaining"

    def test_in_a_terminal_there_is_one_bar(self):
        file = io.StringIO()
        with progress_bar(Console(file=file, width=100, force_terminal=True), "VQ-Prompt") as report:
            for done in (0, 50):
                report(Progress(Stage.LEARNING, done, 100, 0, 2))
        shown = file.getvalue()
        assert "elapsed" in shown and "remaining" in shown and "VQ-Prompt · task 1/2 · learning" in shown
        assert "% done" not in shown


def test_help_does_not_wait_for_what_only_some_commands_need(home):
    """`vqprompt --help` answers at once because large packages are imported by the commands; and so does the import."""
    code = (
        "import sys, vqprompt, vqprompt.commands.app\n"
        "for words in ('--help', 'run --help', 'bench --help', '--version'):\n"
        "    sys.argv = ['vqprompt', *words.split()]\n"
        "    try: vqprompt.commands.app.main()\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "print(sorted({'torch', 'matplotlib', 'sklearn', 'scipy', 'PIL', 'mlflow', 'tensorboard', 'huggingface_hub'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=command_environment(home), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_public_names_are_there_when_asked_for():
    import vqprompt

    assert {"Learner", "Stream", "Training", "open_dataset", "load_backbone", "METHODS"} <= set(vqprompt.__all__)
    assert all(getattr(vqprompt, name) is not None for name in vqprompt.__all__)
    assert vqprompt.METHODS is METHODS and vqprompt.Learner is Learner and "Learner" in dir(vqprompt)
    with pytest.raises(AttributeError, match="no attribute 'Lerner'"):
        _ = vqprompt.Lerner


class TestPrecedence:
    def test_command_line_over_set_over_config(self, command, tmp_path, monkeypatch):
        (tmp_path / "c.toml").write_text('epochs = 9\nbatch_size = 9\nlr = 9.0\nmethod = "vq-prompt-s"\ntau = 9.0')
        found = []

        class Stop(Exception):
            pass

        def stop(config, *rest, **named):
            found.append(config)
            raise Stop

        monkeypatch.setattr(runs, "run", stop)
        monkeypatch.setattr(
            sys, "argv",
            ["vqprompt", "run", "--out", str(tmp_path / "o"), "--config", str(tmp_path / "c.toml"),
             "--set", "epochs=5", "--set", "batch_size=5", "--set", "tau=5", "--epochs", "2"],
        )  # fmt: skip
        with pytest.raises(Stop):
            cli.main()
        (config,) = found
        assert (config.epochs, config.batch_size, config.lr, config.options["tau"]) == (2, 5, 9.0, 5)
        assert config.method == "vq-prompt-s"


def test_a_folder_of_one_s_own(command, tmp_path):
    """Split 80/20, said so, and learned: the whole way from PNG files to a report."""
    folder = write_images(tmp_path / "meine Bilder")
    (folder / "notes.txt").write_text("where they come from")
    quick = ["--tasks", 3, "--method", "linear", "--size", 28, "--epochs", 1]
    status, out, err = command("run", "--data", folder, "--out", tmp_path / "r", *quick)
    assert status == 0, err
    assert "20% of each class held out" in out and "notes.txt" in out
    metrics = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert sorted(name for task in metrics["tasks"] for name in task) == ["class 0", "class 1", "class 2"]
    assert (tmp_path / "r" / "report.html").exists()
